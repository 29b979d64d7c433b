"""GEMMs of the fused passes, with an epilogue by cuBLAS: bias, tanh GELU, or addition to the residual stream.

GEMMs with FP8 operands scale the rows of both operands and add a bias. Other kernels apply GELU and the residual
addition. The exceptions are our own kernels on Hopper (`kernels.linear.fp8_products`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import ConfigError
from ...kernels.layer_norm import FP8_MAX, LEAST_PEAK
from ...kernels.linear.fp8_products import bounds, fp8_add, fp8_gelu
from ...kernels.linear.fp8_rows import FP8, Fp8Rows, quantise_rows
from ...kernels.linear.int4 import widen
from ...kernels.linear.skinny_linear import skinny_linear
from ...kernels.linear.skinny_tiling import MAX_ROWS
from ...kernels.spared import hopper_multiprocessors
from ...models.layers import Linear

LEAST_ADDED = 9 * 729
"""The fewest rows with which `Fp8Linear.add` adds. With fewer, cuBLAS and a LayerNorm that adds take less time."""

FP8_ALIGNMENT = 16
"""The rows and the columns of an FP8 weight must be multiples of this number: the alignment of tensor core operands."""


def require_exact(dtype: torch.dtype) -> None:
    """Raises AssertionError if ``dtype`` is float32 and torch may multiply float32 matrices in TF32.

    TF32 has 10 bits of fraction. torch uses it only if the process enables it.
    """
    precision = torch.get_float32_matmul_precision()
    assert dtype != torch.float32 or precision == "highest", f"float32 products are {precision}"


def wide(layer: Linear, dtype: torch.dtype) -> Tensor:
    """Returns the layer's weight [N, K], which a new tensor in ``dtype`` holds if it is in 4 bits."""
    return layer.weight if layer.scale is None else widen(layer.weight, layer.scale, dtype)


def linear(x: Tensor, layer: Linear, *, out: Tensor | None = None) -> Tensor:
    """Returns ``x @ weight.T + bias`` [T, N], in ``out`` if that is given.

    ``x``: [T, K]. The layer's weight: [N, K], whose row stride may exceed K. Its bias: [N] or None. torch.addmm with a
    one-dimensional bias uses cuBLASLt's epilogue. A weight in 4 bits is widened in tiles for few rows.
    """
    if layer.scale is not None and len(x) <= MAX_ROWS:
        return skinny_linear(x, layer.weight, layer.bias, scales=layer.scale, out=out)
    weight = wide(layer, x.dtype)
    if layer.bias is None:
        return torch.mm(x, weight.T, out=out)
    return torch.addmm(layer.bias, x, weight.T, out=out)


def linear_gelu(x: Tensor, layer: Linear) -> Tensor:
    """Returns ``gelu_tanh(x @ weight.T + bias)``. The shapes are those of `linear`; the bias must not be None.

    On CUDA this is one kernel, because cuBLASLt's GELU is the tanh form, and so is torch's fallback. On a CPU, the same
    call of torch would compute the exact GELU.
    """
    assert layer.bias is not None
    if layer.scale is not None and len(x) <= MAX_ROWS:
        return skinny_linear(x, layer.weight, layer.bias, scales=layer.scale, gelu_from=0)
    if x.is_cuda:
        return torch._addmm_activation(layer.bias, x, wide(layer, x.dtype).T, use_gelu=True)
    return F.gelu(linear(x, layer), approximate="tanh")


def add_linear(stream: Tensor, x: Tensor, weight: Tensor) -> None:
    """Adds ``x @ weight.T`` to ``stream`` in place, in the GEMM itself (beta = 1)."""
    stream.addmm_(x, weight.T)


def fp8_refused(device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns why torch can't multiply FP8 operands with row scales on ``device``; None if it can.

    Some versions of torch and CUDA can't, even if the GPU can.
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
    """``x @ weight.T + bias`` of FP8 operands. ``weight``: [N, K] float8_e4m3fn. ``scales``: [1, N] float32, one for
    each row of the weight. ``bias``: [N] or None. Bias and result have ``dtype``."""

    weight: Tensor
    scales: Tensor
    bias: Tensor | None
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> Fp8Linear:
        """Rounds ``weight`` [N, K] to FP8. Raises ConfigError unless N and K are multiples of FP8_ALIGNMENT."""
        if weight.shape[0] % FP8_ALIGNMENT or weight.shape[1] % FP8_ALIGNMENT:
            raise ConfigError(
                "fp8_gemms",
                list(weight.shape),
                f"this weight's rows and columns are not multiples of {FP8_ALIGNMENT}; use off",
            )
        scales = weight.float().abs().amax(1, keepdim=True).clamp_(min=LEAST_PEAK) / FP8_MAX
        # The quotient rounds to at most FP8_MAX. torch converts only values half a step above FP8_MAX to NaN.
        rounded = (weight.float() / scales).to(FP8)
        return cls(rounded, scales.T.contiguous(), bias, weight.dtype)

    def split(self, rows: int) -> tuple[Fp8Linear, Fp8Linear]:
        """Returns views of the first ``rows`` rows and of the other ones."""

        def part(of: slice) -> Fp8Linear:
            bias = None if self.bias is None else self.bias[of]
            return Fp8Linear(self.weight[of], self.scales[:, of], bias, self.dtype)

        return part(slice(rows)), part(slice(rows, None))

    def __call__(self, x: Fp8Rows, *, out: Tensor | None = None) -> Tensor:
        """Returns [T, N]. ``out`` must be contiguous.

        Tensor cores accumulate the sums ("fast accumulation"), on Hopper with 14 bits. Moving the sums to float32 every
        128 inputs would take 6 to 26 % longer (one H200), without a measurable gain.
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

    def add(self, x: Fp8Rows, stream: Tensor) -> Tensor | None:
        """Adds the product, which has no bias, to ``stream`` [T, N]. Returns it instead where a kernel that adds it is
        missing or slower: with few rows, and on other GPUs than Hopper's."""
        assert self.bias is None
        if len(x.values) < LEAST_ADDED or not hopper_multiprocessors(self.weight.device):
            return self(x)
        fp8_add(x, self.weight, self.scales, stream)
        return None


@dataclass(frozen=True, slots=True)
class Fp8Gelu:
    """``gelu_tanh(x @ weight.T + bias)`` in FP8: one kernel on Hopper, elsewhere a GEMM and a pass over its result.

    ``spread`` and ``least``: bounds of the scales of the result's rows (see `fp8_products.bounds`).
    """

    layer: Fp8Linear
    spread: float
    least: float

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor) -> Fp8Gelu:
        """Rounds ``weight`` [N, K] to FP8. Raises ConfigError for unsupported shapes."""
        return cls(Fp8Linear.of(weight, bias), *bounds(weight, bias))

    @property
    def wants_norms(self) -> bool:
        """Whether calls need the norms of the rows of ``x``."""
        return hopper_multiprocessors(self.layer.weight.device) > 0

    def __call__(self, x: Fp8Rows, norms: Tensor | None) -> Fp8Rows:
        """Returns [T, N] in FP8. ``norms``: [T] float32, the Euclidean norms of the rows of ``x``, if `wants_norms`."""
        layer = self.layer
        if norms is None:
            return quantise_rows(layer(x), gelu=True)
        assert layer.bias is not None
        spread, least = self.spread, self.least
        return fp8_gelu(
            x, norms, layer.weight, layer.scales, layer.bias, spread=spread, least=least
        )
