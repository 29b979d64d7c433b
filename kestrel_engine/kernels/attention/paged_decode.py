"""Decode attention: one new token a row against its sequence's pages, in one launch (flash decoding).

Owns everything between the qkv GEMM and the output projection of a decode step: Moondream 3's tau factors, RoPE,
storing the new key and value, and softmax attention over positions 0..p, all in float32. Positions of a row are
divided among ``splits`` programs for each group of heads; they leave partial sums, and the program that finishes last
adds them up, always in the order of the splits, so the result is deterministic.

The split-and-merge scheme is Flash-Decoding's (Dao et al. 2023). One query a row makes no use of matrix units: products
are fused multiply-adds over tiles [positions, heads, head_dim], which read whole runs of ``heads * head_dim`` elements.
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


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """A program's tile: ``heads`` heads by ``block`` positions at a time; ``stages`` > 1 copies tiles ahead through
    shared memory. ``ahead`` (of one stage): a program has its first tile in registers before it waits for the kernel
    in front. ``merge``: splits that the last program to finish adds up at a time."""

    heads: int
    block: int
    num_warps: int
    stages: int = 1
    ahead: bool = False
    merge: int = 8


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Partial sums of the splits, for one launch at a time: launches on one stream may share it.

    ``sums`` [entries, num_heads * head_dim] and ``stats`` [entries, 2 * num_heads] float32, an entry for each row and
    split; ``arrived`` [rows * num_heads] int32, zero between launches (every launch leaves it so).
    """

    sums: Tensor
    stats: Tensor
    arrived: Tensor

    @classmethod
    def allocate(
        cls, shapes: list[tuple[int, int]], num_heads: int, head_dim: int, device: torch.device
    ) -> DecodeWorkspace:
        """Room for the largest of ``shapes``, pairs of (rows, splits)."""
        entries = max(rows * splits for rows, splits in shapes)
        rows = max(rows for rows, _ in shapes)
        return cls(
            torch.empty(entries, num_heads * head_dim, dtype=torch.float32, device=device),
            torch.empty(entries, 2 * num_heads, dtype=torch.float32, device=device),
            torch.zeros(rows * num_heads, dtype=torch.int32, device=device),
        )


def candidates(head_dim: int, dtype: torch.dtype) -> list[DecodeConfig]:
    """What the benchmark tries. A warp's 16-byte loads cover ``warp_heads`` heads of one position; with one warp for
    every ``warp_heads`` heads no softmax crosses warps, with more warps more positions are in flight."""
    lanes = max(1, head_dim * dtype.itemsize // 16)
    warp_heads = max(1, 32 // lanes)
    one, two, four = warp_heads, 2 * warp_heads, 4 * warp_heads
    return [
        # From one round of the loop to the next a byte takes a register of its own: a tile of them spills thousands.
        DecodeConfig(one, 64, 4, ahead=dtype.itemsize > 1, merge=16),
        DecodeConfig(one, 64, 4),
        DecodeConfig(one, 32, 2),
        DecodeConfig(one, 16, 1),
        DecodeConfig(one, 16, 1, stages=3),
        DecodeConfig(one, 32, 4, stages=3),
        DecodeConfig(two, 32, 4),
        DecodeConfig(two, 16, 2),
        DecodeConfig(two, 16, 2, stages=3),
        DecodeConfig(two, 8, 2, stages=5),
        DecodeConfig(four, 16, 4),
        DecodeConfig(four, 8, 4, stages=3),
        DecodeConfig(four, 8, 4, stages=5),
        *(_of_bytes(one, two, four) if dtype.itemsize == 1 else ()),
    ]


def _of_bytes(one: int, two: int, four: int) -> list[DecodeConfig]:
    """Widening takes registers: smaller tiles, or more warps for them."""
    return [
        DecodeConfig(one, 32, 4),
        DecodeConfig(one, 16, 2),
        DecodeConfig(one, 16, 2, stages=3),
        DecodeConfig(one, 16, 4, stages=3),
        DecodeConfig(two, 16, 4),
        DecodeConfig(two, 16, 4, stages=3),
        DecodeConfig(two, 8, 4, stages=3),
        DecodeConfig(four, 4, 4, stages=5),
        DecodeConfig(four, 8, 8, stages=3),
        DecodeConfig(four, 16, 8, stages=3),
    ]


def _config(
    rows: int, head_dim: int, dtype: torch.dtype, *, units: bool = True, beside: bool = False
) -> DecodeConfig:
    """Measured on an H200, 800 positions, 32 heads of 64 (``benchmarks.kernels.attention``): bf16 10.2, 33.2 and 104
    us a layer at 1, 16 and 64 rows, FlashInfer with its own store of k and v 15.0, 43.7 and 111; e4m3 9.3, 23.9 and
    59.8, and 14.8 at 4 rows, where the tile for more takes 16.4."""
    lanes = max(1, head_dim * dtype.itemsize // 16)
    warp_heads = max(1, 32 // lanes)
    if dtype.itemsize == 1:
        if not units:
            # By integer arithmetic eight-bit numbers take more registers than larger tiles leave.
            return DecodeConfig(warp_heads, 16, 4, stages=3)
        if rows <= 8:
            return DecodeConfig(warp_heads, 64, 4, merge=16)
        return DecodeConfig(4 * warp_heads, 4, 4, stages=5)
    if rows <= 2:
        # Among others each wait for memory is long: Moondream 3's 24 layers took 0.967 instead of 1.022 ms.
        return DecodeConfig(warp_heads, 64, 4, ahead=beside, merge=16 if beside else 8)
    return DecodeConfig(4 * warp_heads, 8, 4, stages=3)


def choose_splits(
    rows: int, num_heads: int, head_dim: int, dtype: torch.dtype, *, units: bool = True
) -> int:
    """Parts of a row's positions, at most 16: one to two programs a multiprocessor (H200: 132), and always two. Of
    bytes two, for one may widen them while the other loads, and of each of many rows at most 8 parts. ``units``: as
    `has_units` tells."""
    groups = -(-num_heads // _config(rows, head_dim, dtype, units=units).heads)
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
    beside: bool = False,
) -> Tensor:
    """Stores each row's new key and value, and returns ``out`` [M, H*D]: its attention to positions 0..p of itself.

    ``qkv`` [M, >= 3*H*D]: q, k and v of all heads, neither rotated nor scaled; left as it is. ``key_pool`` and
    ``value_pool`` [num_slots, H, D], one layer, contiguous. ``page_table`` [num_seqs, max_pages] int32; ``row_seq``
    and ``positions`` [M] int32: whose pages a row uses and where its token stands. ``cos`` and ``sin``
    [max_positions, rotary_dim / 2] float32. ``tau``: raw content [M, 2*H], or parts of it [P, M, 2*H] whose
    sum it is, and alpha [H] float32. Pools of float8_e4m3fn hold keys and values divided by ``scales``. ``workspace``
    is needed where ``splits`` > 1. Columns of ``qkv``, ``content`` and ``out`` are contiguous, row strides free;
    ``out`` may be the columns of v in ``qkv``.

    A row sees its own token and slots of positions below p, nothing else. Rows of one sequence must not meet in one
    launch, except padding rows (position 0 of a spare sequence that nobody reads).

    ``pdl``: may begin before the previous kernel has ended, and then reads page table, positions and older keys. Those
    must come from an earlier graph, or from a kernel that lets none start early. ``beside``: others run meanwhile.
    """
    rows = qkv.shape[0]
    _, num_heads, head_dim = key_pool.shape
    assert key_pool.is_contiguous() and value_pool.shape == key_pool.shape
    assert value_pool.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    assert qkv.stride(1) == 1 and qkv.shape[1] >= 3 * num_heads * head_dim
    assert out.stride(1) == 1 and out.shape == (rows, num_heads * head_dim)
    assert len(row_seq) == len(positions) == rows and page_table.stride(1) == 1
    units = has_units(qkv.device)
    chosen = config or _config(rows, head_dim, key_pool.dtype, units=units, beside=beside)
    heads = min(chosen.heads, triton.next_power_of_2(num_heads))
    groups = triton.cdiv(num_heads, heads)
    assert not chosen.ahead or chosen.stages == 1
    if splits > 1:
        assert workspace is not None, "splits need a workspace"
        assert len(workspace.sums) >= rows * splits and len(workspace.arrived) >= rows * groups
        sums, stats, arrived = workspace.sums, workspace.stats, workspace.arrived
    else:
        sums = stats = arrived = positions  # Never touched.
    content, alpha = tau if tau is not None else (qkv, cos)
    assert tau is None or content.stride(-1) == 1
    parts = 1 if content.dim() == 2 else len(content)
    launch = {"launch_pdl": True} if pdl else {}
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
        out,
        qkv.stride(0),
        page_table.stride(0),
        content.stride(-2),
        content.stride(0),
        out.stride(0),
        head_dim**-0.5 * math.log2(math.e) * scales[0],
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
    """Positions of one split: whole eights, so that few splits are needed for few positions."""
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
    """Asks for RUN elements from ``head`` on of positions ``at`` [n] into L2, in lines of 128 bytes."""
    # Past the end, the last position is asked for again.
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
def _tau(content, part_stride, alpha, heads, known, position, PARTS: tl.constexpr):
    """tanh(content) + 0.5 + sigmoid(alpha * ln(p + 1)), [HEADS] float32; content is the sum of its parts."""
    if PARTS == 1:
        raw = tl.load(content + heads, mask=known, other=0.0).to(tl.float32)
    else:
        some = tl.zeros([32, heads.shape[0]], tl.float32)
        for first in tl.static_range(0, PARTS, 32):
            part = first + tl.arange(0, 32)
            there = (part < PARTS)[:, None] & known[None, :]
            at = part[:, None] * part_stride + heads[None, :]
            some += tl.load(content + at, mask=there, other=0.0)
        raw = tl.sum(some, axis=0)
    turn = tl.load(alpha + heads, mask=known, other=0.0)
    place = tl.sigmoid(turn * tl.log(position.to(tl.float32) + 1.0))
    return 2.0 * tl.sigmoid(2.0 * raw) - 0.5 + place  # tanh(x) = 2 * sigmoid(2x) - 1


@triton.jit
def _elements(group, H: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, BD: tl.constexpr):
    """Where the group's heads lie in one position's run, [HEADS * BD], and which of these are there.

    Tiles are loaded as rows of a run and shaped [.., HEADS, BD] afterwards: that way every version of the compiler
    lays a warp along heads, so that sums over positions stay within a thread.
    """
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
    """Keys and values of positions ``at`` [BLOCK], each [BLOCK, HEADS, BD] as stored; zeros from ``end`` on."""
    run = (pages.to(tl.int64) * PAGE + at % PAGE) * (H * D)
    offsets = run[:, None] + element[None, :]
    mask = (at < end)[:, None] & inside[None, :]
    k = tl.load(key_pool + offsets, mask=mask, other=0)
    v = tl.load(value_pool + offsets, mask=mask, other=0)
    return tl.reshape(k, [BLOCK, HEADS, BD]), tl.reshape(v, [BLOCK, HEADS, BD])


@triton.jit
def _attend(q, k, v, seen, most, total, acc, UNITS: tl.constexpr):
    """A step of the online softmax: ``most`` and ``total`` [1, HEADS], ``acc`` [1, HEADS, BD] with a tile's ``seen``
    positions added."""
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
    """[HEADS, BD]: the attention of one row from its splits, in their order. Reads past L1, which may be stale."""
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
        # A head beyond the last has no maximum; zero keeps -inf - -inf out.
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
    qkv, key_pool, value_pool, page_table, row_seq, positions, cos, sin, content, alpha, sums, stats, arrived, out,
    qkv_stride, table_stride, content_stride, part_stride, out_stride, scale,
    per_key, per_value, value_scale,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, ROT: tl.constexpr, PAGE: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr, TAU: tl.constexpr,
    AHEAD: tl.constexpr, MERGE: tl.constexpr, PDL: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    # Groups run fastest: neighbouring programs read neighbouring heads of the same positions.
    group, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + row)
    table = page_table + tl.load(row_seq + row).to(tl.int64) * table_stride
    splits = tl.num_programs(1)
    chunk = _chunk(position, splits)
    begin = split * chunk
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
    # Pages are read a tile ahead, so that keys wait for one load, not two; with stages the compiler sees to that.
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
        # Older keys and values do not depend on the kernel before this one.
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
        q *= _tau(raw, part_stride, alpha, heads, known, position, TAU)[:, None]
        v_new *= _tau(raw + H, part_stride, alpha, heads, known, position, TAU)[:, None]
    q *= scale

    # The first split begins with the new token, as later steps will read it: rounded to the pool's type.
    first = split == 0
    k_low = stored(k_new, key_pool, per_key)
    v_low = stored(v_new, value_pool, per_value)
    tl.store(key_pool + slot * (H * D) + hd, k_low, mask=known_hd & first)
    tl.store(value_pool + slot * (H * D) + hd, v_low, mask=known_hd & first)
    # A leading dimension of 1 keeps state and tiles in one layout: nothing crosses shared memory in the loop.
    score = tl.sum(q * widened(k_low, UNITS), 1)
    most = tl.where(first, score, float("-inf"))[None, :]
    total = tl.where(first, tl.full([1, HEADS], 1.0, tl.float32), 0.0)
    acc = tl.where(first, widened(v_low, UNITS), 0.0)[None, :, :]
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

    # Sums over a dimension of 1 only drop it.
    acc, total, most = tl.sum(acc, 0), tl.sum(total, 0), tl.sum(most, 0)
    target = out + row.to(tl.int64) * out_stride
    active = _num_active(position, splits)
    # ``out`` may be qkv's own columns of v: every thread has read the new value before one overwrites it. Other splits
    # have either ended at once or arrived before the last one writes.
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
        # All threads' partial sums are out before one says so.
        tl.debug_barrier()
        before_us = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if before_us == active - 1:
            tl.store(counter, 0)
            whole = _merged(
                sums, stats, entry, active, heads, known, element, inside, H, D, HEADS, BD, CHUNK=MERGE
            )  # fmt: skip
            whole *= value_scale
            tl.store(target + hd, whole.to(out.dtype.element_ty), mask=known_hd)
