"""Causal attention of prompt text over the pages. A program computes several queries of a sequence on tensor cores.

It is flash attention (Dao et al. 2022, arXiv 2205.14135). A list of tiles on the device assigns queries to sequences,
so a CUDA graph can capture the launch for every mix of sequences.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..e4m3 import as_bytes, has_units, widened

TILE_QUERIES = 16
"""The most queries of a tile: about those of a question, and the fewest that tensor cores support."""

FEW_TILES = 16
"""The most tiles whose programs keep more keys in flight. Few programs wait for memory: for two tiles of a question
behind an image, a launch takes 8.9 us instead of 12.4 (one H100, bfloat16). Many programs fill the GPU anyway."""

TILE_WIDTH = 4
"""The number of int32 columns of a tile: sequence, row of its first query, number of queries (0: no tile), position of
the first query."""


def paged_text(
    q: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    page_table: Tensor,
    tiles: Tensor,
    *,
    page_size: int,
    scales: tuple[float, float] = (1.0, 1.0),
    out: Tensor,
) -> Tensor:
    """Writes the attention output of all queries in ``tiles`` to ``out`` [T, H*D].

    A query attends to the positions from 0 to its own. ``q``: [T, H, D], rotated. ``key_pool``, ``value_pool``:
    [num_slots, H, D] of one layer, contiguous, with the queries' own keys and values; in FP8, divided by ``scales``.
    ``page_table``: [num_seqs, max_pages] int32. ``tiles``: [N, TILE_WIDTH] int32. ``q`` and ``out`` may have any row
    stride. Rows that belong to no tile are not written.
    """
    _, num_heads, head_dim = key_pool.shape
    assert q.shape[1:] == (num_heads, head_dim) and q.stride(2) == 1, (q.shape, q.stride())
    assert key_pool.is_contiguous() and value_pool.is_contiguous(), "pools are contiguous"
    assert tiles.shape[1] == TILE_WIDTH and tiles.is_contiguous() and page_table.stride(1) == 1
    assert out.shape == (len(q), num_heads * head_dim) and out.stride(1) == 1, out.shape
    exact = q.dtype == torch.float32
    keys, stages = 128, 2
    if exact:
        keys, stages = 32, 1
    elif len(tiles) <= FEW_TILES and _has_room(q.device):
        keys, stages = 256, 5
    if len(tiles):
        _text_kernel[(len(tiles), num_heads)](
            q,
            as_bytes(key_pool),
            as_bytes(value_pool),
            page_table,
            tiles,
            out,
            q.stride(0),
            q.stride(1),
            out.stride(0),
            page_table.stride(0),
            num_heads * head_dim,
            1.4426950408889634 * head_dim**-0.5 * scales[0],
            scales[1],
            HEAD_DIM=head_dim,
            DIM_PAD=max(16, triton.next_power_of_2(head_dim)),
            PAGE_SIZE=page_size,
            QUERIES=TILE_QUERIES,
            KEYS=keys,
            WIDTH=TILE_WIDTH,
            EXACT=exact,
            UNITS=has_units(q.device),
            num_warps=4,
            num_stages=stages,
        )
    return out


@lru_cache
def _has_room(device: torch.device) -> bool:
    """Returns whether a program may take the 143,360 bytes of shared memory that 256 keys in five stages need."""
    if device.type != "cuda":
        return False
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0) >= 143_360


@triton.jit
def loaded(pointers, there, dtype: tl.constexpr, UNITS: tl.constexpr):
    """Loads values from a pool as ``dtype``, which represents every e4m3 number exactly."""
    kept = tl.load(pointers, mask=there, other=0)
    if kept.dtype == dtype:
        return kept
    else:
        return widened(kept, UNITS).to(dtype)


@triton.jit
def _text_kernel(
    q, keys, values, page_table, tiles, out,
    q_row, q_head, out_row, table_row, slot_stride, scale, value_scale,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(0) * WIDTH
    head = tl.program_id(1).to(tl.int64)
    count = tl.load(tile + 2)
    if count > 0:
        seq = tl.load(tile).to(tl.int64)
        first = tl.load(tile + 1).to(tl.int64)
        start = tl.load(tile + 3)
        query = tl.arange(0, QUERIES)
        dim = tl.arange(0, DIM_PAD)
        inside = (query < count)[:, None] & (dim < HEAD_DIM)[None, :]
        rows = first + query
        own = tl.load(
            q + rows[:, None] * q_row + head * q_head + dim[None, :], mask=inside, other=0.0
        )
        best = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        sums = tl.zeros([QUERIES, DIM_PAD], tl.float32)
        precision: tl.constexpr = "ieee" if EXACT else "tf32"
        table = page_table + seq * table_row
        for begin in range(0, start + count, KEYS):
            position = begin + tl.arange(0, KEYS)
            stored = position < start + count
            page = tl.load(table + position // PAGE_SIZE, mask=stored, other=0).to(tl.int64)
            slot = page * PAGE_SIZE + position % PAGE_SIZE
            place = slot[:, None] * slot_stride + head * HEAD_DIM + dim[None, :]
            there = stored[:, None] & (dim < HEAD_DIM)[None, :]
            k = loaded(keys + place, there, own.dtype, UNITS)
            scores = tl.dot(own, tl.trans(k), input_precision=precision) * scale
            seen = position[None, :] <= start + query[:, None]
            scores = tl.where(seen, scores, float("-inf"))
            # All queries attend to position 0, which is in the first iteration, so the largest score is never -inf.
            larger = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp2(scores - larger[:, None])
            shrink = tl.exp2(best - larger)
            v = loaded(values + place, there, own.dtype, UNITS)
            total = total * shrink + tl.sum(weights, 1)
            sums = sums * shrink[:, None] + tl.dot(
                weights.to(v.dtype), v, input_precision=precision
            )
            best = larger
        result = sums / total[:, None] * value_scale
        target = out + rows[:, None] * out_row + head * HEAD_DIM + dim[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=inside)
