"""Sorts tokens' rows by expert, and their inputs into the order in which a GEMM reads them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..e4m3 import as_bytes
from ..linear.fp8_rows import Fp8Rows


def sorted_rows(x: Tensor, out: Tensor, order: Tensor, k: int, *, kernel_order: bool) -> None:
    """Writes the rows ``order // k`` of ``x`` [T, D] to ``out`` [P, D], in out's dtype.

    ``order``: [P] int32 (see `route.Grouping`). ``kernel_order``: reorder every 64 inputs as `hopper.in_kernel_order`
    does.
    """
    dim = out.shape[1]
    assert not kernel_order or dim % 64 == 0, dim
    _launch(x, out, None, None, order, k, kernel_order)


def sorted_fp8_rows(x: Fp8Rows, memory: Tensor, order: Tensor, k: int) -> Fp8Rows:
    """Returns the rows ``order // k`` of ``x`` [T, D] as [P, D], stored in ``memory`` (at least P * D bytes,
    contiguous)."""
    num_rows, dim = len(order), x.values.shape[1]
    values = memory.view(torch.float8_e4m3fn).flatten()[: num_rows * dim].view(num_rows, dim)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=values.device)
    _launch(as_bytes(x.values), as_bytes(values), x.scales, scales, order, k, False)
    return Fp8Rows(values, scales)


def _launch(
    x: Tensor,
    out: Tensor,
    scales: Tensor | None,
    out_scales: Tensor | None,
    order: Tensor,
    k: int,
    kernel_order: bool,
) -> None:
    num_rows, dim = out.shape
    assert out.is_contiguous() and x.stride(1) == 1 and x.shape[1] == dim, (x.shape, out.shape)
    assert len(order) == num_rows, (len(order), num_rows)
    if num_rows:
        _sort_kernel[(num_rows,)](
            x,
            out,
            scales,
            out_scales,
            order,
            x.stride(0),
            DIM=dim,
            K_CHOICES=k,
            KERNEL_ORDER=kernel_order,
            BLOCK=triton.next_power_of_2(dim),
            num_warps=4,
        )


@triton.jit
def _sort_kernel(
    x_ptr, out_ptr, scales_ptr, out_scales_ptr, order_ptr, stride,
    DIM: tl.constexpr, K_CHOICES: tl.constexpr, KERNEL_ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    token = (tl.load(order_ptr + place) // K_CHOICES).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < DIM
    source = column
    if KERNEL_ORDER:
        # Reorders 64 inputs from (quad, chunk, half, one of two) to (chunk, half, quad, one of two).
        chunk, half, quad = (column // 16) % 4, (column // 8) % 2, (column // 2) % 4
        source = (column // 64) * 64 + quad * 16 + chunk * 4 + half * 2 + column % 2
    x = tl.load(x_ptr + token * stride + source, mask=inside, other=0)
    tl.store(out_ptr + place * DIM + column, x.to(out_ptr.dtype.element_ty), mask=inside)
    if scales_ptr is not None:
        tl.store(out_scales_ptr + place, tl.load(scales_ptr + token))
