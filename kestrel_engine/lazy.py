"""Names of a package that are imported at their first use, so that to import the package is cheap."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazily(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Returns the ``__getattr__`` of ``package``. ``homes``: the names of each module, whose name may be relative."""
    by_name = {name: module for module, names in homes.items() for name in names}

    def found(name: str) -> Any:
        if name not in by_name:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(by_name[name], package), name)

    return found
