"""GEMMs of the fused passes with what cuBLAS does in their epilogue: bias, tanh GELU, adding to the residual stream.

Those of FP8 operands scale the rows of both and add a bias; GELU and residual are left to the kernels around them, but
for an MLP's first product on Hopper, which is our own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import ConfigError
from ...kernels.linear.fp8_gelu import bounds, fp8_gelu, programs
from ...kernels.linear.fp8_rows import FP8, FP8_MAX, LEAST_PEAK, Fp8Rows, quantise_rows
from ...models.layers import Linear

FP8_ALIGNMENT = 16
"""Rows and columns of an FP8 weight come in multiples of it: what a tensor core's operands are aligned to, in bytes."""


def require_exact(dtype: torch.dtype) -> None:
    """Float32 means float32: raises AssertionError if torch may multiply float32 matrices in TF32, 10 bits of fraction.

    It doesn't unless the process told it to.
    """
    precision = torch.get_float32_matmul_precision()
    assert dtype != torch.float32 or precision == "highest", f"float32 products are {precision}"


def linear(x: Tensor, layer: Linear, *, out: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``; x [T, K], weight [N, K] (its row stride may exceed K), bias [N] or None; ``out`` [T, N].

    The form of torch.addmm that puts a one-dimensional bias into cuBLASLt's epilogue.
    """
    if layer.bias is None:
        return torch.mm(x, layer.weight.T, out=out)
    return torch.addmm(layer.bias, x, layer.weight.T, out=out)


def linear_gelu(x: Tensor, layer: Linear) -> Tensor:
    """``gelu_tanh(x @ weight.T + bias)``, shapes as for `linear`, the bias not None.

    On CUDA one kernel: cuBLASLt's GELU is the tanh form, as is torch's where it does without cuBLASLt. On the CPU the
    same call would take the exact GELU.
    """
    assert layer.bias is not None
    if x.is_cuda:
        return torch._addmm_activation(layer.bias, x, layer.weight.T, use_gelu=True)
    return F.gelu(linear(x, layer), approximate="tanh")


def add_linear(stream: Tensor, x: Tensor, weight: Tensor) -> None:
    """``stream += x @ weight.T`` in place, by the GEMM itself (beta = 1)."""
    stream.addmm_(x, weight.T)


def fp8_refused(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why torch doesn't multiply FP8 operands with a scale for each row there, though the card can; None if it does.

    Which library does it depends on the generation and on the versions of torch and CUDA, and not all of them do.
    """
    rows = Fp8Rows.empty(2, FP8_ALIGNMENT, device)
    bias = torch.zeros(FP8_ALIGNMENT, dtype=dtype, device=device)
    layer = Fp8Linear.of(torch.eye(FP8_ALIGNMENT, dtype=dtype, device=device), bias)
    try:
        layer(Fp8Rows(rows.values.zero_(), rows.scales.fill_(1)))
    except (RuntimeError, ValueError) as error:
        return str(error).partition("\n")[0]
    return None


@dataclass(frozen=True, slots=True)
class Fp8Linear:
    """``x @ weight.T + bias`` of FP8 operands: weight [N, K] float8_e4m3fn, scales [1, N] float32, one for each row of
    the weight; bias [N] or None and the results are of ``dtype``."""

    weight: Tensor
    scales: Tensor
    bias: Tensor | None
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> Fp8Linear:
        """Rounds ``weight`` [N, K]. Raises ConfigError unless N and K are multiples of FP8_ALIGNMENT."""
        if weight.shape[0] % FP8_ALIGNMENT or weight.shape[1] % FP8_ALIGNMENT:
            raise ConfigError(
                "fp8_gemms",
                list(weight.shape),
                f"a weight whose rows and columns are no multiples of {FP8_ALIGNMENT}; only off will do",
            )
        scales = weight.float().abs().amax(1, keepdim=True).clamp_(min=LEAST_PEAK) / FP8_MAX
        # At most FP8_MAX, whichever way the division rounds: beyond half a step above it, torch makes no number of it.
        rounded = (weight.float() / scales).to(FP8)
        return cls(rounded, scales.T.contiguous(), bias, weight.dtype)

    def __call__(self, x: Fp8Rows, *, out: Tensor | None = None) -> Tensor:
        """[T, N]. ``out``: rows without gaps.

        Sums are the tensor core's own ("fast accumulation"): of Hopper's, 14 bits count. Moving them to float32 every
        128 inputs takes 6 to 26 % of the time (one H200) and changes nothing that could be measured: a product of
        8192 inputs is off by 0.26 % with it and by 0.17 % without, where rounding the operands costs 3.7 %.
        """
        return torch._scaled_mm(
            x.values,
            self.weight.T,
            x.scales,
            self.scales,
            bias=self.bias,
            out_dtype=self.dtype,
            use_fast_accum=x.values.is_cuda,
            out=out,
        )


@dataclass(frozen=True, slots=True)
class Fp8Gelu:
    """``gelu_tanh(x @ weight.T + bias)`` in FP8: one kernel on Hopper, else a product and a pass over what it gives.

    ``spread`` and ``least``: what the rows' scales are bounded by.
    """

    layer: Fp8Linear
    spread: float
    least: float

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor) -> Fp8Gelu:
        """Raises ConfigError for shapes that can't."""
        return cls(Fp8Linear.of(weight, bias), *bounds(weight, bias))

    @property
    def wants_norms(self) -> bool:
        """Whether calls need them."""
        return programs(self.layer.weight.device) > 0

    def __call__(self, x: Fp8Rows, norms: Tensor | None) -> Fp8Rows:
        """[T, N]. ``norms`` [T] float32: Euclidean ones of ``x``; None where they aren't wanted."""
        layer = self.layer
        if norms is None:
            return quantise_rows(layer(x), gelu=True)
        assert layer.bias is not None
        spread, least = self.spread, self.least
        return fp8_gelu(
            x, norms, layer.weight, layer.scales, layer.bias, spread=spread, least=least
        )
