"""From a plan and weights to one of the two runtimes. Owns the memory that is left for pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config.runtime import RuntimeConfig
from ..config.sizes import Sizes
from ..errors import InsufficientMemoryError
from ..runtime.gpu.memory import size_text
from ..runtime.protocol import Runtime
from ..types.model_config import ModelConfig
from ..types.progress import Progress
from .claims import CLAIMS, claim_of
from .kept_images import extra_bytes

if TYPE_CHECKING:
    import torch

    from ..models.kv_format import Scales
    from ..models.refiner import Refiner
    from ..runtime.gpu.adapters.layout import SlabLayout
    from ..runtime.gpu.memory import Pool

CPU_POOL_SHARE = 0.5
"""On a CPU the KV pool's default takes at most this share of the memory left beside the weights."""

PLAIN_CROPS = 8
"""Crops that the plain vision tower encodes together."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The choices for a runtime, without weights and pool. ``kernels``: GpuRuntime computes, else TorchRuntime."""

    config: RuntimeConfig
    sizes: Sizes
    model: ModelConfig
    page_size: int
    page_bytes: int
    device: torch.device
    dtype: torch.dtype
    kernels: bool
    kv_scales: tuple[Scales, ...] | None
    slabs: SlabLayout | None
    progress: Progress | None


def runtime_of(
    plan: Plan, tensors: dict[str, torch.Tensor], refiner: Refiner | None, name: str
) -> tuple[Runtime, float]:
    """Builds the runtime of ``plan``, and claims its memory for the model ``name``. Returns it, and the seconds that
    capturing graphs took. Raises InsufficientMemoryError."""
    from ..runtime.torch_runtime import TorchRuntime

    weights = sum(tensor.nbytes for tensor in tensors.values())
    build = _gpu_runtime if plan.kernels else _torch_runtime
    runtime, capture_s = build(plan, tensors, refiner)
    staying, passing = _beside_weights(plan, refiner)
    untouched = runtime.untouched() if isinstance(runtime, TorchRuntime) else _nothing
    pool = runtime.limits.num_pages * plan.page_bytes
    holds = weights + staying + pool - untouched()

    def owed() -> int:
        return passing + untouched()

    CLAIMS.add(runtime, claim_of(name, plan.device, holds, owed))
    return runtime, capture_s


def _nothing() -> int:
    return 0


def _torch_runtime(
    plan: Plan, tensors: dict[str, torch.Tensor], refiner: Refiner | None
) -> tuple[Runtime, float]:
    """Builds TorchRuntime. Returns it, and 0 seconds for capturing graphs."""
    from ..models.moondream import Moondream
    from ..runtime.torch_runtime import TorchRuntime

    pool = _pool(plan, refiner)
    runtime = TorchRuntime(
        Moondream(plan.model, tensors),
        plan.model,
        num_pages=pool.num_pages,
        page_size=plan.page_size,
        max_batch_size=plan.sizes.max_batch_size,
        max_seq_length=pool.max_seq_length,
        device=plan.device,
        dtype=plan.dtype,
        kv_scales=plan.kv_scales,
        refiner=refiner,
    )
    return runtime, 0.0


def _gpu_runtime(
    plan: Plan, tensors: dict[str, torch.Tensor], refiner: Refiner | None
) -> tuple[Runtime, float]:
    """Builds GpuRuntime. Returns it, and the seconds that capturing graphs took."""
    from ..runtime.gpu.parts import Options
    from ..runtime.gpu.runtime import GpuRuntime
    from ..runtime.gpu.weights import pack_weights

    sizes = plan.sizes
    pack_weights(plan.model, tensors)
    pool = _pool(plan, refiner)
    options = Options(
        num_pages=pool.num_pages,
        page_size=plan.page_size,
        max_batch_size=sizes.max_batch_size,
        max_seq_length=pool.max_seq_length,
        fp8_gemms=plan.config.fp8_gemms,
        kv_scales=plan.kv_scales,
        cuda_graphs=plan.config.cuda_graphs,
        decode_beside=_decodes_beside(plan.config, plan.model),
        max_crops=_most_crops(sizes),
        refiner=refiner,
        adapters=plan.slabs,
        adapt_vision=plan.config.has_adapters,
    )
    runtime = GpuRuntime(plan.model, tensors, options, plan.progress)
    return runtime, runtime.capture_s


def _decodes_beside(config: RuntimeConfig, model: ModelConfig) -> bool:
    if config.decode_beside == "auto":
        return model.text.moe is None
    return config.decode_beside == "on"


def _most_crops(sizes: Sizes) -> int:
    """Crops that the vision tower encodes at once: those of the largest step, up to the size of a pass."""
    from ..runtime.gpu.attention.patches import BATCHES
    from ..scheduler.budget import StepBudget

    return min(sizes.step_crops * StepBudget(crops=sizes.step_crops).idle_scale, BATCHES[-1])


def reserve_of(config: RuntimeConfig, model: ModelConfig, dtype: torch.dtype, sizes: Sizes) -> int:
    """Bytes that GpuRuntime and its adapters need beside weights and pool, with the largest steps that the scheduler
    makes."""
    from ..runtime.gpu.footprint import reserve_bytes

    reserve = reserve_bytes(
        model,
        dtype,
        max_batch_size=sizes.max_batch_size,
        max_crops=_most_crops(sizes),
        fp8_gemms=config.fp8_gemms,
        adapters=config.has_adapters,
    )
    return reserve + (config.adapter_cache_bytes if config.has_adapters else 0)


def check_room(plan: Plan, weights_bytes: int) -> None:
    """Raises InsufficientMemoryError if the device has no room for weights, runtime and the smallest KV cache, before
    any of them is there. The message says what other models of this process hold."""
    _pool(plan, None, weights_bytes)


def _beside_weights(plan: Plan, refiner: Refiner | None) -> tuple[int, int]:
    """Bytes that the runtime needs beside weights and KV cache: what it keeps, and what it takes and gives back."""
    from ..runtime.gpu.footprint import reserve_bytes, staying_bytes
    from ..runtime.refinement import refine_bytes
    from ..types.step import MOST_REFINED

    config, model, dtype = plan.config, plan.model, plan.dtype
    needed = staying = 0
    if plan.kernels:
        needed = reserve_of(config, model, dtype, plan.sizes)
        staying = staying_bytes(model, config.fp8_gemms)
        staying += config.adapter_cache_bytes if config.has_adapters else 0
    elif plan.device.type == "cuda":
        # Plain operators keep what the kernels fuse away.
        batch = plan.sizes.max_batch_size
        needed = 2 * reserve_bytes(model, dtype, max_batch_size=batch, max_crops=PLAIN_CROPS)
        staying = 2 * staying_bytes(model, "off")
    caches = config.crop_cache_bytes + extra_bytes(config, model, dtype.itemsize)
    if refiner is not None:
        # The activations of the masks that one step refines.
        caches += refine_bytes(refiner.config, model.vision, dtype, MOST_REFINED)
    return staying, needed - staying + caches


def _pool(plan: Plan, refiner: Refiner | None, weights_bytes: int = 0) -> Pool:
    """Plans the KV cache. ``weights_bytes``: of weights that the device does not hold yet."""
    from ..runtime.gpu.memory import CACHED_CONTEXTS, CUDA_SHARE, plan_pool

    cuda = plan.device.type == "cuda"
    if cuda:
        import torch

        # Memory that loading and packing released must count as free.
        torch.cuda.empty_cache()
    available = CLAIMS.available(plan.device)
    try:
        if available is not None and weights_bytes > available:
            raise InsufficientMemoryError(
                f"the weights take {size_text(weights_bytes)}, and {size_text(available)} are available on "
                f"{plan.device}; use a narrower --precision, a smaller model, or a device with more memory"
            )
        return plan_pool(
            None if available is None else available - weights_bytes,
            sum(_beside_weights(plan, refiner)),
            plan.page_bytes,
            plan.config,
            plan.model,
            page_size=plan.page_size,
            max_batch_size=plan.sizes.max_batch_size,
            share=CUDA_SHARE if cuda else CPU_POOL_SHARE,
            contexts=CACHED_CONTEXTS if cuda else 1,
        )
    except InsufficientMemoryError as error:
        raise InsufficientMemoryError(f"{error}{CLAIMS.described(plan.device)}") from None
