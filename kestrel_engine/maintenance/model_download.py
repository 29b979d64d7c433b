"""Downloads a model's files into the hub's cache, or into a folder with their checksums, for use without a hub."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint import checksums
from ..checkpoint.bucket.address import is_address, parse_address
from ..checkpoint.bucket.bucket import ModelBucket, upload
from ..checkpoint.config_file import NAME as CONFIG_NAME
from ..checkpoint.files import INDEX_SUFFIX, shard_names
from ..checkpoint.open import OpenedModel, open_model
from ..checkpoint.progress import log_progress
from ..checkpoint.refiner_file import NAME as REFINER_NAME
from ..checkpoint.tokenizer_file import NAME as TOKENIZER_NAME
from ..checkpoint.weights.plan import checkpoint_error
from ..config.runtime import RuntimeConfig
from ..errors import DownloadError
from ..types.calibration import FILE_NAME as CALIBRATION_NAME

if TYPE_CHECKING:
    from ..checkpoint.hub import Hub
    from ..types.progress import Progress

_PIECE = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Download:
    """A downloaded model. ``name``: the name under which it is served. ``files``: their paths or addresses."""

    name: str
    files: tuple[Path | str, ...]
    size_bytes: int


def download(
    config: RuntimeConfig,
    to: Path | str | ModelBucket | None = None,
    *,
    hub: Hub | None = None,
    progress: Progress | None = None,
) -> Download:
    """Downloads missing files into the hub's cache, and checks that the tensors' names and shapes are the model's.
    ``to``: copies all files to this folder, or uploads them to s3://BUCKET/PREFIX, under names that --weights finds,
    and writes SHA256SUMS. Raises ConfigError, DownloadError and CheckpointError."""
    if is_address(to):
        to = ModelBucket(parse_address("to", str(to)))
    opened = open_model(config, hub=hub, progress=progress)
    if opened.plan.faults:
        raise checkpoint_error(str(opened.files[0].parent), opened.plan.faults, hint=opened.hint)
    files = named_files(opened)
    size_bytes = sum(file.stat().st_size for file in files.values())
    copies: tuple[Path | str, ...]
    if isinstance(to, ModelBucket):
        copies = upload(to, files, progress or log_progress("uploading"))
    elif to is not None:
        folder = Path(os.path.expanduser(to))
        try:
            copies = _copy(files, folder, progress or log_progress("copying"))
        except OSError as error:
            raise DownloadError(f"can't write into {folder}: {error.strerror or error}") from None
    else:
        copies = tuple(files.values())
    return Download(opened.name, copies, size_bytes)


def named_files(opened: OpenedModel) -> dict[str, Path]:
    """Returns all files of a model, by the name that each has in a folder that holds the whole model."""
    files = {file.name: file for file in opened.files}
    folder = opened.files[0].parent
    for index in sorted(folder.glob(f"*{INDEX_SUFFIX}")):
        if set(shard_names(index)) == set(files):
            files[index.name] = index
            break
    for name in (CONFIG_NAME, REFINER_NAME, CALIBRATION_NAME):
        if (beside := folder / name).is_file():
            files[name] = beside
    files[TOKENIZER_NAME] = opened.tokenizer_path
    return files


def _copy(files: dict[str, Path], folder: Path, report: Progress) -> tuple[Path, ...]:
    """Copies and hashes files. A copy gets its final name only when it is complete. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    total, done = sum(file.stat().st_size for file in files.values()), 0
    digests, copies = {}, []
    for name, file in files.items():
        target, part = folder / name, folder / f"{name}.part"
        if target.exists() and target.samefile(file):
            digests[name] = checksums.checksum(target)
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
        digests[name] = digest.hexdigest()
        copies.append(target)
    checksums.write_sums(folder, digests)
    return tuple(copies)
