"""Values of attention that fit FP8: each has a bound that is known at the start, so attention writes its output in FP8.

An output of attention is a weighted mean of values, so it lies within the bound of its column. The largest magnitude of
a row, which a scale of its own needs, is known only when all heads are done. A bound of the column is known before: a
value is a product with a LayerNorm's row, and that row's norm before gain and shift is at most the root of its length
(Cauchy-Schwarz). The bound is some 30 times the deviation of the values. It loses nothing relevant: FP8 keeps 3 bits of
fraction over 15 binary orders.
"""

from __future__ import annotations

import math

from torch import Tensor

from ....kernels.layer_norm import FP8_MAX, LEAST_PEAK
from ....models.layers import LayerNorm, Linear
from ..gemm import Fp8Linear


def value_units(qkv: Linear, ln: LayerNorm) -> Tensor:
    """Returns the magnitudes [dim] float32 in whose units no value exceeds FP8_MAX. ``ln``: precedes ``qkv``."""
    assert qkv.bias is not None
    dim = qkv.weight.shape[1]
    weight, bias = qkv.weight[-dim:].float(), qkv.bias[-dim:].float()
    spread = math.sqrt(dim) * (weight * ln.weight.float()).norm(dim=1)
    bound = spread + (weight @ ln.bias.float() + bias).abs()
    units: Tensor = bound.clamp_(min=LEAST_PEAK) / FP8_MAX
    return units


def in_units(qkv: Linear, ln: LayerNorm, proj: Tensor) -> tuple[Fp8Linear, Fp8Linear]:
    """Returns ``qkv`` with values in the units of `value_units`, and ``proj`` [dim, dim], which reads such values."""
    units = value_units(qkv, ln)
    rounded = Fp8Linear.of(qkv.weight, qkv.bias)
    assert rounded.bias is not None
    scales, bias = rounded.scales.clone(), rounded.bias.clone()
    scales[:, -len(units) :] /= units
    bias[-len(units) :] /= units
    reads = Fp8Linear.of(proj.float() * units)
    return (
        Fp8Linear(rounded.weight, scales, bias, rounded.dtype),
        Fp8Linear(reads.weight, reads.scales, None, rounded.dtype),
    )
