"""Whether the configured model is on this machine and fits into memory. Reads headers only, and uses no network."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf, prod
from pathlib import Path
from typing import TYPE_CHECKING

from .. import clock
from ..building import cpu_choice
from ..building.device import dtype_of
from ..config.runtime import RuntimeConfig
from ..errors import ConfigError, DownloadError, KestrelError
from ..types.model_config import ModelConfig
from .finding import Finding

if TYPE_CHECKING:
    import torch

    from ..checkpoint.hub import Hub
    from ..checkpoint.open import OpenedModel

GIB = 2**30


def check_model(config: RuntimeConfig, *, hub: Hub | None = None) -> Iterator[Finding]:
    """Checks the files, then the memory. ``hub``: an offline hub; None for the default cache."""
    opened = None
    for finding, found in _files(config, hub):
        opened = found
        yield finding
        if finding.status == "fail":
            return
    opened = opened or _released(config)
    if opened is None:
        message = "can't be checked before the model is downloaded"
        yield Finding("memory", "warn", message, "kestrel-grpc download")
        return
    yield from check_fit(config, opened)


def check_fit(config: RuntimeConfig, opened: OpenedModel) -> Iterator[Finding]:
    """Checks the memory, and the time that answers of a large model take on a CPU."""
    try:
        yield _memory(config, opened)
    except ConfigError as error:
        yield Finding("memory", "fail", str(error))
    if not _on_card(config) and not config.device.startswith("cuda"):
        chosen = cpu_choice.completed(config, opened)
        if described := cpu_choice.described(chosen, config):
            yield Finding("choice", "ok", described)
        yield from _slow_answers(chosen, opened)


def opened_of(config: RuntimeConfig) -> OpenedModel | None:
    """Returns the model by its files on this machine, or its form by its name; None if neither tells it."""
    found = [opened for _, opened in _files(config, None) if opened is not None]
    return found[0] if found else _released(config)


def _files(config: RuntimeConfig, hub: Hub | None) -> Iterator[tuple[Finding, OpenedModel | None]]:
    from ..checkpoint.hub import Hub
    from ..checkpoint.open import open_model
    from ..checkpoint.weights.plan import checkpoint_error

    try:
        opened = open_model(config, hub=hub or Hub(offline=True))
    except DownloadError:
        yield _absent(config), None
        return
    except KestrelError as error:
        yield Finding("model", "fail", str(error), "kestrel-grpc verify reports details"), None
        return
    if opened.random_seed is not None:
        yield Finding("model", "ok", opened.name), opened
    elif opened.plan.faults:
        message = str(checkpoint_error(str(opened.files[0]), opened.plan.faults, hint=opened.hint))
        remedy = "check --weights: these are another model's weights, or damaged"
        yield Finding("model", "fail", message, remedy), None
    else:
        size = sum(file.stat().st_size for file in opened.files)
        files = "a file" if len(opened.files) == 1 else f"{len(opened.files)} files"
        message = f"{opened.name}: {files} of weights, {size / 1e9:.2f} GB"
        yield Finding("model", "ok", message), opened


def _absent(config: RuntimeConfig) -> Finding:
    from huggingface_hub import constants

    from ..checkpoint.bucket.address import is_address

    named = config.model if config.model_path is None else config.model_path
    if is_address(named):
        message = (
            f"{named} isn't in the cache {config.cache_dir}; the server downloads it at its start"
        )
        return Finding(
            "model", "warn", message, "kestrel-grpc download downloads it before the start"
        )
    message = f"{config.model} isn't in the hub's cache"
    remedy = f"kestrel-grpc download {config.model}"
    if config.offline:
        return Finding("model", "fail", f"{message}, and --offline forbids a download", remedy)
    cache = Path(constants.HF_HUB_CACHE)
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    message += f"; the server downloads it at its start; {free / 1e9:,.0f} GB are free in {cache}"
    return Finding("model", "warn", message, f"{remedy} downloads it before the start")


def _released(config: RuntimeConfig) -> OpenedModel | None:
    """Returns the form of a model whose files aren't on this machine; None if the name is not a released one."""
    from ..checkpoint.open import open_model

    try:
        return open_model(replace(config, random_weights=True, max_seq_length=None))
    except KestrelError:
        return None


def _memory(config: RuntimeConfig, opened: OpenedModel) -> Finding:
    """Raises ConfigError."""
    import torch

    if _on_card(config):
        return _card_memory(config, opened)
    if config.device.startswith("cuda"):
        return Finding("memory", "warn", "can't be checked: torch sees no GPU")
    from ..checkpoint.progress import gib
    from ..checkpoint.weights.memory import host_available

    config = cpu_choice.completed(config, opened)
    dtype, cpu = dtype_of(replace(config, device="cpu")), torch.device("cpu")
    needed = opened.weight_bytes(dtype, cpu, narrow=config.weights)
    available = host_available()
    name = config.weights if config.weights in ("int8", "int4") else str(dtype)
    message = f"weights take {gib(needed)} as {name.removeprefix('torch.')}"
    if available is None:
        return Finding("memory", "warn", f"{message}; the available memory is unknown")
    message += f", {gib(available)} are available"
    if needed > available:
        remedy = "a narrower --precision (bfloat16, int8, int4), a smaller model, or more memory"
        return Finding("memory", "fail", message, remedy)
    if needed > 0.8 * available:
        remedy = "lower --max-batch-size: little memory is left for the KV cache"
        return Finding("memory", "warn", message, remedy)
    return Finding("memory", "ok", message)


def _card_memory(config: RuntimeConfig, opened: OpenedModel) -> Finding:
    """Raises ConfigError."""
    import torch

    from .. import sizing
    from ..runtime.gpu.device import capabilities

    device = torch.device("cuda" if config.device == "auto" else config.device)
    free, total = torch.cuda.mem_get_info(device)
    # The context of this process is not free memory, but ``fit`` subtracts it again.
    card = free + sizing.CONTEXT_BYTES
    message = f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free"
    try:
        found = sizing.fit(config, card, fp8=capabilities(device).fp8, opened=opened)
    except ConfigError:
        raise
    except KestrelError as error:
        remedy = "docs/run/gpus.md shows what fits; check whether other processes use the GPU"
        return Finding("memory", "fail", f"{message}: {error}", remedy)
    message += (
        f": weights {found.weights_bytes / GIB:.1f}, reserve {found.reserve_bytes / GIB:.1f}, KV cache "
        f"{found.pool_bytes / GIB:.1f} GiB, or {found.full_sequences} requests of {found.max_seq_length} positions"
    )
    if found.full_sequences < found.max_batch_size:
        message += f" for a batch of {found.max_batch_size}"
    return Finding("memory", "ok", message)


def _slow_answers(config: RuntimeConfig, opened: OpenedModel) -> Iterator[Finding]:
    import torch

    if not cpu_choice.is_large(opened):
        return
    model = opened.config
    if config.cpu_threads is not None:
        torch.set_num_threads(config.cpu_threads)
    own = config.precision
    times = {name: estimate(config, model, name) for name in dict.fromkeys((own, *_COMPARED))}
    found = [
        f"{name}: {_duration(time.first_small_s)} (a small image) to {_duration(time.first_large_s)} (a large one) "
        f"until an answer's first token, {_duration(time.token_s)} for each further one"
        for name, time in times.items()
    ]
    message = (
        f"estimated for this CPU with {torch.get_num_threads()} threads, {found[0]}; with another --precision, "
        f"{'; '.join(found[1:])}"
    )
    yield Finding(
        "speed", "warn", message, "a GPU, requests with a lower max_crops, or another --precision"
    )


def _duration(seconds: float) -> str:
    return (
        f"{seconds / 60:.0f} min"
        if seconds > 120
        else f"{seconds:.1g} s"
        if seconds < 10
        else f"{seconds:.0f} s"
    )


def _on_card(config: RuntimeConfig) -> bool:
    import torch

    return config.device != "cpu" and torch.cuda.is_available()


_COMPARED = ("float32", "bfloat16", "int8")
_GEMM = (512, 1024, 2048)
"""Rows, outputs and inputs of a product as prompts and images have it."""
_LARGE_BYTES = 96 * 2**20
"""Of a weight for one row: more than caches hold."""
_EFFICIENCY = 0.75
"""Of prompts and images, as a share of their products' speed: attention and norms take the rest."""
_MEASURED_S = 0.1
_PROMPT = 16
"""Positions of a prompt besides the image's."""


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Seconds to the first token about a new image of the fewest and of the most crops, and for each further token."""

    first_small_s: float
    first_large_s: float
    token_s: float


def estimate(config: RuntimeConfig, model: ModelConfig, precision: str) -> CpuTime:
    """Measures with torch's present number of threads, in less than a second. ``config`` limits the crops."""
    from ..checkpoint.weights.expected import expected_tensors
    from ..checkpoint.weights.random_weights import is_expert

    moe = model.text.moe
    vision = text = 0.0
    for name, shape in expected_tensors(model).items():
        used = float(prod(shape))
        if name.startswith("vision."):
            vision += used
        elif name.startswith("text.") and name != "text.wte":
            if moe is not None and is_expert(model, name):
                used = used * moe.experts_per_token / moe.num_experts
            text += used
    speed = _speed(precision)
    flops = _EFFICIENCY * speed.flops
    patches = (model.vision.crop_size // model.vision.enc_patch_size) ** 2
    prefill_s = 2 * text * (patches + _PROMPT) / flops
    crop_s = 2 * vision * patches / flops
    tiles = config.max_crops or model.vision.max_crops
    return CpuTime(
        first_small_s=prefill_s + crop_s,
        first_large_s=prefill_s + (crop_s if tiles == 1 else (1 + tiles) * crop_s),
        token_s=text / speed.weights,
    )


@dataclass(frozen=True, slots=True)
class _Speed:
    """FLOP a second of products of many rows, and weights a second of a product with one row."""

    flops: float
    weights: float


def _speed(precision: str) -> _Speed:
    import torch

    from ..models.weight_only import product

    probe = RuntimeConfig(precision=precision, device="cpu")
    dtype = dtype_of(probe)
    rows, n, k = _GEMM
    x = torch.ones(rows, k, dtype=dtype)
    weight, scales = _made(n, k, dtype, probe.weights)
    flops = 2.0 * rows * n * k / _seconds(lambda: product(x, weight, scales, None))
    n = _LARGE_BYTES // (weight.nbytes // n)
    weight, scales = _made(n, k, dtype, probe.weights)
    return _Speed(flops, n * k / _seconds(lambda: product(x[:1], weight, scales, None)))


def _made(
    n: int, k: int, dtype: torch.dtype, weights: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns a weight [n, k] in the form that a start with the setting ``weights`` gives it, and its scales."""
    import torch

    from ..models.weight_only import GROUP, pack_for_cpu

    if weights not in ("int4", "int8"):
        return torch.ones(n, k, dtype=dtype), None
    made = {"x.weight": torch.ones(n, k, dtype=torch.int8)}
    made["x.scale"] = torch.ones(n, dtype=torch.bfloat16)
    if weights == "int4":
        made["x.weight"] = torch.ones(n, k // 2, dtype=torch.uint8)
        made["x.scale"] = torch.ones(n, k // GROUP, 2, dtype=torch.bfloat16)
    pack_for_cpu(made)
    return made["x.weight"], made["x.scale"]


def _seconds(work: Callable[[], object]) -> float:
    """The least duration of several: other work of the machine, threads and packing make others longer."""
    import torch

    with torch.inference_mode():  # With gradients, a model uses torch's products.
        work()  # The first one compiles.
        end, least = clock.now() + _MEASURED_S, inf
        # Once at least: another process may take all of the time.
        while (begun := clock.now()) < end or least == inf:
            work()
            least = min(least, clock.now() - begun)
    return max(least, 1e-9)
