"""The data sets of ``eval``, each a module with a `Benchmark`."""

from __future__ import annotations

import importlib

from ...flags import SettingsError
from ...parser import suggestion
from ..benchmark import Benchmark

_HERE = ("chartqa", "refcoco", "screenspot", "coco")
MODULES = {name: f"{__name__}.{name}" for name in _HERE}
"""The module of each set. A program may add sets of its own, as training/scenes/evaluate.py does."""


def benchmark(name: str) -> Benchmark:
    """The data set of that name. Raises SettingsError."""
    if name not in MODULES:
        hint = suggestion(name, MODULES) or f"; the sets are {', '.join(MODULES)}"
        raise SettingsError(f"unknown data set {name!r}{hint}")
    found: Benchmark = importlib.import_module(MODULES[name]).BENCHMARK
    return found
