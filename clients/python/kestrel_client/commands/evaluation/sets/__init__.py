"""The data sets of ``eval``, each a module with a `Benchmark`."""

from __future__ import annotations

import importlib

from ...flags import SettingsError
from ...parser import suggestion
from ..benchmark import Benchmark

NAMES = ("chartqa", "refcoco", "screenspot", "coco")


def benchmark(name: str) -> Benchmark:
    """The data set of that name. Raises SettingsError."""
    if name not in NAMES:
        hint = suggestion(name, NAMES) or f"; the sets are {', '.join(NAMES)}"
        raise SettingsError(f"unknown data set {name!r}{hint}")
    found: Benchmark = importlib.import_module(f"{__name__}.{name}").BENCHMARK
    return found
