"""Estimates the time of answers on a CPU, from the model's shape and two short measurements of this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, prod
from typing import TYPE_CHECKING

from .. import clock

if TYPE_CHECKING:
    import torch

    from ..types.model_config import ModelConfig

_SIDE = 384
_LARGE = (16384, 1024)
"""A matrix of more bytes than caches hold."""
_MEASURED_S = 0.3
_PROMPT = 16
"""Positions of a prompt besides the image's."""


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Seconds to the first token about a new image of the fewest and of the most crops, and for each further token."""

    first_small_s: float
    first_large_s: float
    token_s: float


def estimate(model: ModelConfig, dtype: torch.dtype) -> CpuTime:
    """Measures with torch's present number of threads, in less than a second."""

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
    flops, bandwidth = _speed(dtype)
    patches = (model.vision.crop_size // model.vision.enc_patch_size) ** 2
    prefill_s = 2 * text * (patches + _PROMPT) / flops
    crop_s = 2 * vision * patches / flops
    return CpuTime(
        first_small_s=prefill_s + crop_s,
        first_large_s=prefill_s + (1 + model.vision.max_crops) * crop_s,
        token_s=text * dtype.itemsize / bandwidth,
    )


def _speed(dtype: torch.dtype) -> tuple[float, float]:
    """FLOP a second of matrix products, and bytes of weights a second of a product with one row."""
    import torch
    from torch.nn.functional import linear

    square = torch.ones(_SIDE, _SIDE, dtype=dtype)
    weights, row = torch.ones(_LARGE, dtype=dtype), torch.ones(1, _LARGE[1], dtype=dtype)
    flops = 2 * _SIDE**3 / _seconds(lambda: linear(square, square))
    return flops, weights.nbytes / _seconds(lambda: linear(row, weights))


def _seconds(work: Callable[[], object]) -> float:
    """The least duration of several: other work of the machine, threads and packing make others longer."""
    end, least = clock.now() + _MEASURED_S, inf
    while (begun := clock.now()) < end:
        work()
        least = min(least, clock.now() - begun)
    return max(least, 1e-9)
