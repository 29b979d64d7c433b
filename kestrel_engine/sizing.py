"""Computes the GPU memory that a model takes and the memory that is left for the KV cache, as the factory does.

It needs no GPU and reads no weights. The CUDA context takes memory before torch can allocate any. CONTEXT_BYTES is an
assumption about its size, and the only figure here that is not computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .config.runtime import RuntimeConfig
from .config.sizes import SMALLER_CUDA_SIZES

if TYPE_CHECKING:
    from .checkpoint.open import OpenedModel

GIB = 2**30
CONTEXT_BYTES = 600 * 2**20
"""Memory of the CUDA context of a process, including loaded kernels."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The memory plan for one card. ``full_sequences``: sequences of max_seq_length positions that the KV cache holds.
    ``images``: image prefixes that the KV cache holds."""

    weights_bytes: int
    reserve_bytes: int
    pool_bytes: int
    num_pages: int
    page_size: int
    max_batch_size: int
    max_seq_length: int
    full_sequences: int
    images: int


def fit(
    config: RuntimeConfig, gpu_bytes: int, *, fp8: bool = True, opened: OpenedModel | None = None
) -> Fit:
    """Returns the memory plan for ``config`` on a card of ``gpu_bytes``.

    ``fp8``: the card computes in FP8 (compute capability 8.9 and newer). Such a card keeps experts in FP8 if the
    checkpoint stores them in FP8, as moondream3.1-9b-a2b does and moondream3-preview does not. ``opened``: the model,
    if the caller has opened it. A ``kv_cache_dtype`` of auto counts as model, because no checkpoint is read for KV
    scales.

    Raises ConfigError, and InsufficientMemoryError where a start would raise it.
    """
    import torch

    from .building.device import narrow_of
    from .building.kv_pool import page_size_of, plan_pool
    from .building.room import extra_bytes, reserve_of
    from .checkpoint.catalog import KNOWN
    from .checkpoint.open import open_model
    from .errors import InsufficientMemoryError
    from .models.kv_format import EIGHT_BITS
    from .runtime.kv_cache import bytes_per_page

    opened = opened or open_model(config)
    model, device = opened.config, torch.device("cuda")
    dtype = torch.bfloat16 if config.dtype == "auto" else getattr(torch, str(config.dtype))
    page_size = page_size_of(config, model)
    cache_dtype = EIGHT_BITS if config.kv_cache_dtype == "fp8" else dtype
    page_bytes = bytes_per_page(model.text, page_size, cache_dtype)
    released = KNOWN.get(config.model.lower())
    stored = released is None or released.fp8
    keep = config.fp8_experts == "keep" or (config.fp8_experts == "auto" and fp8 and stored)
    narrow = narrow_of(config, device, kernels=True)
    weights = opened.weight_bytes(dtype, device, keep_fp8=keep, narrow=narrow)
    free = gpu_bytes - CONTEXT_BYTES - weights
    if free <= 0:
        raise InsufficientMemoryError(
            f"the weights take {weights / GIB:.1f} GiB and the CUDA context {CONTEXT_BYTES / GIB:.1f} GiB"
        )
    four_bits = opened.is_in_four_bits(narrow)
    more = config.crop_cache_bytes + extra_bytes(config, model, dtype.itemsize)
    for rung in range(len(SMALLER_CUDA_SIZES)):
        sizes = config.sizes(cuda=True, rung=rung)
        reserve = more + reserve_of(config, model, dtype, sizes, four_bits=four_bits)
        batch = sizes.max_batch_size
        try:
            pool = plan_pool(
                free, reserve, page_bytes, config, model, page_size=page_size, max_batch_size=batch
            )
            break
        except InsufficientMemoryError:
            if rung == len(SMALLER_CUDA_SIZES) - 1:
                raise
    return Fit(
        weights_bytes=weights,
        reserve_bytes=reserve,
        pool_bytes=pool.num_pages * page_bytes,
        num_pages=pool.num_pages,
        page_size=page_size,
        max_batch_size=batch,
        max_seq_length=pool.max_seq_length,
        full_sequences=pool.num_pages // -(-pool.max_seq_length // page_size),
        images=pool.num_pages * page_size // model.image_prefix,
    )
