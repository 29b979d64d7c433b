"""CarriedKernels: finds compiled kernels in a folder that an image or a volume carries, before Triton's own cache.

Triton's cache notes the absolute path of each file, and makes folders where it only looks. A carried folder may lie
elsewhere than where it was filled, and may be read-only. What it lacks is compiled into Triton's own cache.
"""

from __future__ import annotations

import json
from pathlib import Path

from triton import knobs
from triton.runtime.cache import FileCacheManager

_folders: list[Path] = []


class CarriedKernels(FileCacheManager):
    """Triton makes one for each kernel; ``key`` names the kernel's subfolder."""

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
