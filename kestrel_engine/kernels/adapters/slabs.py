"""Slabs: the memory in which kernels find adapters, and what a tile of a linear layer does with them.

A slab holds 16 ranks of one adapter: A [16, in] and B [out, 16] of each layer that it may change. An adapter of a
higher rank has several slabs. All have the same layout, so a captured graph holds the offset of a layer and reads which
slabs a row uses. Their places are distances from an anchor, because a kernel knows the type of what the anchor points
to, and the alignment of what it adds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

RANKS = 16
"""The ranks of a slab, which is the least depth of a product on tensor cores."""
MOST_SLABS = 8
"""The most slabs of one row."""
UNIT = 16
"""Distances of slabs from the anchor are counted in units of so many elements."""

_RANKS = tl.constexpr(RANKS)
_WIDTH = tl.constexpr(RANKS * MOST_SLABS)


@dataclass(frozen=True, slots=True)
class RowSlabs:
    """The slabs of the rows of a pass. ``anchor``: [1], in the dtype of the slabs. ``slabs``: [n] int64, the distances
    of the slabs. ``first``, ``count``: [M] int32; row m has the slabs first[m] to first[m] + count[m] - 1, and its
    first rank is that of its first slab. Rows without an adapter have the count 0. Slabs between those of two rows have
    the same layout."""

    anchor: Tensor
    slabs: Tensor
    first: Tensor
    count: Tensor

    def __post_init__(self) -> None:
        # Kernels read them one after the other.
        for each in (self.slabs, self.first, self.count):
            assert each.is_contiguous(), each.stride()

    def of(self, num_rows: int) -> RowSlabs:
        """Those of the first ``num_rows`` rows."""
        return RowSlabs(self.anchor, self.slabs, self.first[:num_rows], self.count[:num_rows])

    def repeated(self, times: int) -> RowSlabs:
        """Those of a pass in which each row stands for so many."""
        # It copies always. `expand` and `reshape` would return a view of stride 0 of a single row.
        first, count = (each.repeat_interleave(times) for each in (self.first, self.count))
        return RowSlabs(self.anchor, self.slabs, first, count)

    def at(self, rows: Tensor) -> RowSlabs:
        """Those of ``rows`` [n] int64."""
        return RowSlabs(self.anchor, self.slabs, self.first[rows], self.count[rows])


def distance(slab: Tensor, anchor: Tensor) -> int:
    """Returns the distance of a slab from the anchor, in units. Memory of torch is aligned to 64 bytes or more."""
    units, rest = divmod(slab.data_ptr() - anchor.data_ptr(), UNIT * anchor.element_size())
    assert not rest and slab.dtype == anchor.dtype and slab.is_contiguous()
    return units


def shrunk_rows(num_rows: int, device: torch.device) -> Tensor:
    """Returns a buffer [M, ranks] float32 for the products of rows with the A of their adapters."""
    return torch.zeros(num_rows, RANKS * MOST_SLABS, dtype=torch.float32, device=device)


@triton.jit
def ranks_of(anchor, slabs, at, end, GROUP: tl.constexpr):
    """For each rank of GROUP slabs from ``at`` on, [GROUP * 16]: its slab's index, its rank there, whether it exists,
    and the slab's pointer."""
    rank = tl.arange(0, GROUP * _RANKS)
    slab = at + rank // _RANKS
    there = slab < end
    units = tl.load(slabs + slab, mask=there, other=0)
    return slab, rank % _RANKS, there, anchor + units * 16


@triton.jit
def load_b(anchor, slabs, at, end, b_at, rows_n, keep_n, GROUP: tl.constexpr):
    """Returns the rows ``rows_n`` of B of GROUP slabs from ``at`` on: [BLOCK_N, GROUP * 16]. ``b_at``: the offset of B
    in a slab. ``keep_n``: the rows that exist."""
    _, rank, there, base = ranks_of(anchor, slabs, at, end, GROUP)
    return tl.load(
        base[None, :] + (b_at + rows_n[:, None] * _RANKS + rank[None, :]),
        mask=keep_n[:, None] & there[None, :],
        other=0.0,
    )


@triton.jit
def load_a(anchor, slabs, at, end, a_at, inputs, rows_n, keep_n, GROUP: tl.constexpr):
    """Returns the inputs ``rows_n`` of A [16, inputs] of GROUP slabs from ``at`` on: [GROUP * 16, BLOCK_N]."""
    _, rank, there, base = ranks_of(anchor, slabs, at, end, GROUP)
    return tl.load(
        base[:, None] + (a_at + rank[:, None] * inputs + rows_n[None, :]),
        mask=there[:, None] & keep_n[None, :],
        other=0.0,
    )


@triton.jit
def load_shrunk(shrunk, at, end, firsts, counts, rows_m, GROUP: tl.constexpr):
    """Returns the shrunk rows ``rows_m`` for GROUP slabs from ``at`` on, [BLOCK_M, GROUP * 16] float32: 0 for slabs
    that are not a row's own. ``firsts``, ``counts``: [BLOCK_M]."""
    rank = tl.arange(0, GROUP * _RANKS)
    slab = at + rank // _RANKS
    beyond = slab[None, :] - firsts[:, None]
    own = (beyond >= 0) & (beyond < counts[:, None]) & (slab < end)[None, :]
    place = shrunk + rows_m[:, None] * _WIDTH + beyond * _RANKS + (rank % _RANKS)[None, :]
    return tl.load(place, mask=own, other=0.0)


@triton.jit
def store_shrunk(part, parts, at, end, firsts, counts, rows_m, GROUP: tl.constexpr):
    """Stores ``part`` [GROUP * 16, BLOCK_M], products with A of GROUP slabs from ``at`` on, to ``parts`` [M, ranks]
    float32: those of a row's own slabs."""
    rank = tl.arange(0, GROUP * _RANKS)
    slab = at + rank // _RANKS
    beyond = slab[:, None] - firsts[None, :]
    own = (beyond >= 0) & (beyond < counts[None, :]) & (slab < end)[:, None]
    place = parts + rows_m[None, :] * _WIDTH + beyond * _RANKS + (rank % _RANKS)[:, None]
    tl.store(place, part, mask=own)


@triton.jit
def add_expanded(
    acc, anchor, slabs, firsts, counts, begin, end, shrunk, b_at, rows_m, rows_n, keep_n, GROUP: tl.constexpr,
):  # fmt: skip
    """Adds B times the shrunk rows to ``acc`` [BLOCK_N, BLOCK_M] float32. ``rows_n``: rows of B."""
    # One turn is the usual case, for which pipelining costs more than it gains.
    for at in tl.range(begin, end, GROUP, num_stages=1):
        w = load_b(anchor, slabs, at, end, b_at, rows_n, keep_n, GROUP)
        s = load_shrunk(shrunk, at, end, firsts, counts, rows_m, GROUP)
        acc = tl.dot(w, tl.trans(s.to(w.dtype)), acc, input_precision="ieee")
    return acc


@triton.jit
def store_all_shrunk(
    h, anchor, slabs, firsts, counts, begin, end, parts, a_at, inputs, rows_m, rows_n, keep_n, GROUP: tl.constexpr,
):  # fmt: skip
    """Stores A times ``h`` [BLOCK_N, BLOCK_M], whose rows are the inputs ``rows_n``: a part of the sum."""
    for at in tl.range(begin, end, GROUP, num_stages=1):
        a = load_a(anchor, slabs, at, end, a_at, inputs, rows_n, keep_n, GROUP)
        part = tl.dot(a, h.to(a.dtype), input_precision="ieee")
        store_shrunk(part, parts, at, end, firsts, counts, rows_m, GROUP)


@triton.jit
def slabs_of(slab_first, slab_count, rows_m, keep_m):
    """Returns the first slab and the number of slabs of each row, and the range of all rows' slabs. Slabs outside of it
    may be of another kind, and must not be read."""
    firsts = tl.load(slab_first + rows_m, mask=keep_m, other=0)
    counts = tl.load(slab_count + rows_m, mask=keep_m, other=0)
    end = tl.max(tl.where(counts > 0, firsts + counts, 0), 0)
    begin = tl.min(tl.where(counts > 0, firsts, end), 0)
    return firsts, counts, begin, end


@triton.jit
def fetch_rows(
    anchor, slabs, begin, end, b_at, row, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """Requests BLOCK_N rows of B [.., 16] from ``row`` on for GROUP slabs, in lines of LINE elements."""
    if begin < end:
        slab = tl.minimum(begin + tl.arange(0, GROUP), end - 1)
        base = anchor + tl.load(slabs + slab) * 16
        line = tl.arange(0, BLOCK_N * _RANKS // LINE)
        request(base[:, None] + (b_at + row * _RANKS + line[None, :] * LINE))


@triton.jit
def fetch_columns(
    anchor, slabs, begin, end, a_at, inputs, column, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
    LINE: tl.constexpr,
):  # fmt: skip
    """As `fetch_rows`, for the columns of A [16, inputs]."""
    if begin < end:
        rank = tl.arange(0, GROUP * _RANKS)
        slab = tl.minimum(begin + rank // _RANKS, end - 1)
        base = anchor + tl.load(slabs + slab) * 16
        line = tl.arange(0, (BLOCK_N + LINE - 1) // LINE)
        within = (rank % _RANKS)[:, None] * inputs + column + line[None, :] * LINE
        request(base[:, None] + (a_at + within))


@triton.jit
def request(pointers):
    """Prefetches the line of 128 bytes at each pointer into L2, without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
