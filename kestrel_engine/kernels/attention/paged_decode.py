"""Decode attention: one new token a row attends to its sequence's pages, in one launch.

The kernel does all work between the qkv GEMM and the output projection of a decode step, in float32: Moondream 3's tau
factors, RoPE, storing the new key and value, and softmax attention over positions 0..p. For each group of heads,
``splits`` programs divide the positions of a row (Flash-Decoding, Dao et al. 2023). The program that finishes last adds
the partial sums in the order of the splits, so the result is deterministic. One query a row needs no matrix units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..e4m3 import as_bytes, has_units, stored, widened
from .shared_prefix import SPLITS, SharedPrefixes, attend_shared
from .tau_factors import tau_factors


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """A program's tile of ``heads`` heads by ``block`` positions. ``stages`` > 1: prefetch tiles through shared memory.
    ``ahead`` (with one stage): load the first tile into registers before waiting for the preceding kernel. ``merge``:
    the splits that the last program adds at once."""

    heads: int
    block: int
    num_warps: int
    stages: int = 1
    ahead: bool = False
    merge: int = 8


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Partial sums of the splits, for one launch at a time. ``sums``: [entries, num_heads * head_dim] float32, one
    entry for each row and split. ``stats``: [entries, 2 * num_heads] float32. ``arrived``: [rows * num_heads] int32,
    which every launch leaves at zero."""

    sums: Tensor
    stats: Tensor
    arrived: Tensor

    @classmethod
    def allocate(
        cls, shapes: list[tuple[int, int]], num_heads: int, head_dim: int, device: torch.device
    ) -> DecodeWorkspace:
        """Allocates the workspace for the largest of ``shapes``, pairs of (rows, splits)."""
        entries = max(rows * splits for rows, splits in shapes)
        rows = max(rows for rows, _ in shapes)
        return cls(
            torch.empty(entries, num_heads * head_dim, dtype=torch.float32, device=device),
            torch.empty(entries, 2 * num_heads, dtype=torch.float32, device=device),
            torch.zeros(rows * num_heads, dtype=torch.int32, device=device),
        )


def config_of(rows: int, head_dim: int, dtype: torch.dtype, *, units: bool = True) -> DecodeConfig:
    """Returns the fastest configuration, measured on an H200 with 800 positions and 32 heads of 64. Microseconds a
    layer for 1, 16 and 64 rows: bf16 10.2, 33.2 and 104; e4m3 9.3, 23.9 and 59.8. A warp's 16-byte loads cover
    ``warp_heads`` heads of one position. Tiles of FP8 are never read ahead: across iterations of the loop, each byte
    takes a whole register, so thousands spill."""
    lanes = max(1, head_dim * dtype.itemsize // 16)
    warp_heads = max(1, 32 // lanes)
    if dtype.itemsize == 1:
        if not units:
            # Widening by integer arithmetic needs more registers than larger tiles leave free.
            return DecodeConfig(warp_heads, 16, 4, stages=3)
        if rows <= 8:
            return DecodeConfig(warp_heads, 64, 4, merge=16)
        return DecodeConfig(4 * warp_heads, 4, 4, stages=5)
    if rows <= 2:
        # The first tile is read while the GEMM in front still runs. With it, 24 layers of Moondream 2 take 1.155 ms on
        # an H100 instead of 1.245, and those of Moondream 3, beside experts, 0.967 ms on an H200 instead of 1.022.
        return DecodeConfig(warp_heads, 64, 4, ahead=True, merge=16)
    return DecodeConfig(4 * warp_heads, 8, 4, stages=3)


def choose_splits(
    rows: int, num_heads: int, head_dim: int, dtype: torch.dtype, *, units: bool = True
) -> int:
    """Returns the number of splits of a row's positions, from 2 to 16: one to two programs a multiprocessor. FP8 pools
    get two, because one program can widen while the other loads, and at most 8 splits for more than 8 rows. ``units``:
    the result of `has_units`."""
    groups = -(-num_heads // config_of(rows, head_dim, dtype, units=units).heads)
    if dtype.itemsize == 1:
        return max(2, min(16 if rows <= 8 else 8, 264 // (rows * groups)))
    return max(2, min(16, 132 // (rows * groups)))


def paged_decode(
    qkv: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    page_table: Tensor,
    row_seq: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    page_size: int,
    tau: tuple[Tensor, Tensor] | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
    splits: int,
    workspace: DecodeWorkspace | None,
    out: Tensor,
    config: DecodeConfig | None = None,
    pdl: bool = False,
    shared: SharedPrefixes | None = None,
) -> Tensor:
    """Stores each row's new key and value, and returns ``out`` [M, H*D], the attention to positions 0..p.

    ``qkv``: [M, >= 3*H*D], q, k and v of all heads, before RoPE and tau factors; not modified, except that ``out`` may
    be its columns of v. ``key_pool``, ``value_pool``: [num_slots, H, D] of one layer, contiguous; in FP8, they hold
    keys and values divided by ``scales``. ``page_table``: [num_seqs, max_pages] int32. ``row_seq``: [M] int32, the row
    of each sequence in the page table. ``positions``: [M] int32, the position p of each token. ``cos``, ``sin``:
    [max_positions, rotary_dim / 2] float32. ``tau``: raw content [M, 2*H], or partial sums of it [P, M, 2*H], and alpha
    [H], all float32. ``workspace``: required if ``splits`` > 1. The columns of ``qkv``, content and ``out`` must be
    contiguous; row strides are free.

    A row reads its own token and the slots of positions below p only. Two rows of one launch must not belong to the
    same sequence, except for rows of padding (position 0 of a spare sequence that is never read).

    ``pdl``: the kernel may start before the preceding kernel has ended. It then reads page table, positions and older
    keys early, so these must come from an earlier graph or from a kernel that allows no early start. ``shared``:
    positions that up to 16 rows have in common, which another kernel reads first. Not with ``pdl``.
    """
    rows = qkv.shape[0]
    _, num_heads, head_dim = key_pool.shape
    assert key_pool.is_contiguous() and value_pool.shape == key_pool.shape
    assert value_pool.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    assert qkv.stride(1) == 1 and qkv.shape[1] >= 3 * num_heads * head_dim
    assert out.stride(1) == 1 and out.shape == (rows, num_heads * head_dim)
    assert len(row_seq) == len(positions) == rows and page_table.stride(1) == 1
    units = has_units(qkv.device)
    chosen = config or config_of(rows, head_dim, key_pool.dtype, units=units)
    heads = min(chosen.heads, triton.next_power_of_2(num_heads))
    groups = triton.cdiv(num_heads, heads)
    assert not chosen.ahead or chosen.stages == 1
    if splits > 1:
        assert workspace is not None, "splits need a workspace"
        assert len(workspace.sums) >= rows * splits and len(workspace.arrived) >= rows * groups
        sums, stats, arrived = workspace.sums, workspace.stats, workspace.arrived
    else:
        sums = stats = arrived = positions  # Placeholders, which the kernel does not access.
    content, alpha = tau if tau is not None else (qkv, cos)
    assert tau is None or content.stride(-1) == 1
    parts = 1 if content.dim() == 2 else len(content)
    launch = {"launch_pdl": True} if pdl else {}
    scale = head_dim**-0.5 * math.log2(math.e) * scales[0]
    if shared is not None:
        assert not pdl and len(shared.counts) == rows
        attend_shared(
            qkv, key_pool, value_pool, page_table, row_seq, positions, cos, sin, shared,
            page_size=page_size, tau=tau, scale=scale,
        )  # fmt: skip
    _decode[(groups, splits, rows)](
        qkv,
        as_bytes(key_pool),
        as_bytes(value_pool),
        page_table,
        row_seq,
        positions,
        cos,
        sin,
        content,
        alpha,
        sums,
        stats,
        arrived,
        positions if shared is None else shared.counts,
        sums if shared is None else shared.sums,
        stats if shared is None else shared.stats,
        out,
        qkv.stride(0),
        page_table.stride(0),
        content.stride(-2),
        content.stride(0),
        out.stride(0),
        scale,
        1.0 / scales[0],
        1.0 / scales[1],
        scales[1],
        ROT=2 * cos.shape[-1],
        PAGE=page_size,
        HEADS=heads,
        BLOCK=chosen.block,
        STAGES=chosen.stages,
        SPLIT=splits > 1,
        TAU=0 if tau is None else parts,
        AHEAD=chosen.ahead,
        MERGE=chosen.merge,
        PDL=pdl,
        SHARED=0 if shared is None else SPLITS,
        UNITS=units,
        num_warps=chosen.num_warps,
        H=num_heads,
        D=head_dim,
        BD=triton.next_power_of_2(head_dim),
        **launch,
    )
    return out


@triton.jit
def _chunk(position, splits):
    """Returns the positions of one split, a multiple of eight, so that few positions need few splits."""
    return tl.cdiv(tl.cdiv(position, splits), 8) * 8


@triton.jit
def _num_active(position, splits):
    return tl.maximum(tl.cdiv(position, tl.maximum(_chunk(position, splits), 1)), 1)


@triton.jit
def _pages(table, at, end, PAGE: tl.constexpr):
    return tl.load(table + at // PAGE, mask=at < end, other=0)


@triton.jit
def _prefetch(
    pool,
    table,
    at,
    end,
    head,
    H: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    RUN: tl.constexpr,
):
    """Prefetches RUN elements from ``head`` on of positions ``at`` [n] into L2, in lines of 128 bytes."""
    # Past the end, prefetch the last position again.
    at = tl.minimum(at, tl.maximum(end - 1, 0))
    run = (tl.load(table + at // PAGE).to(tl.int64) * PAGE + at % PAGE) * (H * D)
    LINE: tl.constexpr = 1024 // pool.dtype.element_ty.primitive_bitwidth
    element = tl.minimum(head * D + tl.arange(0, max(1, RUN // LINE)) * LINE, H * D - 1)
    address = (pool + run[:, None] + element[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [address],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _elements(group, H: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, BD: tl.constexpr):
    """Returns the offsets of the group's heads in one position's run, [HEADS * BD], and a mask of the valid offsets.
    Tiles are loaded as rows of a run and reshaped to [.., HEADS, BD] afterwards, so that every version of the compiler
    distributes a warp along the heads, and sums over positions stay within a thread."""
    e = tl.arange(0, HEADS * BD)
    if BD == D:
        element = group * (HEADS * D) + e
    else:
        element = (group * HEADS + e // BD) * D + e % BD
    if (H % HEADS == 0) and (BD == D):
        inside = tl.full([HEADS * BD], 1, tl.int1)
    else:
        inside = (group * HEADS + e // BD < H) & (e % BD < D)
    return element, inside


@triton.jit
def _tiles(key_pool, value_pool, pages, at, end, element, inside, H: tl.constexpr, D: tl.constexpr,
           PAGE: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """Loads the stored keys and values of positions ``at`` [BLOCK], both [BLOCK, HEADS, BD]; zeros from ``end`` on."""
    run = (pages.to(tl.int64) * PAGE + at % PAGE) * (H * D)
    offsets = run[:, None] + element[None, :]
    mask = (at < end)[:, None] & inside[None, :]
    k = tl.load(key_pool + offsets, mask=mask, other=0)
    v = tl.load(value_pool + offsets, mask=mask, other=0)
    return tl.reshape(k, [BLOCK, HEADS, BD]), tl.reshape(v, [BLOCK, HEADS, BD])


@triton.jit
def _attend(q, k, v, seen, most, total, acc, UNITS: tl.constexpr):
    """Adds a tile's ``seen`` positions to the online softmax: ``most`` and ``total`` [1, HEADS], ``acc`` [1, HEADS,
    BD]."""
    scores = tl.sum(widened(k, UNITS) * q[None, :, :], 2)
    scores = tl.where(seen[:, None], scores, float("-inf"))
    higher = tl.maximum(most, tl.max(scores, 0, keep_dims=True))
    weights = tl.exp2(scores - higher)
    before = tl.exp2(most - higher)
    total = total * before + tl.sum(weights, 0, keep_dims=True)
    attended = tl.sum(weights[:, :, None] * widened(v, UNITS), 0, keep_dims=True)
    return higher, total, acc * before[:, :, None] + attended


@triton.jit
def _merged(sums, stats, entry, active, heads, known, element, inside, H: tl.constexpr, D: tl.constexpr,
            HEADS: tl.constexpr, BD: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Merges the splits of one row in order, to [HEADS, BD]. Loads bypass the L1 cache, which may be stale."""
    most = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, BD], tl.float32)
    for first in range(0, active, CHUNK):
        split = first + tl.arange(0, CHUNK)
        there = split < active
        at = (entry + split).to(tl.int64)
        stat = at[:, None] * (2 * H) + heads[None, :]
        mask = there[:, None] & known[None, :]
        m = tl.load(stats + stat, mask=mask, other=float("-inf"), cache_modifier=".cg")
        weight = tl.load(stats + stat + H, mask=mask, other=0.0, cache_modifier=".cg")
        part = tl.load(
            sums + at[:, None] * (H * D) + element[None, :],
            mask=there[:, None] & inside[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        higher = tl.maximum(most, tl.max(m, 0))
        # A head beyond the last one has no maximum. Zero avoids -inf - -inf.
        higher = tl.where(known, higher, 0.0)
        scale = tl.exp2(m - higher[None, :])
        before = tl.exp2(most - higher)
        total = total * before + tl.sum(scale * weight, 0)
        part = tl.reshape(part, [CHUNK, HEADS, BD])
        acc = acc * before[:, None] + tl.sum(scale[:, :, None] * part, 0)
        most = higher
    return acc / tl.where(known, total, 1.0)[:, None]


@triton.jit
def _decode(
    qkv, key_pool, value_pool, page_table, row_seq, positions, cos, sin, content, alpha, sums, stats, arrived,
    shared_counts, shared_sums, shared_stats, out, qkv_stride, table_stride, content_stride, part_stride, out_stride,
    scale, per_key, per_value, value_scale,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, ROT: tl.constexpr, PAGE: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr, TAU: tl.constexpr,
    AHEAD: tl.constexpr, MERGE: tl.constexpr, PDL: tl.constexpr, SHARED: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    # The group is the fastest dimension, so neighbouring programs read neighbouring heads of the same positions.
    group, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + row)
    table = page_table + tl.load(row_seq + row).to(tl.int64) * table_stride
    splits = tl.num_programs(1)
    # The positions before ``base`` were read for several rows at once.
    base = tl.load(shared_counts + row) if SHARED else 0
    chunk = _chunk(position - base, splits)
    begin = base + split * chunk
    end = tl.minimum(begin + chunk, position)
    if (begin >= end) & (split > 0):
        return

    heads = group * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, BD)
    hd = heads[:, None] * D + d[None, :]
    known = heads < H
    known_hd = known[:, None] & (d < D)[None, :]
    half: tl.constexpr = ROT // 2
    turns = d < ROT
    other_d = tl.where(d < half, d + half, tl.where(turns, d - half, d))
    other = heads[:, None] * D + other_d[None, :]
    angle = position.to(tl.int64) * half + tl.where(d < half, d, d - half)
    cosine = tl.load(cos + angle, mask=turns, other=1.0)[None, :]
    sine = tl.load(sin + angle, mask=turns, other=0.0)
    sine = tl.where(d < half, -sine, sine)[None, :]
    page = tl.load(table + position // PAGE)
    slot = page.to(tl.int64) * PAGE + position % PAGE
    # Page ids are loaded one tile ahead, so that keys wait for one load, not two. With stages, the compiler does this.
    near = begin + tl.arange(0, BLOCK)
    element, inside = _elements(group, H, D, HEADS, BD)
    if STAGES == 1:
        ahead = _pages(table, near, end, PAGE)
    if AHEAD:
        first_k, first_v = _tiles(
            key_pool, value_pool, ahead, near, end, element, inside, H, D, PAGE, BLOCK, HEADS, BD
        )
        near += BLOCK
        ahead = _pages(table, near, end, PAGE)
    if PDL:
        # Older keys and values do not depend on the preceding kernel.
        _prefetch(key_pool, table, near, end, group * HEADS, H, D, PAGE, HEADS * BD)
        _prefetch(value_pool, table, near, end, group * HEADS, H, D, PAGE, HEADS * BD)
        gdc_wait()
        gdc_launch_dependents()
    x = qkv + row.to(tl.int64) * qkv_stride
    q = tl.load(x + hd, mask=known_hd, other=0.0).to(tl.float32) * cosine
    q += tl.load(x + other, mask=known_hd, other=0.0).to(tl.float32) * sine
    x += H * D
    k_new = tl.load(x + hd, mask=known_hd, other=0.0).to(tl.float32) * cosine
    k_new += tl.load(x + other, mask=known_hd, other=0.0).to(tl.float32) * sine
    v_new = tl.load(x + H * D + hd, mask=known_hd, other=0.0).to(tl.float32)
    if TAU:
        raw = content + row.to(tl.int64) * content_stride
        turn = tl.load(alpha + heads, mask=known, other=0.0)
        q *= tau_factors(raw + heads, part_stride, turn, known, position, TAU)[:, None]
        v_new *= tau_factors(raw + H + heads, part_stride, turn, known, position, TAU)[:, None]
    q *= scale

    # The first split begins with the new token, rounded to the pool's dtype, as later steps will read it.
    first = split == 0
    k_low = stored(k_new, key_pool, per_key)
    v_low = stored(v_new, value_pool, per_value)
    tl.store(key_pool + slot * (H * D) + hd, k_low, mask=known_hd & first)
    tl.store(value_pool + slot * (H * D) + hd, v_low, mask=known_hd & first)
    # A leading dimension of 1 gives state and tiles the same layout, so the loop does not use shared memory.
    score = tl.sum(q * widened(k_low, UNITS), 1)
    v_seen = widened(v_low, UNITS)
    if SHARED:
        # It continues with the softmax over the shared positions. Without any, the result is the same as below.
        there = known & first & (base > 0)
        highest, weight, attended = score, tl.full([HEADS], 1.0, tl.float32), v_seen
        for part in tl.static_range(SHARED):
            of_part = (row.to(tl.int64) * SHARED + part) * H
            before = tl.load(shared_stats + of_part * 2 + heads, mask=there, other=float("-inf"))
            weights = tl.load(shared_stats + of_part * 2 + H + heads, mask=there, other=0.0)
            sums_there = known_hd & there[:, None]
            some = tl.load(shared_sums + of_part * D + hd, mask=sums_there, other=0.0)
            higher = tl.maximum(highest, before)
            old, new = tl.exp2(before - higher), tl.exp2(highest - higher)
            weight = weights * old + weight * new
            attended = some * old[:, None] + attended * new[:, None]
            highest = higher
        most = tl.where(first, highest, float("-inf"))[None, :]
        total = tl.where(first, weight, 0.0)[None, :]
        acc = tl.where(first, attended, 0.0)[None, :, :]
    else:
        most = tl.where(first, score, float("-inf"))[None, :]
        total = tl.where(first, tl.full([1, HEADS], 1.0, tl.float32), 0.0)
        acc = tl.where(first, v_seen, 0.0)[None, :, :]
    if AHEAD:
        most, total, acc = _attend(q, first_k, first_v, near - BLOCK < end, most, total, acc, UNITS)
        begin += BLOCK
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        at = start + tl.arange(0, BLOCK)
        if STAGES == 1:
            pages = ahead
            ahead = _pages(table, at + BLOCK, end, PAGE)
        else:
            pages = _pages(table, at, end, PAGE)
        k, v = _tiles(
            key_pool, value_pool, pages, at, end, element, inside, H, D, PAGE, BLOCK, HEADS, BD
        )
        most, total, acc = _attend(q, k, v, at < end, most, total, acc, UNITS)

    # These sums only remove the dimension of 1.
    acc, total, most = tl.sum(acc, 0), tl.sum(total, 0), tl.sum(most, 0)
    target = out + row.to(tl.int64) * out_stride
    active = _num_active(position - base, splits)
    # ``out`` may be qkv's columns of v. All threads have read the new value before any thread overwrites it. The other
    # splits have either ended at once or arrived before the last split writes.
    tl.debug_barrier()
    if (not SPLIT) or active == 1:
        whole = acc / total[:, None] * value_scale
        tl.store(target + hd, whole.to(out.dtype.element_ty), mask=known_hd)
    else:
        entry = row * splits
        at_entry = (entry + split).to(tl.int64)
        tl.store(sums + at_entry * (H * D) + hd, acc, mask=known_hd)
        tl.store(stats + at_entry * (2 * H) + heads, most, mask=known)
        tl.store(stats + at_entry * (2 * H) + H + heads, total, mask=known)
        counter = arrived + row * tl.num_programs(0) + group
        # All threads have written their partial sums before one of them increments the counter.
        tl.debug_barrier()
        before_us = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if before_us == active - 1:
            tl.store(counter, 0)
            whole = _merged(
                sums, stats, entry, active, heads, known, element, inside, H, D, HEADS, BD, CHUNK=MERGE
            )  # fmt: skip
            whole *= value_scale
            tl.store(target + hd, whole.to(out.dtype.element_ty), mask=known_hd)
