"""Maintenance of a model and a machine: downloading, verifying and diagnosing.

The functions import torch and other large packages when they are called, so importing this package is cheap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.runtime import RuntimeConfig
from ..confinement.steps import hide_memory
from ..errors import ConfigError
from .finding import Finding

if TYPE_CHECKING:
    from ..compiling.models import CompiledKernels
    from ..types.progress import Progress
    from .labelled_images import LabelledImage
    from .model_cache import Downloaded
    from .model_download import Download
    from .score_calibration import CalibrationReport

__all__ = [
    "Finding",
    "answer",
    "calibrate",
    "check_names",
    "check_slow_device",
    "compile_kernels",
    "diagnose",
    "download",
    "downloaded",
    "hide_memory",
    "read_labelled_images",
    "remove",
    "verify",
]


def check_names(config: RuntimeConfig) -> None:
    """Checks that the model, the paths and the device of ``config`` exist, as creating an engine does.

    It reads no weights and sends no request to the hub. It imports torch only if ``config`` names a CUDA device. Raises
    ConfigError.
    """
    from ..building.device import check_device

    check_model_names(config)
    if config.device.startswith("cuda"):
        check_device(config)


def check_model_names(config: RuntimeConfig) -> None:
    """Checks that the model and the paths of ``config`` exist. Does not import torch. Raises ConfigError."""
    served_name(config)


def is_model_name(model: str) -> bool:
    """Whether ``model`` is a known name or has the form of a hub id, so that it names no file. Does not look at the
    disk."""
    from ..checkpoint.catalog import is_name

    return is_name(model)


def served_name(config: RuntimeConfig) -> str:
    """The name under which the model of ``config`` will be served. Does not import torch. Raises ConfigError."""
    from ..checkpoint.catalog import architecture, random_name, resolve

    if config.random_weights:
        return random_name(architecture(config.model, config.model_path)[0])
    return resolve(config.model, config.model_path, config.tokenizer_path).name


def diagnose(config: RuntimeConfig) -> Iterator[Finding]:
    """Checks whether this machine can serve ``config``. Yields one finding for each check.

    It loads no model and sends no request to the hub.
    """
    from .device import check_confinement, check_device, check_images
    from .model import check_model

    yield from check_device(config)
    yield from check_images()
    yield from check_confinement(config.confine)
    yield from check_model(config)


def check_slow_device(config: RuntimeConfig) -> Iterator[Finding]:
    """Yields the findings of ``diagnose`` about memory and time for a large model on this machine's CPU.

    It loads no model and sends no request.
    """
    from .model import check_fit, model_of

    model = model_of(config)
    if model is not None:
        memory, *speed = check_fit(config, model)
        yield from ((memory, *speed) if speed else ())


def download(
    config: RuntimeConfig, to: Path | str | None = None, *, progress: Progress | None = None
) -> Download:
    """Downloads a model's files into the hub's cache, or copies them with their checksums ``to`` a folder or to
    s3://BUCKET/PREFIX.

    Raises ConfigError, DownloadError and CheckpointError.
    """
    from ..checkpoint.bucket.address import is_address, parse_address
    from ..checkpoint.bucket.bucket import ModelBucket
    from .model_download import download

    if to is None or not is_address(to):
        return download(config, None if to is None else Path(to).expanduser(), progress=progress)
    return download(config, ModelBucket(parse_address("to", str(to))), progress=progress)


def compile_kernels(
    configs: Sequence[RuntimeConfig],
    arch: str,
    folder: Path,
    *,
    num_sms: int | None = None,
    progress: Progress | None = None,
) -> Iterator[CompiledKernels]:
    """Compiles the kernels of each configuration for cards of ``arch`` into ``folder``. Needs no GPU.

    ``num_sms``: the multiprocessors of a card with other than the usual number. The process should compute nothing
    afterwards. Raises ConfigError and ModelLoadError.
    """
    from ..compiling.cards import card_of
    from ..compiling.models import compile_model

    card = card_of(arch, num_sms)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("out", str(folder), error.strerror or str(error)) from None
    for config in configs:
        yield compile_model(config, card, folder.resolve(), progress)


def downloaded() -> tuple[Downloaded, ...]:
    """Returns the models in the hub's cache. Sends no request to the hub."""
    from .model_cache import downloaded

    return downloaded()


def remove(name: str) -> Downloaded:
    """Deletes a model from the hub's cache and returns its description. Raises ConfigError if it isn't there."""
    from .model_cache import remove

    return remove(name)


def verify(
    config: RuntimeConfig, *, record: bool = False, progress: Progress | None = None
) -> Iterator[Finding]:
    """Checks files, checksums, tensors and values. Yields one finding for each check.

    ``record``: write SHA256SUMS if no checksum is recorded for a file.
    """
    from .model_verification import verify

    return verify(config, record=record, progress=progress)


def read_labelled_images(
    annotations: Path, folder: Path, *, absent: int = 1
) -> list[LabelledImage]:
    """Reads annotations in COCO's form. ``absent``: questions about absent objects for each image.

    Raises ConfigError.
    """
    from .labelled_images import read_coco

    return read_coco(annotations, folder, absent=absent)


async def calibrate(
    config: RuntimeConfig, images: Sequence[LabelledImage], *, progress: Progress | None = None
) -> CalibrationReport:
    """Loads the model, asks about the images, and fits a calibration of its scores. Raises KestrelError."""
    from .score_calibration import calibrate

    return await calibrate(config, images, progress=progress)


async def answer(
    config: RuntimeConfig, image: str | None = None, *, progress: Progress | None = None
) -> Finding:
    """Loads the model and checks that it gives the known answer. ``image``: path of the image, if it is not bundled.

    Raises KestrelError.
    """
    from .known_answers import answer

    return await answer(config, image, progress=progress)
