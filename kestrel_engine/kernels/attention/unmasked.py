"""Unmasked attention within blocks of positions on Hopper: a persistent, warp-specialised kernel (Gluon, sm_90 only).

It serves the patches of a crop, and the image at the beginning of a prompt. A program computes 192 queries of one head
of one block of positions at a time. One warp loads queries, keys and values with the tensor memory accelerator. Three
groups of four warps each multiply 64 queries. While the tensor cores multiply the values of a tile of keys, a group
computes the softmax of the next tile (FlashAttention-3, arXiv 2407.08608, section 3.2). A tile's sides are powers of
two. So an operand of more than 64 dimensions, as the tower's 72, has a tile of 64 columns and one of 16. The
accelerator fills what lies beyond a head or a block with zeros.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..gluon_support import hopper_programs

TILE = 64
"""Queries of a group, and keys of a tile."""
GROUPS = 3
STAGES = 4
"""Tiles of keys and values that the ring holds."""
LEAST_LENGTH = 2 * TILE + 1
"""The fewest positions of a block. The first tile and the last one are computed outside the loop."""
WIDTHS = (64, 16)
"""The columns of the two tiles of an operand."""


def takes(length: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether `attend` supports the device and the shapes, and is faster than torch's attention."""
    return (
        hopper_programs(device) > 0
        and dtype in (torch.bfloat16, torch.float16)
        and WIDTHS[0] <= head_dim <= sum(WIDTHS)
        and head_dim % 8 == 0
        and length >= LEAST_LENGTH
    )


def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Writes softmax(q k^T / sqrt(head_dim)) v of each block and head to ``out``. ``q``, ``k``, ``v``, ``out``: [n,
    length, heads, head_dim] of one dtype, with strides that are multiples of 16 bytes except for the last one, which is
    1. See `takes` for the supported shapes."""
    n, length, heads, head_dim = q.shape
    tiles = [_tile(operand, width) for width in WIDTHS for operand in (q, k, v)]
    total = n * heads * -(-length // (TILE * GROUPS))
    _kernel[(min(hopper_programs(q.device), total),)](
        *tiles,
        out,
        out.stride(0),
        out.stride(1),
        total,
        math.log2(math.e) / math.sqrt(head_dim),
        HEADS=heads,
        HEAD_DIM=head_dim,
        KEYS=length,
        num_warps=4,
    )


def _tile(operand: Tensor, width: int) -> TensorDescriptor:
    # [n, heads, length, head_dim], so the accelerator knows where a head and a block end.
    x = operand.transpose(1, 2)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=2 * width, element_bitwidth=16, rank=4)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, TILE, width], layout)


_GROUPS = gl.constexpr(GROUPS)
_STAGES = gl.constexpr(STAGES)
_TILE = gl.constexpr(TILE)
_WIDE = gl.constexpr(WIDTHS[0])
_NARROW = gl.constexpr(WIDTHS[1])


# These numbers are not specialised, so a multiple of 16 does not compile another kernel.
@gluon.jit(do_not_specialize=["of_block", "of_row", "total"])
def _kernel(
    q_wide, k_wide, v_wide, q_narrow, k_narrow, v_narrow, out, of_block, of_row, total, factor,
    HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_wide.dtype
    wide: gl.constexpr = q_wide.layout
    narrow: gl.constexpr = q_narrow.layout
    q0 = gl.allocate_shared_memory(dtype, [_GROUPS, 1, 1, _TILE, _WIDE], wide)
    q1 = gl.allocate_shared_memory(dtype, [_GROUPS, 1, 1, _TILE, _NARROW], narrow)
    k0 = gl.allocate_shared_memory(dtype, [_STAGES, 1, 1, _TILE, _WIDE], wide)
    k1 = gl.allocate_shared_memory(dtype, [_STAGES, 1, 1, _TILE, _NARROW], narrow)
    v0 = gl.allocate_shared_memory(dtype, [_STAGES, 1, 1, _TILE, _WIDE], wide)
    v1 = gl.allocate_shared_memory(dtype, [_STAGES, 1, 1, _TILE, _NARROW], narrow)
    q_full = gl.allocate_shared_memory(gl.int64, [_GROUPS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [_GROUPS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for group in gl.static_range(_GROUPS):
        mbarrier.init(q_full.index(group), count=1)
        mbarrier.init(q_empty.index(group), count=1)
    for stage in gl.static_range(_STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=_GROUPS)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=_GROUPS)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (_attend, (
                0, q0, q1, k0, k1, v0, v1, q_full, q_empty, k_full, k_empty, v_full, v_empty, out,
                of_block, of_row, total, factor, HEADS, HEAD_DIM, KEYS,
            )),
            (_attend, (
                1, q0, q1, k0, k1, v0, v1, q_full, q_empty, k_full, k_empty, v_full, v_empty, out,
                of_block, of_row, total, factor, HEADS, HEAD_DIM, KEYS,
            )),
            (_attend, (
                2, q0, q1, k0, k1, v0, v1, q_full, q_empty, k_full, k_empty, v_full, v_empty, out,
                of_block, of_row, total, factor, HEADS, HEAD_DIM, KEYS,
            )),
            (_fetch, (
                q_wide, k_wide, v_wide, q_narrow, k_narrow, v_narrow, q0, q1, k0, k1, v0, v1,
                q_full, q_empty, k_full, k_empty, v_full, v_empty, total, HEADS, HEAD_DIM, KEYS,
            )),
        ],
        [4, 4, 1],
        [160, 160, 24],
    )  # fmt: skip


@gluon.jit
def _place(tile, HEADS: gl.constexpr, KEYS: gl.constexpr):
    """Returns a tile's block, head and first query."""
    ROWS: gl.constexpr = _TILE * _GROUPS
    TILES: gl.constexpr = (KEYS + ROWS - 1) // ROWS
    pair = tile // TILES
    return pair // HEADS, pair % HEADS, (tile % TILES) * ROWS


@gluon.jit
def _fetch(
    q_wide, k_wide, v_wide, q_narrow, k_narrow, v_narrow, q0, q1, k0, k1, v0, v1,
    q_full, q_empty, k_full, k_empty, v_full, v_empty, total,
    HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    SPLIT: gl.constexpr = HEAD_DIM > _WIDE
    BYTES: gl.constexpr = _TILE * (_WIDE + (_NARROW if SPLIT else 0)) * 2
    stage = 0
    phase = 1
    q_phase = 1
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        block, head, first = _place(tile, HEADS, KEYS)
        for group in gl.static_range(_GROUPS):
            mbarrier.wait(q_empty.index(group), q_phase)
            ready = q_full.index(group)
            row = first + group * _TILE
            mbarrier.expect(ready, BYTES)
            tma.async_copy_global_to_shared(q_wide, [block, head, row, 0], ready, q0.index(group))
            if SPLIT:
                at = [block, head, row, _WIDE]
                tma.async_copy_global_to_shared(q_narrow, at, ready, q1.index(group))
        q_phase ^= 1
        for row in range(0, KEYS, _TILE):
            mbarrier.wait(k_empty.index(stage), phase)
            ready = k_full.index(stage)
            mbarrier.expect(ready, BYTES)
            tma.async_copy_global_to_shared(k_wide, [block, head, row, 0], ready, k0.index(stage))
            if SPLIT:
                at = [block, head, row, _WIDE]
                tma.async_copy_global_to_shared(k_narrow, at, ready, k1.index(stage))
            mbarrier.wait(v_empty.index(stage), phase)
            ready = v_full.index(stage)
            mbarrier.expect(ready, BYTES)
            tma.async_copy_global_to_shared(v_wide, [block, head, row, 0], ready, v0.index(stage))
            if SPLIT:
                at = [block, head, row, _WIDE]
                tma.async_copy_global_to_shared(v_narrow, at, ready, v1.index(stage))
            stage += 1
            if stage == _STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _attend(
    group: gl.constexpr, q0, q1, k0, k1, v0, v1, q_full, q_empty, k_full, k_empty, v_full, v_empty, out,
    of_block, of_row, total, factor, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    SPLIT: gl.constexpr = HEAD_DIM > _WIDE
    S: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _TILE, 16]
    )
    WIDE: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _WIDE, 16]
    )
    NARROW: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _NARROW, 16]
    )
    stage = 0
    phase = 0
    q_phase = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        block, head, first = _place(tile, HEADS, KEYS)
        o0 = gl.zeros([_TILE, _WIDE], gl.float32, WIDE)
        o1 = gl.zeros([_TILE, _NARROW], gl.float32, NARROW)
        mbarrier.wait(q_full.index(group), q_phase)
        q_phase ^= 1
        # Queries stay in registers. Read from shared memory, they and the keys would take all of its bandwidth.
        qa = q0.index(group).reshape([_TILE, _WIDE]).load(gl.DotOperandLayout(0, S, 2))
        qb = qa
        if SPLIT:
            qb = q1.index(group).reshape([_TILE, _NARROW]).load(gl.DotOperandLayout(0, S, 2))
        mbarrier.arrive(q_empty.index(group), count=1)
        mbarrier.wait(k_full.index(stage), phase)
        s = hopper.warpgroup_mma_wait(0, deps=(_scores(qa, qb, k0, k1, stage, SPLIT),))
        mbarrier.arrive(k_empty.index(stage), count=1)
        top = gl.max(s, 1)
        p = _exp2(s * factor - gl.expand_dims(top * factor, 1))
        sums = _lane_sums(p)
        weights = p.to(v0.dtype)
        for _ in range(2 * _TILE, KEYS, _TILE):
            o0, o1, top, sums, weights, stage, phase = _tile_of_keys(
                qa, qb, k0, k1, v0, v1, k_full, k_empty, v_full, v_empty, o0, o1, top, sums, weights, stage, phase,
                factor, KEYS, SPLIT, False,
            )  # fmt: skip
        o0, o1, top, sums, weights, stage, phase = _tile_of_keys(
            qa, qb, k0, k1, v0, v1, k_full, k_empty, v_full, v_empty, o0, o1, top, sums, weights, stage, phase,
            factor, KEYS, SPLIT, True,
        )  # fmt: skip
        mbarrier.wait(v_full.index(stage), phase)
        a0 = gl.convert_layout(weights, gl.DotOperandLayout(0, WIDE, 2))
        a1 = gl.convert_layout(weights, gl.DotOperandLayout(0, NARROW, 2))
        next0 = hopper.warpgroup_mma(a0, v0.index(stage).reshape([_TILE, _WIDE]), o0, is_async=True)
        next1 = hopper.warpgroup_mma(
            a1, v1.index(stage).reshape([_TILE, _NARROW]), o1, is_async=True
        )
        o0, o1, a0, a1 = hopper.warpgroup_mma_wait(0, deps=(next0, next1, a0, a1))
        mbarrier.arrive(v_empty.index(stage), count=1)
        stage, phase = _after(stage, phase)
        inverse = 1.0 / gl.sum(sums, 1)
        row = first + group * _TILE
        to = out + block.to(gl.int64) * of_block + head * HEAD_DIM
        _store(o0, inverse, to, of_row, row, 0, HEAD_DIM, KEYS)
        if SPLIT:
            _store(o1, inverse, to, of_row, row, _WIDE, HEAD_DIM, KEYS)


@gluon.jit
def _after(stage, phase):
    wraps = stage == _STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _tile_of_keys(
    qa, qb, k0, k1, v0, v1, k_full, k_empty, v_full, v_empty, o0, o1, top, sums, weights, stage, phase, factor,
    KEYS: gl.constexpr, SPLIT: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """Adds the values of the tile at ``stage``, with its ``weights``, and computes those of the next tile."""
    WIDE: gl.constexpr = o0.type.layout
    NARROW: gl.constexpr = o1.type.layout
    of_values = stage
    values_phase = phase
    stage, phase = _after(stage, phase)
    mbarrier.wait(k_full.index(stage), phase)
    mbarrier.wait(v_full.index(of_values), values_phase)
    s_next = _scores(qa, qb, k0, k1, stage, SPLIT)
    a0 = gl.convert_layout(weights, gl.DotOperandLayout(0, WIDE, 2))
    a1 = gl.convert_layout(weights, gl.DotOperandLayout(0, NARROW, 2))
    next0 = hopper.warpgroup_mma(a0, v0.index(of_values).reshape([_TILE, _WIDE]), o0, is_async=True)
    if SPLIT:
        of_narrow = v1.index(of_values).reshape([_TILE, _NARROW])
        next1 = hopper.warpgroup_mma(a1, of_narrow, o1, is_async=True)
        s = hopper.warpgroup_mma_wait(2, deps=(s_next,))
    else:
        s = hopper.warpgroup_mma_wait(1, deps=(s_next,))
    if LAST:
        left: gl.constexpr = KEYS - (KEYS - 1) // _TILE * _TILE
        at = gl.expand_dims(gl.arange(0, _TILE, gl.SliceLayout(0, s.type.layout)), 0)
        s = gl.where(at < left, s, float("-inf"))
    top_next = gl.maximum(top, gl.max(s, 1))
    decay = _exp2((top - top_next) * factor)
    p = _exp2(s * factor - gl.expand_dims(top_next * factor, 1))
    by_lane = gl.convert_layout(decay, gl.SliceLayout(1, sums.type.layout))
    sums = _softmax_first(sums * gl.expand_dims(by_lane, 1) + _lane_sums(p))
    # Products in flight read a0 and a1. Naming them here keeps the compiler from overwriting their registers earlier.
    if SPLIT:
        o0, o1, a0, a1, p, sums, decay = hopper.warpgroup_mma_wait(
            0, deps=(next0, next1, a0, a1, p, sums, decay)
        )
    else:
        o0, a0, p, sums, decay = hopper.warpgroup_mma_wait(0, deps=(next0, a0, p, sums, decay))
    weights = p.to(v0.dtype)
    mbarrier.arrive(k_empty.index(stage), count=1)
    mbarrier.arrive(v_empty.index(of_values), count=1)
    o0 = o0 * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, WIDE)), 1)
    o1 = o1 * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, NARROW)), 1)
    return o0, o1, top_next, sums, weights, stage, phase


@gluon.jit
def _scores(qa, qb, k0, k1, stage, SPLIT):
    """Begins the products of the queries with the keys of a tile."""
    S: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _TILE, 16]
    )
    none = gl.zeros([_TILE, _TILE], gl.float32, S)
    of_keys = k0.index(stage).reshape([_TILE, _WIDE]).permute((1, 0))
    s = hopper.warpgroup_mma(qa, of_keys, none, use_acc=False, is_async=True)
    if SPLIT:
        of_keys = k1.index(stage).reshape([_TILE, _NARROW]).permute((1, 0))
        s = hopper.warpgroup_mma(qb, of_keys, s, is_async=True)
    return s


@gluon.jit
def _lane_sums(p):
    """Returns the sums [64, 4] of a row's weights that each of four threads has."""
    return gl.sum(gl.sum(p.reshape([_TILE, _TILE // 8, 4, 2]), 3), 1)


@gluon.jit
def _softmax_first(sums):
    """Returns ``sums``, and keeps the assembler from moving the next wait before their computation. To the assembler, a
    wait for products has no operands, but it does not move a wait before a store. The store never happens, because no
    sum is negative."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred negative; .reg .b32 at; mov.b32 at, 0; setp.lt.f32 negative, $1, 0f00000000; "
        "@negative st.volatile.shared.f32 [at], $1; mov.b32 $0, $1; }",
        "=f,f",
        [sums],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _store(
    o, inverse, to, of_row, first, column: gl.constexpr, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr
):  # fmt: skip
    LAYOUT: gl.constexpr = o.type.layout
    o = o * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, LAYOUT)), 1)
    row = gl.expand_dims(first + gl.arange(0, o.shape[0], gl.SliceLayout(1, LAYOUT)), 1)
    at = gl.expand_dims(column + gl.arange(0, o.shape[1], gl.SliceLayout(0, LAYOUT)), 0)
    within = (row < KEYS) & (at < HEAD_DIM)
    gl.store(to + row * of_row + at, o.to(to.dtype.element_ty), mask=within)
