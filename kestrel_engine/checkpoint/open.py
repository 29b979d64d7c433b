"""Opens the model that a RuntimeConfig names, and loads its weights. This is the entry point of the package.

An invalid setting, a missing file or a failed download is reported before any weight is read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.runtime import RuntimeConfig
from ..errors import CheckpointError, DownloadError
from ..types.model_config import ModelConfig, parse_model_config
from .bucket.address import BucketAddress
from .catalog import HubFile, ModelSource, architecture, random_name, resolve
from .config_file import NAME as CONFIG_NAME
from .config_file import check_fits, config_beside, read_config
from .files import find_files, read_headers
from .hub import Hub, sibling
from .refiner_file import find_refiner
from .tokenizer_file import NAME as TOKENIZER_NAME
from .tokenizer_file import find_tokenizer, stand_in_tokenizer
from .weights.plan import (
    CheckpointPlan,
    Faults,
    model_config_for,
    no_config_hint,
    plan_checkpoint,
    states_numbers,
)

if TYPE_CHECKING:
    import torch

    from ..types.progress import Progress
    from .weights.loader import LoadedCheckpoint


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model with files on this machine and valid settings, whose weights are not read yet. ``name``: under which it
    is served. ``hint``: an addition to errors about the tensors. ``refiner``: the file of the segmentation refiner, if
    it is used. ``random_seed``: if the weights are to be generated."""

    name: str
    config: ModelConfig
    tokenizer_path: Path
    files: tuple[Path, ...]
    plan: CheckpointPlan
    hint: str = ""
    refiner: Path | None = None
    random_seed: int | None = None

    def is_in_four_bits(self, narrow: str) -> bool:
        """Whether weights of the text decoder are in 4 bits, once they are loaded; ``narrow``: as of `load_weights`."""
        from .weights.loader import stays_int4

        return narrow == "int4" or any(stays_int4(item, narrow) for item in self.plan.tensors)

    def weight_bytes(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        keep_fp8: bool = False,
        narrow: str = "wide",
    ) -> int:
        """The bytes of all weights, once they are loaded; arguments as of `load_weights`."""
        if self.random_seed is not None:
            from .weights.random_weights import weight_bytes

            return weight_bytes(self.config, dtype, keep_fp8=keep_fp8, narrow=narrow, device=device)
        from .weights.loader import loaded_bytes

        return sum(
            loaded_bytes(item, dtype, device, keep_fp8, narrow) for item in self.plan.tensors
        )


def open_model(
    runtime: RuntimeConfig, *, hub: Hub | None = None, progress: Progress | None = None
) -> OpenedModel:
    """Resolves the model's name, downloads missing files and checks the files' headers. Raises ConfigError (unknown
    name, or a setting beyond the model's limits), DownloadError, and CheckpointError (missing or damaged files).
    """
    if runtime.random_weights:
        return _open_random(runtime)
    source = resolve(runtime.model, runtime.model_path, runtime.tokenizer_path)
    hub = hub or Hub(progress=progress, offline=runtime.offline)
    if source.hub is not None:
        weights, tokenizer = _download(source, runtime, hub)
    elif source.bucket is not None:
        weights, tokenizer = _from_bucket(source.bucket, runtime, hub, progress)
    else:
        weights, tokenizer = _local(source)
    files = find_files(weights)
    raw = config_beside(files[0])
    stored = read_headers(files)
    config = model_config_for(raw, stored, hint=source.family)
    check_fits(runtime, config)
    plan = plan_checkpoint(stored, config)
    return OpenedModel(
        name=source.name,
        config=config,
        tokenizer_path=find_tokenizer(source, tokenizer, config, hub),
        files=files,
        plan=plan,
        hint=no_config_hint(raw, config),
        refiner=find_refiner(runtime, config, files, hub),
    )


def load_weights(
    opened: OpenedModel,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    keep_fp8: bool = False,
    narrow: str = "wide",
    progress: Progress | None = None,
) -> LoadedCheckpoint:
    """Reads and checks, or generates, the weights of an opened model as ``dtype`` on ``device``. ``keep_fp8``: keep
    experts that are stored in FP8. ``narrow``: as in `weights.rounding`. Raises as `loader.load_planned`.
    """
    if opened.random_seed is not None:
        from .weights.random_weights import random_checkpoint

        return random_checkpoint(
            opened.config,
            opened.random_seed,
            dtype,
            device,
            keep_fp8=keep_fp8,
            narrow=narrow,
            progress=progress,
        )
    from .weights.loader import load_planned

    return load_planned(
        opened.plan,
        opened.config,
        opened.files,
        dtype,
        device,
        progress,
        keep_fp8=keep_fp8,
        narrow=narrow,
        hint=opened.hint,
    )


def _open_random(runtime: RuntimeConfig) -> OpenedModel:
    """Opens a model with generated weights. It needs an architecture, but neither weights nor a network."""
    name, family, file = architecture(runtime.model, runtime.model_path)
    config = parse_model_config(read_config(file) if file is not None else {}, family=family)
    check_fits(runtime, config)
    return OpenedModel(
        name=random_name(name),
        config=config,
        tokenizer_path=stand_in_tokenizer(runtime.tokenizer_path, file),
        files=(),
        plan=CheckpointPlan((), (), Faults()),
        random_seed=runtime.seed or 0,
    )


def _local(source: ModelSource) -> tuple[Path, Path | None]:
    assert source.path is not None
    if not source.path.exists():
        raise CheckpointError(f"{source.name}: {source.path} is not part of this installation")
    folder = source.path if source.path.is_dir() else source.path.parent
    tokenizer = folder / TOKENIZER_NAME
    return source.path, tokenizer if tokenizer.is_file() else None


def _from_bucket(
    address: BucketAddress, runtime: RuntimeConfig, hub: Hub, progress: Progress | None
) -> tuple[Path, Path | None]:
    from ..disk_cache import GIB
    from .bucket.bucket import ModelBucket
    from .bucket.node_cache import NodeCache

    gib = runtime.weights_cache_gib
    most_bytes = None if gib is None else int(gib * GIB)
    cache = NodeCache(Path(os.path.expanduser(runtime.cache_dir)) / "weights", progress, most_bytes)
    offline = runtime.offline or not hub.online
    folder = cache.fetch(address, None if offline else ModelBucket(address))
    tokenizer = folder / TOKENIZER_NAME
    return folder, tokenizer if tokenizer.is_file() else None


def _download(source: ModelSource, runtime: RuntimeConfig, hub: Hub) -> tuple[Path, Path | None]:
    """Downloads small files first, so that an invalid setting is reported before gigabytes are downloaded."""
    checkpoint = source.hub
    assert checkpoint is not None

    def beside(name: str) -> HubFile:
        return HubFile(checkpoint.repo, checkpoint.revision, sibling(checkpoint, name))

    config_path = hub.fetch_optional(beside(CONFIG_NAME))
    raw = read_config(config_path) if config_path is not None else {}
    if source.family is not None or states_numbers(raw):
        check_fits(runtime, parse_model_config(raw, family=source.family))
    problems: list[str] = []
    tokenizer = weights = None
    try:
        if isinstance(source.tokenizer, HubFile):
            tokenizer = hub.fetch(source.tokenizer)
        elif source.tokenizer is None:
            tokenizer = hub.fetch_optional(beside(TOKENIZER_NAME))
    except DownloadError as error:
        if hub.online:
            raise
        # Without a network, the weights fail at once as well: report all missing files together.
        problems.append(str(error))
    try:
        weights = hub.fetch_checkpoint(checkpoint)
    except DownloadError as error:
        problems.append(str(error))
    if weights is None or problems:
        raise DownloadError("; ".join(problems))
    return weights, tokenizer
