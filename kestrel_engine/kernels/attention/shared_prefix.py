"""Attention of decode rows to positions that several rows share, such as the image that all of them are about.

A program reads a head's keys and values once for up to ROWS rows, and multiplies them on tensor cores. `paged_decode`
continues each row's softmax. The scheme is that of Hydragen (arXiv 2402.05099).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..e4m3 import as_bytes, has_units
from .paged_text import loaded
from .tau_factors import tau_factors

ROWS = 16
"""The most rows of a tile: the fewest that tensor cores support."""

SPLITS = 4
"""The programs that divide the positions of a tile. A program waits for memory most of the time."""

TILE_WIDTH = 2 + ROWS
"""The number of int32 columns of a tile: number of rows (0: no tile), number of shared positions, the rows."""


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Which rows of a pass share positions, and the partial sums of their attention. ``tiles``: [N, TILE_WIDTH] int32.
    ``counts``: [M] int32, the shared positions of each row; 0 for a row in no tile. ``sums``: [>= M, SPLITS, H*D]
    float32. ``stats``: [>= M, SPLITS, 2*H] float32, the largest scores and the sums of the weights.
    """

    tiles: Tensor
    counts: Tensor
    sums: Tensor
    stats: Tensor

    @classmethod
    def allocate(
        cls, tiles: Tensor, counts: Tensor, num_heads: int, head_dim: int
    ) -> SharedPrefixes:
        """Allocates the sums for all rows of ``counts``."""
        shape = len(counts), SPLITS, num_heads * head_dim
        sums = torch.empty(shape, dtype=torch.float32, device=counts.device)
        return cls(tiles, counts, sums, sums.new_empty(len(counts), SPLITS, 2 * num_heads))

    def of(self, num_rows: int, num_tiles: int) -> SharedPrefixes:
        return SharedPrefixes(self.tiles[:num_tiles], self.counts[:num_rows], self.sums, self.stats)


def attend_shared(
    qkv: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    page_table: Tensor,
    row_seq: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    shared: SharedPrefixes,
    *,
    page_size: int,
    tau: tuple[Tensor, Tensor] | None,
    scale: float,
) -> None:
    """Fills ``shared.sums`` and ``shared.stats`` of all rows in a tile. Arguments as of `paged_decode`. ``scale``: the
    factor of the products, for weights that are powers of 2. The shared positions of a tile are the first positions of
    its first row's sequence."""
    _, num_heads, head_dim = key_pool.shape
    assert shared.tiles.shape[1] == TILE_WIDTH and shared.tiles.is_contiguous()
    assert shared.sums.is_contiguous() and shared.stats.is_contiguous()
    content, alpha = tau if tau is not None else (qkv, cos)
    parts = 1 if content.dim() == 2 else len(content)
    exact = qkv.dtype == torch.float32
    _attend[(num_heads, SPLITS, len(shared.tiles))](
        qkv, as_bytes(key_pool), as_bytes(value_pool), page_table, row_seq, positions, cos, sin, content, alpha,
        shared.tiles, shared.sums, shared.stats,
        qkv.stride(0), page_table.stride(0), content.stride(-2), content.stride(0), scale,
        H=num_heads,
        D=head_dim,
        BD=max(16, triton.next_power_of_2(head_dim)),
        ROT=2 * cos.shape[-1],
        PAGE=page_size,
        ROWS=ROWS,
        BLOCK=32 if exact else 64,
        TAU=0 if tau is None else parts,
        EXACT=exact,
        UNITS=has_units(qkv.device),
        num_warps=4,
        num_stages=1 if exact else 3,
    )  # fmt: skip


@triton.jit
def _attend(
    qkv, key_pool, value_pool, page_table, row_seq, positions, cos, sin, content, alpha, tiles, sums, stats,
    qkv_stride, table_stride, content_stride, part_stride, scale,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, ROT: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, TAU: tl.constexpr, EXACT: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    split = tl.program_id(1)
    tile = tiles + tl.program_id(2) * (2 + ROWS)
    count = tl.load(tile)
    if count > 0:
        shared = tl.load(tile + 1)
        splits = tl.num_programs(1)
        chunk = tl.cdiv(tl.cdiv(shared, splits), BLOCK) * BLOCK
        end = tl.minimum((split + 1) * chunk, shared)
        index = tl.arange(0, ROWS)
        known = index < count
        row = tl.load(tile + 2 + index, mask=known, other=0)
        position = tl.load(positions + row, mask=known, other=0)
        table = page_table + tl.load(row_seq + tl.load(tile + 2)).to(tl.int64) * table_stride

        d = tl.arange(0, BD)
        half: tl.constexpr = ROT // 2
        turns = d < ROT
        other_d = tl.where(d < half, d + half, tl.where(turns, d - half, d))
        angle = position[:, None].to(tl.int64) * half + tl.where(d < half, d, d - half)[None, :]
        turning = known[:, None] & turns[None, :]
        cosine = tl.load(cos + angle, mask=turning, other=1.0)
        sine = tl.load(sin + angle, mask=turning, other=0.0)
        sine = tl.where((d < half)[None, :], -sine, sine)
        x = qkv + row[:, None].to(tl.int64) * qkv_stride + head * D
        inside = known[:, None] & (d < D)[None, :]
        q = tl.load(x + d[None, :], mask=inside, other=0.0).to(tl.float32) * cosine
        q += tl.load(x + other_d[None, :], mask=inside, other=0.0).to(tl.float32) * sine
        if TAU:
            raw = content + row.to(tl.int64) * content_stride + head
            turn = tl.load(alpha + head)
            q *= tau_factors(raw, part_stride, turn, known, position, TAU)[:, None]
        own = q.to(qkv.dtype.element_ty)
        precision: tl.constexpr = "ieee" if EXACT else "tf32"

        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BD], tl.float32)
        # A split without positions stores a largest score of -inf and sums of 0.
        for begin in range(split * chunk, end, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            stored = at < end
            page = tl.load(table + at // PAGE, mask=stored, other=0).to(tl.int64)
            place = (page * PAGE + at % PAGE)[:, None] * (H * D) + head * D + d[None, :]
            there = stored[:, None] & (d < D)[None, :]
            k = loaded(key_pool + place, there, own.dtype, UNITS)
            scores = tl.dot(own, tl.trans(k), input_precision=precision) * scale
            # Every iteration has a position, so the largest score is never -inf.
            scores = tl.where(stored[None, :], scores, float("-inf"))
            larger = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp2(scores - larger[:, None])
            shrink = tl.exp2(best - larger)
            v = loaded(value_pool + place, there, own.dtype, UNITS)
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=precision)
            best = larger
        of_row = (row.to(tl.int64) * splits + split) * H
        tl.store(stats + of_row * 2 + head, best, mask=known)
        tl.store(stats + of_row * 2 + H + head, total, mask=known)
        tl.store(sums + of_row[:, None] * D + head * D + d[None, :], acc, mask=inside)
