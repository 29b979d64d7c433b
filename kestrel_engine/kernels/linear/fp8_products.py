"""Products of FP8 operands with what follows in their epilogue (Triton, Hopper): GELU and rounding, or an addition.

`fp8_gelu` is the first GEMM of an MLP. A program computes one tile, so the largest magnitude of a row, which its scale
needs, is not known in the epilogue. A bound is known before: a dot product is at most the product of the norms of its
operands (Cauchy-Schwarz), and GELU does not increase a magnitude. A bound of eight times the peak loses nothing
relevant: FP8 keeps 3 bits of fraction over 15 binary orders, and what is lost is below the eleventh. In return, the
hidden layer is written once, with one byte an element, instead of being written, read and written again. For
[40824, 1152] by [4304, 1152] on one H200, the kernel takes 363 us; cuBLAS and a GELU pass take 332 and 140 us.

`fp8_add` adds to the residual stream. The tensor memory accelerator sends sums to the L2 cache, which adds them, so no
program waits for the stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..layer_norm import FP8_MAX, LEAST_PEAK
from ..spared import hopper_multiprocessors
from .fp8_rows import Fp8Rows, gelu_tanh

ROUNDED = 1.07
"""The largest factor by which rounding to FP8 may increase a row's norm. Half a step is a sixteenth."""


@dataclass(frozen=True, slots=True)
class ProductTile:
    """The rows and outputs of a program's tile, the inputs of a step, the warps, the steps that are prefetched, and the
    parts, 1 or 2, in which outputs leave."""

    rows: int = 128
    outputs: int = 256
    inputs: int = 128
    warps: int = 8
    stages: int = 3
    parts: int = 1


GELU_TILE = ProductTile()
ADD_TILE = ProductTile(rows=256, outputs=128, stages=4, parts=2)
ADD_SHORT_TILE = ProductTile(rows=128, outputs=128, warps=4, stages=5)
"""For few inputs, with which writing a tile takes long beside computing it."""
SHORT = 2048


@triton.jit
def _kernel(
    rows, weight, out, row_scales, weight_scales, bias, norms, scales,
    num_rows, num_outputs, num_inputs, spread, least,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr,
    GROUP: tl.constexpr, PROGRAMS: tl.constexpr, ON_CARD: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(num_rows, M), tl.cdiv(num_outputs, N)
    for tile in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=True):
        # Process GROUP row tiles with all outputs before the next group, so that their operands stay in the L2 cache.
        first = tile // (GROUP * across) * GROUP
        high = min(down - first, GROUP)
        m0 = (first + tile % (GROUP * across) % high) * M
        n0 = tile % (GROUP * across) // high * N
        total = tl.zeros((M, N), tl.float32)
        for k in range(tl.cdiv(num_inputs, K)):
            left, right = rows.load([m0, k * K]), weight.load([n0, k * K])
            total = tl.dot(left, right.T, total)
        row = m0 + tl.arange(0, M)
        there = row < num_rows
        of_row = tl.load(row_scales + row, mask=there, other=0.0)
        up = of_row
        if norms is not None:
            scale = tl.load(norms + row, mask=there, other=0.0) * spread + least
            tl.store(scales + row, scale, mask=there & (n0 == 0))
            up = 1.0 / scale
        if PARTS == 1:
            _send(total, of_row, up, m0, n0, weight_scales, bias, num_outputs, out, ON_CARD)
        else:
            a, b = tl.split(tl.permute(tl.reshape(total, (M, 2, N // 2)), (0, 2, 1)))
            _send(a, of_row, up, m0, n0, weight_scales, bias, num_outputs, out, ON_CARD)
            _send(b, of_row, up, m0, n0 + N // 2, weight_scales, bias, num_outputs, out, ON_CARD)


@triton.jit
def _send(total, of_row, up, m0, n0, weight_scales, bias, num_outputs, out, ON_CARD: tl.constexpr):
    """Writes the GELU of the sums, in the units of ``1 / up``. Without bias it adds the sums to ``out``."""
    col = n0 + tl.arange(0, total.shape[1])
    inside = col < num_outputs
    of_col = tl.load(weight_scales + col, mask=inside, other=0.0)
    sums = total * of_row[:, None] * of_col[None, :]
    if bias is not None:
        shift = tl.load(bias + col, mask=inside, other=0.0).to(tl.float32)
        hidden = gelu_tanh(sums + shift[None, :], ON_CARD)
        out.store([m0, n0], (hidden * up[:, None]).to(out.dtype))
    elif ON_CARD:
        out.atomic_add([m0, n0], sums.to(out.dtype))
    else:
        out.store([m0, n0], out.load([m0, n0]) + sums.to(out.dtype))


def bounds(weight: Tensor, bias: Tensor) -> tuple[float, float]:
    """Returns ``spread`` and ``least`` of `fp8_gelu` for ``weight`` [N, K] and ``bias`` [N] before rounding."""
    spread = ROUNDED**2 * float(weight.float().norm(dim=1).max()) / FP8_MAX
    return spread, max(float(bias.float().abs().max()), LEAST_PEAK) / FP8_MAX


def fp8_gelu(
    rows: Fp8Rows,
    norms: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor,
    *,
    spread: float,
    least: float,
    tile: ProductTile = GELU_TILE,
) -> Fp8Rows:
    """Returns ``gelu_tanh(rows @ (weight * weight_scales.T).T + bias)`` [T, N] in FP8.

    The scales of the result's rows are ``norms * spread + least``. ``rows``: [T, K]. ``norms``: [T] float32, the norms
    of the rows. ``weight``: [N, K] float8_e4m3fn. ``weight_scales``: [1, N] float32. ``bias``: [N]. K and N must be
    multiples of 16.
    """
    result = Fp8Rows.empty(len(rows.values), len(weight), weight.device)
    _launch(
        rows,
        weight,
        weight_scales,
        result.values,
        tile,
        bias,
        norms,
        result.scales,
        (spread, least),
    )
    return result


def fp8_add(
    rows: Fp8Rows,
    weight: Tensor,
    weight_scales: Tensor,
    stream: Tensor,
    *,
    tile: ProductTile | None = None,
) -> None:
    """Adds ``rows @ (weight * weight_scales.T).T``, rounded to the stream's dtype, to ``stream`` [T, N] in place.

    ``stream``: contiguous. The other shapes and dtypes are those of `fp8_gelu`.
    """
    tile = tile or (ADD_SHORT_TILE if weight.shape[1] <= SHORT else ADD_TILE)
    _launch(rows, weight, weight_scales, stream, tile)


def _launch(
    rows: Fp8Rows,
    weight: Tensor,
    weight_scales: Tensor,
    out: Tensor,
    tile: ProductTile,
    bias: Tensor | None = None,
    norms: Tensor | None = None,
    scales: Tensor | None = None,
    bound: tuple[float, float] = (0.0, 0.0),
) -> None:
    (num_rows, num_inputs), num_outputs = rows.values.shape, len(weight)
    if num_rows:
        launched = hopper_multiprocessors(weight.device) or 2
        _kernel[(launched,)](
            TensorDescriptor.from_tensor(rows.values, [tile.rows, tile.inputs]),
            TensorDescriptor.from_tensor(weight, [tile.outputs, tile.inputs]),
            TensorDescriptor.from_tensor(out, [tile.rows, tile.outputs // tile.parts]),
            rows.scales, weight_scales, bias, norms, scales,
            num_rows, num_outputs, num_inputs, *bound,
            M=tile.rows, N=tile.outputs, K=tile.inputs, PARTS=tile.parts, GROUP=8, PROGRAMS=launched,
            ON_CARD=weight.is_cuda, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
