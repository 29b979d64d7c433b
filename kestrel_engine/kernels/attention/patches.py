"""Attention among the patches of each crop on Hopper: a persistent, warp-specialised kernel (Gluon, sm_90 only).

A program computes 192 queries of one head of one crop at a time. One warp loads queries, keys and values with the
tensor memory accelerator. Three groups of four warps each multiply 64 queries. While the tensor cores multiply the
values of a block, a group computes the softmax of the next block (FlashAttention-3, arXiv 2407.08608, section 3.2).

Heads have 72 dimensions in released models, while a tile's sides are powers of two. So each operand is a tile of 64 and
one of 16 columns. The accelerator fills what lies beyond a head or a crop with zeros.
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

BLOCK = 64
"""Queries of a group, and keys of a block."""
GROUPS = 3
STAGES = 4
"""Blocks of keys and values that the ring holds."""
LEAST_PATCHES = 2 * BLOCK + 1
"""The fewest patches of a crop. The first block and the last one are computed outside the loop."""
WIDTHS = (64, 16)
"""The columns of the two tiles of an operand."""


def takes(patches: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether `attend` supports the device and the shapes, and is faster than torch's attention.

    Microseconds of 2, 9 and 28 crops of 729 patches with 16 heads of 72 on one H100: 20, 75 and 206; cuDNN takes 28, 89
    and 250.
    """
    return (
        hopper_programs(device) > 0
        and dtype in (torch.bfloat16, torch.float16)
        and WIDTHS[0] < head_dim <= sum(WIDTHS)
        and head_dim % 8 == 0
        and patches >= LEAST_PATCHES
    )


def attend(qkv: Tensor, out: Tensor) -> Tensor:
    """Writes softmax(q k^T / sqrt(head_dim)) v of each crop and head to ``out``, and returns it.

    ``qkv``: [n, patches, 3, heads, head_dim], contiguous. ``out``: [n, patches, heads, head_dim], contiguous. Both have
    the same dtype. See `takes` for the supported shapes.
    """
    n, patches, _, heads, head_dim = qkv.shape
    assert qkv.is_contiguous() and out.is_contiguous() and out.dtype == qkv.dtype
    # [n, 3 * heads, patches, head_dim], so the accelerator knows where a head and a crop end.
    operands = qkv.flatten(2, 3).transpose(1, 2)
    total = n * heads * -(-patches // (BLOCK * GROUPS))
    _kernel[(min(hopper_programs(qkv.device), total),)](
        *(_tile(operands, width) for width in WIDTHS),
        out,
        total,
        math.log2(math.e) / math.sqrt(head_dim),
        HEADS=heads,
        HEAD_DIM=head_dim,
        KEYS=patches,
        num_warps=4,
    )
    return out


def _tile(operands: Tensor, width: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=2 * width, element_bitwidth=16, rank=4)
    return TensorDescriptor(
        operands, list(operands.shape), list(operands.stride()), [1, 1, BLOCK, width], layout
    )


_GROUPS = gl.constexpr(GROUPS)
_STAGES = gl.constexpr(STAGES)
_BLOCK = gl.constexpr(BLOCK)
_WIDE = gl.constexpr(WIDTHS[0])
_NARROW = gl.constexpr(WIDTHS[1])


# The number of tiles is not specialised, so a multiple of 16 does not compile another kernel.
@gluon.jit(do_not_specialize=["total"])
def _kernel(
    wide, narrow, out, total, factor, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr
):  # fmt: skip
    dtype: gl.constexpr = wide.dtype
    q0 = gl.allocate_shared_memory(dtype, [_GROUPS, 1, 1, _BLOCK, _WIDE], wide.layout)
    q1 = gl.allocate_shared_memory(dtype, [_GROUPS, 1, 1, _BLOCK, _NARROW], narrow.layout)
    k0 = gl.allocate_shared_memory(dtype, [_STAGES, 1, 1, _BLOCK, _WIDE], wide.layout)
    k1 = gl.allocate_shared_memory(dtype, [_STAGES, 1, 1, _BLOCK, _NARROW], narrow.layout)
    v0 = gl.allocate_shared_memory(dtype, [_STAGES, 1, 1, _BLOCK, _WIDE], wide.layout)
    v1 = gl.allocate_shared_memory(dtype, [_STAGES, 1, 1, _BLOCK, _NARROW], narrow.layout)
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
                0, q0, q1, k0, k1, v0, v1, q_full, q_empty, k_full, k_empty, v_full, v_empty, out, total, factor,
                HEADS, HEAD_DIM, KEYS,
            )),
            (_attend, (
                1, q0, q1, k0, k1, v0, v1, q_full, q_empty, k_full, k_empty, v_full, v_empty, out, total, factor,
                HEADS, HEAD_DIM, KEYS,
            )),
            (_attend, (
                2, q0, q1, k0, k1, v0, v1, q_full, q_empty, k_full, k_empty, v_full, v_empty, out, total, factor,
                HEADS, HEAD_DIM, KEYS,
            )),
            (_fetch, (
                wide, narrow, q0, q1, k0, k1, v0, v1, q_full, q_empty, k_full, k_empty, v_full, v_empty, total,
                HEADS, KEYS,
            )),
        ],
        [4, 4, 1],
        [160, 160, 24],
    )  # fmt: skip


@gluon.jit
def _place(tile, HEADS: gl.constexpr, KEYS: gl.constexpr):
    """Returns a tile's crop, head and first query."""
    ROWS: gl.constexpr = _BLOCK * _GROUPS
    TILES: gl.constexpr = (KEYS + ROWS - 1) // ROWS
    pair = tile // TILES
    return pair // HEADS, pair % HEADS, (tile % TILES) * ROWS


@gluon.jit
def _fetch(
    wide, narrow, q0, q1, k0, k1, v0, v1, q_full, q_empty, k_full, k_empty, v_full, v_empty, total,
    HEADS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    BYTES: gl.constexpr = _BLOCK * (_WIDE + _NARROW) * 2
    stage = 0
    phase = 1
    q_phase = 1
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        crop, head, first = _place(tile, HEADS, KEYS)
        for group in gl.static_range(_GROUPS):
            mbarrier.wait(q_empty.index(group), q_phase)
            ready = q_full.index(group)
            row = first + group * _BLOCK
            mbarrier.expect(ready, BYTES)
            tma.async_copy_global_to_shared(wide, [crop, head, row, 0], ready, q0.index(group))
            tma.async_copy_global_to_shared(
                narrow, [crop, head, row, _WIDE], ready, q1.index(group)
            )
        q_phase ^= 1
        for row in range(0, KEYS, _BLOCK):
            of_keys = HEADS + head
            mbarrier.wait(k_empty.index(stage), phase)
            ready = k_full.index(stage)
            mbarrier.expect(ready, BYTES)
            tma.async_copy_global_to_shared(wide, [crop, of_keys, row, 0], ready, k0.index(stage))
            tma.async_copy_global_to_shared(
                narrow, [crop, of_keys, row, _WIDE], ready, k1.index(stage)
            )
            of_values = 2 * HEADS + head
            mbarrier.wait(v_empty.index(stage), phase)
            ready = v_full.index(stage)
            mbarrier.expect(ready, BYTES)
            tma.async_copy_global_to_shared(wide, [crop, of_values, row, 0], ready, v0.index(stage))
            tma.async_copy_global_to_shared(
                narrow, [crop, of_values, row, _WIDE], ready, v1.index(stage)
            )
            stage += 1
            if stage == _STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _attend(
    group: gl.constexpr, q0, q1, k0, k1, v0, v1, q_full, q_empty, k_full, k_empty, v_full, v_empty, out, total, factor,
    HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _BLOCK, 16]
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
        crop, head, first = _place(tile, HEADS, KEYS)
        o0 = gl.zeros([_BLOCK, _WIDE], gl.float32, WIDE)
        o1 = gl.zeros([_BLOCK, _NARROW], gl.float32, NARROW)
        mbarrier.wait(q_full.index(group), q_phase)
        q_phase ^= 1
        # Queries stay in registers. Read from shared memory, they and the keys would take all of its bandwidth.
        qa = q0.index(group).reshape([_BLOCK, _WIDE]).load(gl.DotOperandLayout(0, S, 2))
        qb = q1.index(group).reshape([_BLOCK, _NARROW]).load(gl.DotOperandLayout(0, S, 2))
        mbarrier.arrive(q_empty.index(group), count=1)
        mbarrier.wait(k_full.index(stage), phase)
        s = hopper.warpgroup_mma_wait(0, deps=(_scores(qa, qb, k0, k1, stage),))
        mbarrier.arrive(k_empty.index(stage), count=1)
        top = gl.max(s, 1)
        p = _exp2(s * factor - gl.expand_dims(top * factor, 1))
        sums = _lane_sums(p)
        weights = p.to(v0.dtype)
        for _ in range(2 * _BLOCK, KEYS, _BLOCK):
            o0, o1, top, sums, weights, stage, phase = _block(
                qa, qb, k0, k1, v0, v1, k_full, k_empty, v_full, v_empty, o0, o1, top, sums, weights, stage, phase,
                factor, KEYS, False,
            )  # fmt: skip
        o0, o1, top, sums, weights, stage, phase = _block(
            qa, qb, k0, k1, v0, v1, k_full, k_empty, v_full, v_empty, o0, o1, top, sums, weights, stage, phase,
            factor, KEYS, True,
        )  # fmt: skip
        mbarrier.wait(v_full.index(stage), phase)
        a0 = gl.convert_layout(weights, gl.DotOperandLayout(0, WIDE, 2))
        a1 = gl.convert_layout(weights, gl.DotOperandLayout(0, NARROW, 2))
        next0 = hopper.warpgroup_mma(
            a0, v0.index(stage).reshape([_BLOCK, _WIDE]), o0, is_async=True
        )
        next1 = hopper.warpgroup_mma(
            a1, v1.index(stage).reshape([_BLOCK, _NARROW]), o1, is_async=True
        )
        o0, o1, a0, a1 = hopper.warpgroup_mma_wait(0, deps=(next0, next1, a0, a1))
        mbarrier.arrive(v_empty.index(stage), count=1)
        stage, phase = _after(stage, phase)
        inverse = 1.0 / gl.sum(sums, 1)
        row = first + group * _BLOCK
        _store(o0, inverse, out, crop, head, row, 0, HEADS, HEAD_DIM, KEYS)
        _store(o1, inverse, out, crop, head, row, _WIDE, HEADS, HEAD_DIM, KEYS)


@gluon.jit
def _after(stage, phase):
    wraps = stage == _STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _block(
    qa, qb, k0, k1, v0, v1, k_full, k_empty, v_full, v_empty, o0, o1, top, sums, weights, stage, phase, factor,
    KEYS: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """Adds the values of the block at ``stage``, with its ``weights``, and computes those of the next one."""
    WIDE: gl.constexpr = o0.type.layout
    NARROW: gl.constexpr = o1.type.layout
    of_values = stage
    values_phase = phase
    stage, phase = _after(stage, phase)
    mbarrier.wait(k_full.index(stage), phase)
    mbarrier.wait(v_full.index(of_values), values_phase)
    s_next = _scores(qa, qb, k0, k1, stage)
    a0 = gl.convert_layout(weights, gl.DotOperandLayout(0, WIDE, 2))
    a1 = gl.convert_layout(weights, gl.DotOperandLayout(0, NARROW, 2))
    next0 = hopper.warpgroup_mma(
        a0, v0.index(of_values).reshape([_BLOCK, _WIDE]), o0, is_async=True
    )
    next1 = hopper.warpgroup_mma(
        a1, v1.index(of_values).reshape([_BLOCK, _NARROW]), o1, is_async=True
    )
    s = hopper.warpgroup_mma_wait(2, deps=(s_next,))
    if LAST:
        left: gl.constexpr = KEYS - (KEYS - 1) // _BLOCK * _BLOCK
        at = gl.expand_dims(gl.arange(0, _BLOCK, gl.SliceLayout(0, s.type.layout)), 0)
        s = gl.where(at < left, s, float("-inf"))
    top_next = gl.maximum(top, gl.max(s, 1))
    decay = _exp2((top - top_next) * factor)
    p = _exp2(s * factor - gl.expand_dims(top_next * factor, 1))
    by_lane = gl.convert_layout(decay, gl.SliceLayout(1, sums.type.layout))
    sums = _softmax_first(sums * gl.expand_dims(by_lane, 1) + _lane_sums(p))
    # Products in flight read a0 and a1. Naming them here keeps the compiler from overwriting their registers earlier.
    o0, o1, a0, a1, p, sums, decay = hopper.warpgroup_mma_wait(
        0, deps=(next0, next1, a0, a1, p, sums, decay)
    )
    weights = p.to(v0.dtype)
    mbarrier.arrive(k_empty.index(stage), count=1)
    mbarrier.arrive(v_empty.index(of_values), count=1)
    o0 = o0 * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, WIDE)), 1)
    o1 = o1 * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, NARROW)), 1)
    return o0, o1, top_next, sums, weights, stage, phase


@gluon.jit
def _scores(qa, qb, k0, k1, stage):
    """Begins the products of the queries with the keys of a block."""
    S: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _BLOCK, 16]
    )
    none = gl.zeros([_BLOCK, _BLOCK], gl.float32, S)
    of_keys = k0.index(stage).reshape([_BLOCK, _WIDE]).permute((1, 0))
    s = hopper.warpgroup_mma(qa, of_keys, none, use_acc=False, is_async=True)
    of_keys = k1.index(stage).reshape([_BLOCK, _NARROW]).permute((1, 0))
    return hopper.warpgroup_mma(qb, of_keys, s, is_async=True)


@gluon.jit
def _lane_sums(p):
    """Returns the sums [64, 4] of a row's weights that each of four threads has."""
    return gl.sum(gl.sum(p.reshape([_BLOCK, _BLOCK // 8, 4, 2]), 3), 1)


@gluon.jit
def _softmax_first(sums):
    """Returns ``sums``, and keeps the assembler from moving the next wait before their computation.

    To the assembler, a wait for products has no operands. It would move the wait up, and the softmax would begin after
    the products. It does not move a wait before a store. The store never happens, because no sum is negative.
    """
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
    o, inverse, out, crop, head, first, column: gl.constexpr,
    HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = o.type.layout
    o = o * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, LAYOUT)), 1)
    row = gl.expand_dims(first + gl.arange(0, o.shape[0], gl.SliceLayout(1, LAYOUT)), 1)
    at = gl.expand_dims(column + gl.arange(0, o.shape[1], gl.SliceLayout(0, LAYOUT)), 0)
    to = out + (crop.to(gl.int64) * KEYS * (HEADS * HEAD_DIM) + head * HEAD_DIM)
    within = (row < KEYS) & (at < HEAD_DIM)
    gl.store(to + row * (HEADS * HEAD_DIM) + at, o.to(out.dtype.element_ty), mask=within)
