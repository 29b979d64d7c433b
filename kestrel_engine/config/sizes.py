"""Sizes: the values of settings whose defaults depend on the device, and these defaults."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The values of the fields of RuntimeConfig whose defaults depend on the device."""

    max_batch_size: int
    step_prefill_positions: int
    step_crops: int
    step_pause: float
    steps_out: int
    preprocess_threads: int


_CPU_SIZES = Sizes(
    max_batch_size=16,
    step_prefill_positions=768,
    step_crops=3,
    step_pause=0.0,
    steps_out=2,
    preprocess_threads=2,
)
"""Sixteen requests decode six times as fast together as one after the other. A step accepts one image prefix."""

_CUDA_SIZES = Sizes(
    max_batch_size=64,
    step_prefill_positions=11680,
    step_crops=48,
    step_pause=4.0,
    steps_out=3,
    preprocess_threads=2,
)
"""A step accepts four images, crops and prefixes together.

Measured on one H200 with 64 requests in flight and 3 tokens each, in requests a second: Moondream 2 reached 92 with
three eighths of this allowance and 97 with three quarters; Moondream 3 reached 80 with three quarters and 82 with all.
While new images arrive, the gaps between tokens are 50 to 80 ms. With 30 tokens, Moondream 2 reached 72 with a
``step_pause`` of 0 and ``steps_out`` of 2, 77 with 2 and 3, 79 with 4 and 2, and 84 with 4 and 3.
``preprocess_threads`` grows with the number of processors, up to MOST_PREPROCESS_THREADS."""


SMALLER_CUDA_SIZES = ((64, 48), (32, 24), (16, 12), (8, 6), (4, 2), (2, 1), (1, 1))
"""Values of ``max_batch_size`` and ``step_crops`` for devices with less and less memory. Activations fall with both.
``step_prefill_positions`` falls with the crops."""

MOST_PREPROCESS_THREADS = 8


USUAL_ITL_TARGET_MS = 15.0
"""The target for which _CUDA_SIZES are chosen."""
LEAST_CROPS = 8
"""Steps with fewer would use a GPU poorly."""

SLICE_CROPS, SLICE_POSITIONS = 10, 2560
"""Crops or prompt positions of a step beside decoding, where these have steps of their own (``decode_beside`` is
"slices"): three images with their questions. docs/lab/measurements.md (Slices of new work) has the figures."""


def default_sizes(
    *, cuda: bool, itl_target_ms: float = USUAL_ITL_TARGET_MS, rung: int = 0
) -> Sizes:
    """The defaults of a device. On CUDA, steps hold less new work for a lower ``itl_target_ms``: a token waits for a
    step, or for its kernels. A GEMM over 48 crops holds all multiprocessors of an H100 for half a millisecond.
    ``rung``: of SMALLER_CUDA_SIZES."""
    if not cuda:
        return _CPU_SIZES
    threads = min(max(processors() - 2, 2), MOST_PREPROCESS_THREADS)
    share = min(1.0, itl_target_ms / USUAL_ITL_TARGET_MS)
    batch, most = SMALLER_CUDA_SIZES[rung]
    crops = min(most, max(LEAST_CROPS, round(share * _CUDA_SIZES.step_crops)))
    positions = _CUDA_SIZES.step_prefill_positions * crops // _CUDA_SIZES.step_crops
    return replace(
        _CUDA_SIZES,
        max_batch_size=batch,
        step_crops=crops,
        step_prefill_positions=positions,
        preprocess_threads=threads,
    )


def slice_sizes(sizes: Sizes, itl_target_ms: float) -> tuple[int, int]:
    """Returns the default crops and prompt positions of a slice, at most those of a step. Both fall with a lower
    ``itl_target_ms``."""
    share = min(1.0, itl_target_ms / USUAL_ITL_TARGET_MS)
    crops = min(max(LEAST_CROPS, round(share * SLICE_CROPS)), sizes.step_crops)
    positions = SLICE_POSITIONS * crops // SLICE_CROPS
    return crops, min(positions, sizes.step_prefill_positions)


def processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
