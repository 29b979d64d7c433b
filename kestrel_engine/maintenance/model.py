"""Is the configured model here, and does it fit? Reads headers of files; no weight and no network."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import RuntimeConfig
from ..errors import ConfigError, DownloadError, KestrelError
from ..types.model_config import ModelConfig
from .finding import Finding

if TYPE_CHECKING:
    import torch

    from ..checkpoint.hub import Hub

GIB = 2**30


def check_model(config: RuntimeConfig, *, hub: Hub | None = None) -> Iterator[Finding]:
    """Files, then memory. ``hub``: an offline one, if not the library's."""
    model = None
    for finding, found in _files(config, hub):
        model = found
        yield finding
        if finding.status == "fail":
            return
    model = model or _released(config)
    if model is None:
        told = "can't be told before the model's files are here"
        yield Finding("memory", "warn", told, "kestrel-grpc download")
        return
    try:
        yield _memory(config, model)
    except ConfigError as error:
        yield Finding("memory", "fail", str(error))


def _files(config: RuntimeConfig, hub: Hub | None) -> Iterator[tuple[Finding, ModelConfig | None]]:
    from ..checkpoint.hub import Hub
    from ..checkpoint.open import open_model
    from ..checkpoint.weights.plan import checkpoint_error

    try:
        opened = open_model(config, hub=hub or Hub(offline=True))
    except DownloadError:
        yield _absent(config), None
        return
    except KestrelError as error:
        yield Finding("model", "fail", str(error), "kestrel-grpc verify tells more"), None
        return
    if opened.random_seed is not None:
        yield Finding("model", "ok", opened.name), opened.config
    elif opened.plan.faults:
        told = str(checkpoint_error(str(opened.files[0]), opened.plan.faults, hint=opened.hint))
        yield Finding("model", "fail", told, "these are another model's weights, or broken"), None
    else:
        size = sum(file.stat().st_size for file in opened.files)
        files = "a file" if len(opened.files) == 1 else f"{len(opened.files)} files"
        told = f"{opened.name}: {files} of weights, {size / 1e9:.2f} GB"
        yield Finding("model", "ok", told), opened.config


def _absent(config: RuntimeConfig) -> Finding:
    from huggingface_hub import constants

    told, remedy = (
        f"{config.model} isn't in the hub's cache",
        f"kestrel-grpc download {config.model}",
    )
    if config.offline:
        return Finding("model", "fail", f"{told}, and --offline forbids to fetch it", remedy)
    cache = Path(constants.HF_HUB_CACHE)
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    told += f": the start fetches it, {free / 1e9:,.0f} GB are free in {cache}"
    return Finding("model", "warn", told, f"{remedy} does so ahead")


def _released(config: RuntimeConfig) -> ModelConfig | None:
    """The shape of a model whose files aren't here, if its name tells it."""
    from ..checkpoint.open import open_model

    try:
        return open_model(replace(config, random_weights=True, max_seq_length=None)).config
    except KestrelError:
        return None


def _memory(config: RuntimeConfig, model: ModelConfig) -> Finding:
    """Raises ConfigError."""
    import torch

    if config.device != "cpu" and torch.cuda.is_available():
        return _card_memory(config, model)
    if config.device.startswith("cuda"):
        return Finding("memory", "warn", "can't be told: torch sees no card")
    from ..checkpoint.progress import gib
    from ..checkpoint.weights.memory import host_available
    from ..checkpoint.weights.random_weights import weight_bytes

    dtype = torch.float32 if config.dtype == "auto" else _dtype(config)
    needed, available = weight_bytes(model, dtype, keep_fp8=False), host_available()
    told = f"weights take {gib(needed)} as {str(dtype).removeprefix('torch.')}"
    if available is None:
        return Finding("memory", "warn", f"{told}; what is available can't be told")
    told += f", {gib(available)} are available"
    if needed > available:
        remedy = "a narrower --dtype (bfloat16), a smaller model, or more memory"
        return Finding("memory", "fail", told, remedy)
    if needed > 0.8 * available:
        return Finding("memory", "warn", told, "little is left for the KV cache: --max-batch-size")
    return Finding("memory", "ok", told)


def _card_memory(config: RuntimeConfig, model: ModelConfig) -> Finding:
    """Raises ConfigError."""
    import torch

    from .. import sizing
    from ..runtime.gpu.device import capabilities

    device = torch.device("cuda" if config.device == "auto" else config.device)
    free, total = torch.cuda.mem_get_info(device)
    # What is free now is what is left beside CUDA's own, which the arithmetic subtracts.
    card = free + sizing.CONTEXT_BYTES
    told = f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free"
    try:
        found = sizing.fit(config, card, fp8=capabilities(device).fp8, model=model)
    except ConfigError:
        raise
    except KestrelError as error:
        remedy = "python -m kestrel_engine.sizing tells what fits; is something else on the card?"
        return Finding("memory", "fail", f"{told}: {error}", remedy)
    told += (
        f": weights {found.weights_bytes / GIB:.1f}, reserve {found.reserve_bytes / GIB:.1f}, KV cache "
        f"{found.pool_bytes / GIB:.1f} GiB, or {found.full_sequences} requests of {found.max_seq_length} positions"
    )
    if found.full_sequences < found.max_batch_size:
        told += f" for a batch of {found.max_batch_size}"
    return Finding("memory", "ok", told)


def _dtype(config: RuntimeConfig) -> torch.dtype:
    import torch

    found = getattr(torch, str(config.dtype))
    assert isinstance(found, torch.dtype)
    return found
