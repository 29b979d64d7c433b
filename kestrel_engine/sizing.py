"""Computes the GPU memory that a model takes and the memory that is left for the KV cache, as the factory does.

    python -m kestrel_engine.sizing --model moondream2 --gpu-gib 8 16 24 80

It needs no GPU and reads no weights. The CUDA context takes memory before torch can allocate any. CONTEXT_BYTES is an
assumption about its size, and the only figure here that is not computed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .config.dtypes import PRECISIONS
from .config.runtime import RuntimeConfig
from .config.sizes import SMALLER_CUDA_SIZES
from .errors import KestrelError

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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kestrel_engine.sizing",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("--model", default="moondream2", help="released model, or a config.json")
    parser.add_argument("--gpu-gib", type=float, nargs="+", default=[8, 16, 24, 80], metavar="N")
    parser.add_argument("--precision", choices=PRECISIONS, default="auto")
    parser.add_argument("--max-batch-size", type=int, default=None)
    parser.add_argument("--max-seq-length", type=int, default=None)
    parser.add_argument("--step-crops", type=int, default=None)
    parser.add_argument("--kv-cache-gib", type=float, default=None)
    parser.add_argument("--no-fp8", action="store_true", help="a card without FP8 (below 8.9)")
    args = parser.parse_args(arguments)
    columns = "GPU, GiB", "weights", "reserve", "KV cache", "batch", "context", "full", "images"
    print("".join(f"{column:>10}" for column in columns))
    for gib in args.gpu_gib:
        try:
            config = RuntimeConfig(
                model=args.model,
                precision=args.precision,
                random_weights=True,
                max_batch_size=args.max_batch_size,
                max_seq_length=args.max_seq_length,
                step_crops=args.step_crops,
                kv_cache_gib=args.kv_cache_gib,
            )
            found = fit(config, int(gib * GIB), fp8=not args.no_fp8)
        except KestrelError as error:
            print(f"{gib:>10g}  {error}")
            continue
        sizes = found.weights_bytes, found.reserve_bytes, found.pool_bytes
        counts = found.max_batch_size, found.max_seq_length, found.full_sequences, found.images
        print(
            f"{gib:>10g}"
            + "".join(f"{size / GIB:>10.2f}" for size in sizes)
            + "".join(f"{count:>10}" for count in counts)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
