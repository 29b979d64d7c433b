"""Compiled kernels: where this package finds them, their keys, and how often Triton compiles."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import pkgutil
import threading
from pathlib import Path
from typing import Any
from weakref import WeakSet

from triton import knobs
from triton.runtime.cache import FileCacheManager
from triton.runtime.jit import JITFunction

from ..types.info import CompileCounts

_folders: list[Path] = []


class CarriedKernels(FileCacheManager):
    """Finds compiled kernels in a folder that an image or a volume carries, before Triton's own cache. Triton makes one
    for each kernel; ``key`` names the kernel's subfolder. Triton's cache notes the absolute path of each file. A
    carried folder may have moved, and may be read-only. What it lacks goes to Triton's own cache.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        carried = [] if override or dump else [folder / key for folder in _folders]
        self._carried = [folder for folder in carried if folder.is_dir()]
        try:
            super().__init__(key, override, dump)
        except OSError:
            # Triton's own folder can't be written. That matters only for kernels that are not carried.
            if not self._carried:
                raise

    def get_file(self, filename: str) -> str | None:
        for folder in self._carried:
            if (folder / filename).is_file():
                return str(folder / filename)
        found: str | None = super().get_file(filename)
        return found

    def get_group(self, filename: str) -> dict[str, str] | None:
        for folder in self._carried:
            try:
                group = json.loads((folder / f"__grp__{filename}").read_text("utf-8"))
                paths = {name: folder / name for name in group["child_paths"]}
            except (OSError, ValueError, KeyError, TypeError):
                continue  # Damaged: another folder may have it, or it is compiled.
            if paths and all(path.is_file() for path in paths.values()):
                return {name: str(path) for name, path in paths.items()}
        found: dict[str, str] | None = super().get_group(filename)
        return found


def use_carried_kernels(folder: Path) -> None:
    """From now on, all kernels of this process are looked up in ``folder`` too, before Triton's own cache."""
    if folder not in _folders:
        _folders.append(folder)
    knobs.cache.manager_class = CarriedKernels


@functools.cache
def settle_keys() -> None:
    """Computes the keys of all kernels of this package in one order. Call it before the first launch. The key of a
    kernel has the constants that its source reads. Triton (3.6, 3.7) adds those of a function that it calls only if
    that function had its key before. So processes that launch in another order would look for different files.
    """
    package = importlib.import_module(__package__ or "")
    names = [each.name for each in pkgutil.walk_packages(package.__path__, f"{__package__}.")]
    for name in sorted(names):
        functions = vars(importlib.import_module(name))
        for _, function in sorted(functions.items()):
            # Interpreted functions have no keys.
            if isinstance(function, JITFunction):
                _ = function.cache_key


logger = logging.getLogger(__name__)


class CompileMeter:
    """Thread-safe counters of compilations. One in a thread that serves logs a warning: requests wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = CompileCounts()
        self._serving: WeakSet[threading.Thread] = WeakSet()

    def note_serving(self, thread: threading.Thread) -> None:
        """Notes that requests wait for what ``thread`` does from now on."""
        self._serving.add(thread)

    @property
    def counts(self) -> CompileCounts:
        return self._counts

    def note(self, name: str, seconds: float, *, cached: bool) -> None:
        """Counts a compilation in this thread. ``cached``: the kernel came from the cache of an earlier process."""
        with self._lock:
            before = self._counts
            self._counts = CompileCounts(
                compiled=before.compiled + (not cached),
                cached=before.cached + cached,
                seconds=before.seconds + seconds,
            )
        if not cached and threading.current_thread() in self._serving:
            logger.warning("kernel %s was compiled while serving, in %.2f s", name, seconds)


_meter: CompileMeter | None = None


def watch_compiler() -> CompileMeter:
    """Returns the meter of the process, which listens from the first call on. An earlier listener stays active."""
    global _meter
    if _meter is None:
        _meter, before = CompileMeter(), knobs.compilation.listener
        knobs.compilation.listener = _listener(_meter, before)
    return _meter


def _listener(meter: CompileMeter, before: Any) -> Any:
    """Returns a listener for Triton, which calls it with keyword arguments only, and with times in microseconds."""

    def listen(**event: Any) -> None:
        times = event["times"]
        spent = times.ir_initialization + times.total_lowering + times.store_results
        name = event["metadata"].get("name", "without a name")
        meter.note(name, spent / 1e6, cached=event["cache_hit"])
        if before is not None:
            before(**event)

    return listen
