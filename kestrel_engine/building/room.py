"""Room: the memory that a model needs beside its weights, and what that leaves for the KV cache.

gpu/footprint.py has the bytes of passes and buffers, claims.py what other models of this process hold.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ..config.runtime import RuntimeConfig
from ..config.sizes import SMALLER_CUDA_SIZES, Sizes
from ..errors import InsufficientMemoryError
from ..types.model_config import ModelConfig
from ..types.progress import Progress
from .claims import CLAIMS
from .kv_pool import CACHED_CONTEXTS, CUDA_SHARE, Pool, page_size_of, plan_pool, size_text

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    import torch

    from ..models.kv_format import Scales
    from ..models.refiner import Refiner
    from ..runtime.gpu.adapters.layout import SlabLayout
    from ..types.info import EngineInfo

KEPT_IMAGES = 16
"""Images whose embeddings the device keeps by default, for images whose keys and values were evicted. 48 MB with a
released model in bfloat16. `footprint.reserve_bytes` counts them."""
CPU_POOL_SHARE = 0.5
"""On a CPU the KV pool's default takes at most this share of the memory left beside the weights."""

CPU_PREFIX_SHARE = 3
"""On a CPU, cached prefixes take memory of at most a third of the weights' size, or of LEAST_PREFIX_BYTES."""
LEAST_PREFIX_BYTES = 2**29

SMALL_PASS = 4
"""Crops that the vision tower encodes at once where the device has little room."""

PLAIN_CROPS = 8
"""Crops that the plain vision tower encodes together."""


@dataclass(frozen=True)
class Plan:
    """The choices for a runtime, without weights and pool. ``kernels``: GpuRuntime computes, else TorchRuntime."""

    config: RuntimeConfig
    model: ModelConfig
    device: torch.device
    dtype: torch.dtype
    kernels: bool
    kv_scales: tuple[Scales, ...] | None
    slabs: SlabLayout | None
    progress: Progress | None
    narrow: str = "wide"
    """As in checkpoint.weights.rounding."""
    four_bits: bool = False
    """Weights of the text decoder are in 4 bits."""
    rung: int = 0
    """That of SMALLER_CUDA_SIZES, for a device without room for the usual sizes."""

    @cached_property
    def sizes(self) -> Sizes:
        return self.config.sizes(cuda=self.device.type == "cuda", rung=self.rung)

    @cached_property
    def page_size(self) -> int:
        return page_size_of(self.config, self.model)

    @property
    def kv_dtype(self) -> torch.dtype:
        from ..runtime.kv_cache import kv_dtype

        return kv_dtype(self.dtype, self.kv_scales)

    @cached_property
    def page_bytes(self) -> int:
        from ..runtime.kv_cache import bytes_per_page

        return bytes_per_page(self.model.text, self.page_size, self.kv_dtype)


def prefix_pages(config: RuntimeConfig, info: EngineInfo) -> int | None:
    """Returns the pages beyond which cached prefixes take no further memory: on a CPU, which gives the KV cache memory
    as it is used, if the configuration sets no size of the KV cache. None for no such limit."""
    is_set = config.kv_cache_gib is not None or config.kv_cache_pages is not None
    if is_set or info.device != "cpu" or not info.kv_cache_bytes:
        return None
    most = max(info.weights_bytes // CPU_PREFIX_SHARE, LEAST_PREFIX_BYTES)
    return most * info.num_pages // info.kv_cache_bytes


def kept_images(config: RuntimeConfig, model: ModelConfig, itemsize: int) -> int:
    """Returns the number of images. ``itemsize``: the bytes of a number of the embeddings."""
    if config.embedding_cache_bytes is None:
        return KEPT_IMAGES
    return config.embedding_cache_bytes // _bytes_of_one(model, itemsize)


def extra_bytes(config: RuntimeConfig, model: ModelConfig, itemsize: int) -> int:
    """Returns the bytes of the images beyond KEPT_IMAGES."""
    more = kept_images(config, model, itemsize) - KEPT_IMAGES
    return max(0, more) * _bytes_of_one(model, itemsize)


def _bytes_of_one(model: ModelConfig, itemsize: int) -> int:
    return model.image_positions * model.text.dim * itemsize


def most_crops(sizes: Sizes) -> int:
    """Crops that the vision tower encodes at once: those of the largest step, up to the size of a pass (SMALL_PASS on a
    device with the smallest sizes)."""
    from ..runtime.gpu.attention.patches import BATCHES
    from ..scheduler.budget import IDLE_SCALE

    small = sizes.max_batch_size <= 2 and sizes.step_crops == 1
    return SMALL_PASS if small else min(sizes.step_crops * IDLE_SCALE, BATCHES[-1])


def reserve_of(
    config: RuntimeConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    sizes: Sizes,
    *,
    four_bits: bool = False,
) -> int:
    """Bytes that GpuRuntime and its adapters need beside weights and pool in the scheduler's largest steps."""
    from ..runtime.gpu.footprint import reserve_bytes
    from ..scheduler.budget import IDLE_SCALE

    reserve = reserve_bytes(
        model,
        dtype,
        max_batch_size=sizes.max_batch_size,
        max_crops=most_crops(sizes),
        fp8_gemms=config.fp8_gemms,
        adapters=config.has_adapters,
        max_seq_length=config.max_seq_length or model.text.max_context,
        four_bits=four_bits,
        # The prefix of an image is not divided.
        step_positions=max(sizes.step_prefill_positions * IDLE_SCALE, model.image_prefix),
    )
    return reserve + (config.adapter_cache_bytes if config.has_adapters else 0)


def fitted(plan: Plan, refiner: Refiner | None, weights_bytes: int = 0) -> Plan:
    """Returns ``plan`` with the largest default sizes for which the device has room. Sizes that are set stay.
    ``weights_bytes``: of weights that the device does not hold yet. Raises InsufficientMemoryError if there is no room
    for the smallest ones."""
    rungs = len(SMALLER_CUDA_SIZES) if plan.kernels else 1
    for rung in range(rungs):
        smaller = replace(plan, rung=rung)
        try:
            plan_of_pool(smaller, refiner, weights_bytes)
        except InsufficientMemoryError:
            if rung == rungs - 1:
                raise
            continue
        if rung:
            sizes = smaller.sizes
            logger.info(
                "the room on %s takes --max-batch-size %d and --step-crops %d",
                plan.device,
                sizes.max_batch_size,
                sizes.step_crops,
            )
        return smaller
    raise AssertionError("unreachable")


def beside_weights(plan: Plan, refiner: Refiner | None) -> tuple[int, int]:
    """Bytes that the runtime needs beside weights and KV cache: what it keeps, and what it takes and gives back."""
    from ..runtime.gpu.footprint import reserve_bytes, staying_bytes
    from ..runtime.refinement import refine_bytes
    from ..types.step import MOST_REFINED

    config, model, dtype = plan.config, plan.model, plan.dtype
    needed = staying = 0
    if plan.kernels:
        needed = reserve_of(config, model, dtype, plan.sizes, four_bits=plan.four_bits)
        staying = staying_bytes(model, config.fp8_gemms, most_crops(plan.sizes), dtype.itemsize)
        staying += config.adapter_cache_bytes if config.has_adapters else 0
    elif plan.device.type == "cuda":
        # Plain operators keep what the kernels fuse away.
        batch = plan.sizes.max_batch_size
        needed = 2 * reserve_bytes(model, dtype, max_batch_size=batch, max_crops=PLAIN_CROPS)
        staying = 2 * staying_bytes(model, "off", PLAIN_CROPS, dtype.itemsize)
    caches = config.crop_cache_bytes + extra_bytes(config, model, dtype.itemsize)
    if refiner is not None:
        # The activations of the masks that one step refines.
        caches += refine_bytes(refiner.config, model.vision, dtype, MOST_REFINED)
    return staying, needed - staying + caches


def plan_of_pool(plan: Plan, refiner: Refiner | None, weights_bytes: int = 0) -> Pool:
    """Plans the KV cache. ``weights_bytes``: of weights that the device does not hold yet."""
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
            sum(beside_weights(plan, refiner)),
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
