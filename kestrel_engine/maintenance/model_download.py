"""A model's files for later: in the hub's cache, or in a folder that needs no hub, with their checksums."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint import checksums
from ..checkpoint.config_file import NAME as CONFIG_NAME
from ..checkpoint.files import INDEX_SUFFIX, shard_names
from ..checkpoint.open import OpenedModel, open_model
from ..checkpoint.progress import log_progress
from ..checkpoint.tokenizer_file import NAME as TOKENIZER_NAME
from ..checkpoint.weights.plan import checkpoint_error
from ..config import RuntimeConfig
from ..errors import DownloadError

if TYPE_CHECKING:
    from ..checkpoint.hub import Hub
    from ..checkpoint.progress import Progress

_PIECE = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Download:
    """``files``: where they are now. ``config`` of the model is served as ``name``."""

    name: str
    files: tuple[Path, ...]
    size_bytes: int


def download(
    config: RuntimeConfig,
    folder: Path | None = None,
    *,
    hub: Hub | None = None,
    progress: Progress | None = None,
) -> Download:
    """Fetches what is not there and checks that names and shapes are the model's. Into ``folder`` everything is copied
    under the names by which it is found there, with SHA256SUMS.

    Raises ConfigError, DownloadError, CheckpointError.
    """
    opened = open_model(config, hub=hub, progress=progress)
    if opened.plan.faults:
        raise checkpoint_error(str(opened.files[0].parent), opened.plan.faults, hint=opened.hint)
    files = named_files(opened)
    if folder is not None:
        try:
            copies = _copy(files, folder, progress or log_progress("copying"))
        except OSError as error:
            raise DownloadError(f"can't write into {folder}: {error.strerror or error}") from None
    else:
        copies = tuple(files.values())
    return Download(opened.name, copies, sum(file.stat().st_size for file in copies))


def named_files(opened: OpenedModel) -> dict[str, Path]:
    """All that a model is made of, by the names under which one folder can hold it."""
    files = {file.name: file for file in opened.files}
    folder = opened.files[0].parent
    for index in sorted(folder.glob(f"*{INDEX_SUFFIX}")):
        if set(shard_names(index)) == set(files):
            files[index.name] = index
            break
    if (config := folder / CONFIG_NAME).is_file():
        files[CONFIG_NAME] = config
    files[TOKENIZER_NAME] = opened.tokenizer_path
    return files


def _copy(files: dict[str, Path], folder: Path, report: Progress) -> tuple[Path, ...]:
    """Hashes on the way; a file has its name only when it is whole. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    total, done = sum(file.stat().st_size for file in files.values()), 0
    sums, copies = {}, []
    for name, file in files.items():
        target, part = folder / name, folder / f"{name}.part"
        if target.exists() and target.samefile(file):
            sums[name] = checksums.checksum(target)
            copies.append(target)
            continue
        digest = hashlib.sha256()
        try:
            with file.open("rb") as source, part.open("wb") as sink:
                while piece := source.read(_PIECE):
                    sink.write(piece)
                    digest.update(piece)
                    done += len(piece)
                    report(done, total, f"copying {name}")
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
        sums[name] = digest.hexdigest()
        copies.append(target)
    checksums.write_sums(folder, sums)
    return tuple(copies)
