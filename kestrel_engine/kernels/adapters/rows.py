"""The changes of linear layers by adapters for many rows, such as the tokens of prompts: ``y += (x @ A.T) @ B.T``.

One kernel multiplies tiles of rows by the A of their adapters, another adds the products with B. A tile works for each
slab that one of its rows uses; adjacent tokens mostly share it. The sums have a fixed order: a row's result depends
neither on the other rows nor on the run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..linear.gelu import gelu_tanh
from .slabs import MOST_SLABS, RANKS, RowSlabs, slabs_of

_RANKS = tl.constexpr(RANKS)
_WIDTH = tl.constexpr(RANKS * MOST_SLABS)

INPUTS_A_PART = 1024
"""The inputs that one program multiplies. More programs read A together, and the second kernel adds their sums."""
_TILE_ROWS = 64


def num_parts(inputs: int) -> int:
    """Returns the partial sums of `shrink_rows` for so many inputs."""
    return -(-inputs // INPUTS_A_PART)


@triton.jit(do_not_specialize=["num_rows"])
def _shrink_kernel(
    x, parts, anchor, slabs, slab_first, slab_count, num_rows, inputs, x_stride, parts_stride, a_at,
    PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = row < num_rows
    first, count, begin, end = slabs_of(slab_first, slab_count, row, there)
    rank = tl.arange(0, _RANKS)
    at_k = tl.arange(0, BLOCK_K)
    from_k = tl.program_id(1) * PART
    to_k = tl.minimum(from_k + PART, inputs)
    rows = x + row.to(tl.int64)[:, None] * x_stride
    for i in range(begin, end):
        slab = anchor + tl.load(slabs + i) * 16 + a_at
        beyond = i - first
        own = (beyond >= 0) & (beyond < count)
        # Rows of the tile may use slabs that are far apart.
        used = tl.max(own.to(tl.int32), 0)
        acc = tl.zeros([BLOCK_M, _RANKS], tl.float32)
        for k in range(from_k, from_k + (to_k - from_k) * used, BLOCK_K):
            inside = k + at_k < to_k
            v = tl.load(rows + (k + at_k)[None, :], mask=own[:, None] & inside[None, :], other=0.0)
            a = tl.load(
                slab + rank[:, None] * inputs + (k + at_k)[None, :], mask=inside[None, :], other=0.0
            )
            acc = tl.dot(v, tl.trans(a), acc, input_precision="ieee")
        to = parts + tl.program_id(1).to(tl.int64) * parts_stride
        to += row.to(tl.int64)[:, None] * _WIDTH + beyond[:, None] * _RANKS + rank[None, :]
        tl.store(to, acc, mask=own[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _expand_kernel(
    y, parts, anchor, slabs, slab_first, slab_count, num_rows, columns, y_stride, parts_stride, b_at,
    PARTS: tl.constexpr, GELU: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = row < num_rows
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < columns
    first, count, begin, end = slabs_of(slab_first, slab_count, row, there)
    rank = tl.arange(0, _RANKS)
    if GELU or begin < end:
        at = y + row.to(tl.int64)[:, None] * y_stride + column[None, :]
        mask = there[:, None] & inside[None, :]
        acc = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        for i in range(begin, end):
            slab = anchor + tl.load(slabs + i) * 16 + b_at
            beyond = i - first
            own = (beyond >= 0) & (beyond < count)
            read = (
                parts
                + row.to(tl.int64)[:, None] * _WIDTH
                + beyond[:, None] * _RANKS
                + rank[None, :]
            )
            s = tl.load(read, mask=own[:, None], other=0.0)
            for part in tl.static_range(1, PARTS):
                s += tl.load(read + part * parts_stride, mask=own[:, None], other=0.0)
            b = tl.load(
                slab + column[:, None] * _RANKS + rank[None, :], mask=inside[:, None], other=0.0
            )
            acc = tl.dot(s.to(b.dtype), tl.trans(b), acc, input_precision="ieee")
        if GELU:
            acc = gelu_tanh(acc)
        tl.store(at, acc.to(y.dtype.element_ty), mask=mask)


def change_rows(
    x: Tensor, rows: RowSlabs, a_at: int, b_at: int, *, add_to: Tensor, gelu: bool = False
) -> None:
    """Adds the change of a layer for ``x`` [M, K] to ``add_to`` [M, N]. ``gelu``: tanh GELU of all rows follows."""
    expand_rows(shrink_rows(x, rows, a_at), rows, b_at, add_to=add_to, gelu=gelu)


def shrink_rows(x: Tensor, rows: RowSlabs, a_at: int, *, out: Tensor | None = None) -> Tensor:
    """Returns ``x`` [M, K] times the A [16, K] at ``a_at`` of the rows' slabs, as partial sums [`num_parts`, M, ranks]
    float32. Only the elements of a row's own ranks are written."""
    num_rows, inputs = x.shape
    count = num_parts(inputs)
    if out is None:
        out = torch.empty(
            (count, num_rows, RANKS * MOST_SLABS), dtype=torch.float32, device=x.device
        )
    assert x.stride(1) == 1 and out.shape[:2] == (count, num_rows) and out[0].is_contiguous()
    assert len(rows.first) == len(rows.count) == num_rows and rows.anchor.dtype == x.dtype
    if num_rows:
        _shrink_kernel[(triton.cdiv(num_rows, _TILE_ROWS), count)](
            x, out, rows.anchor, rows.slabs, rows.first, rows.count, num_rows, inputs, x.stride(0),
            out.stride(0), a_at, PART=INPUTS_A_PART, BLOCK_M=_TILE_ROWS,
            BLOCK_K=128 if x.element_size() == 2 else 32, num_warps=4,
        )  # fmt: skip
    return out


def expand_rows(
    shrunk: Tensor, rows: RowSlabs, b_at: int, *, add_to: Tensor, gelu: bool = False
) -> None:
    """Adds ``shrunk`` of `shrink_rows`, times the B [N, 16] at ``b_at`` of the rows' slabs, to ``add_to`` [M, N].
    ``gelu``: as of `change_rows`."""
    num_rows, columns = add_to.shape
    assert add_to.stride(1) == 1 and shrunk.shape[1] == num_rows and shrunk[0].is_contiguous()
    assert len(rows.first) == len(rows.count) == num_rows and rows.anchor.dtype == add_to.dtype
    if num_rows:
        block = 128 if add_to.element_size() == 2 else 64
        _expand_kernel[(triton.cdiv(num_rows, _TILE_ROWS), triton.cdiv(columns, block))](
            add_to, shrunk, rows.anchor, rows.slabs, rows.first, rows.count, num_rows, columns,
            add_to.stride(0), shrunk.stride(0), b_at, PARTS=len(shrunk), GELU=gelu,
            BLOCK_M=_TILE_ROWS, BLOCK_N=block, num_warps=4,
        )  # fmt: skip
