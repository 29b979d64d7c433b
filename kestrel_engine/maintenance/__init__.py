"""What is done with a model and a machine besides serving: fetching, verifying, diagnosing.

Loads nothing heavy until it is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import RuntimeConfig
from .finding import Finding

if TYPE_CHECKING:
    from ..checkpoint.progress import Progress
    from .model_cache import Downloaded
    from .model_download import Download

__all__ = [
    "Finding",
    "answer",
    "check_names",
    "diagnose",
    "download",
    "downloaded",
    "remove",
    "verify",
]


def check_names(config: RuntimeConfig) -> None:
    """Raises ConfigError if there is no such model, path or device, as creating an engine would.

    Reads no weights and asks no hub. Loads torch only for a CUDA device that is named.
    """
    from ..checkpoint.catalog import architecture, resolve
    from ..factory import check_device

    if config.random_weights:
        architecture(config.model, config.model_path)
    else:
        resolve(config.model, config.model_path, config.tokenizer_path)
    if config.device.startswith("cuda"):
        check_device(config)


def diagnose(config: RuntimeConfig) -> Iterator[Finding]:
    """Whether this machine can serve ``config``, one finding each. Loads no model and asks no hub."""
    from .device import check_device, check_images
    from .model import check_model

    yield from check_device(config)
    yield from check_images()
    yield from check_model(config)


def download(
    config: RuntimeConfig, folder: Path | None = None, *, progress: Progress | None = None
) -> Download:
    """Fetches a model's files into the hub's cache, or copies them into ``folder`` with their checksums.

    Raises ConfigError, DownloadError, CheckpointError.
    """
    from .model_download import download

    return download(config, folder, progress=progress)


def downloaded() -> tuple[Downloaded, ...]:
    """Models in the hub's cache. Asks no hub."""
    from .model_cache import downloaded

    return downloaded()


def remove(name: str) -> Downloaded:
    """Deletes a model from the hub's cache. Raises ConfigError if it isn't there."""
    from .model_cache import remove

    return remove(name)


def verify(
    config: RuntimeConfig, *, record: bool = False, progress: Progress | None = None
) -> Iterator[Finding]:
    """Files, checksums, tensors and values, one finding each. ``record``: where nothing is recorded, SHA256SUMS is."""
    from .model_verification import verify

    return verify(config, record=record, progress=progress)


async def answer(
    config: RuntimeConfig, image: str | None = None, *, progress: Progress | None = None
) -> Finding:
    """Whether the model gives the answer that is known for it. Loads it. Raises KestrelError."""
    from .known_answers import answer

    return await answer(config, image, progress=progress)
