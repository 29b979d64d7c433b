"""The data sets of ``eval``, each a module with a `Benchmark`; ``drawn`` has several."""

from __future__ import annotations

import importlib

from ...flags import SettingsError
from ...parser import suggestion
from ..benchmark import Benchmark

DRAWN = ("scenes", "text", "charts", "icons", "screens")
NAMES = ("coco", *DRAWN)
_REMOVED = ("chartqa", "refcoco", "screenspot")


def benchmark(name: str) -> Benchmark:
    """The data set of that name. Raises SettingsError."""
    if name in _REMOVED:
        raise SettingsError(
            f"the data set {name!r} is no longer here; use lmms-eval, or rows in the form of the built-in sets"
        )
    if name not in NAMES:
        hint = suggestion(name, NAMES) or f"; the sets are {', '.join(NAMES)}"
        raise SettingsError(f"unknown data set {name!r}{hint}")
    found: Benchmark
    if name in DRAWN:
        found = importlib.import_module(f"{__name__}.drawn").BENCHMARKS[name]
    else:
        found = importlib.import_module(f"{__name__}.{name}").BENCHMARK
    return found
