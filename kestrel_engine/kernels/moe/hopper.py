"""Experts' GEMMs on Hopper: a persistent, warp-specialised kernel for up and for down (Gluon, sm_90 only).

Each of 132 persistent programs computes tiles in turn. In a program, one warp loads weights and rows with the tensor
memory accelerator into a ring of stages. Two groups of four warps each multiply half of the tile's weight rows with all
of its tokens. One group may run ahead of the other by the depth of the ring, so that one group uses the tensor cores
while the other stores.

Weights are the first operand, so accumulators are [weight rows, tokens]. So FP8 weights that are widened to float16
need not return to shared memory: they are the register operand of the product. A thread reads 16 adjacent inputs of its
row, while the instruction expects them in another order. Therefore the inputs of the other operand are stored in that
order (``in_kernel_order``), which does not change the sum. FP8 rows (W8A8) are read from shared memory in their natural
order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..gluon_support import hopper_programs
from ..linear.fp8_rows import Fp8Rows, quantise_rows
from .route import Grouping, group_by_expert, sorted_fp8_rows, sorted_rows
from .tile import Experts, product_scale

WEIGHT_ROWS = 64
"""The rows of one accumulator, which a group of four warps multiplies in one instruction."""
RING_BYTES = 192 << 10
MEAN_PAIRS = 24
"""The least mean pairs of an expert. For fewer pairs, the smaller tiles of `moe_prefill` are faster; at 32 pairs, they
take 178 us a layer and this kernel 147."""


def pairs_of_a_tile(mean: float, *, fp8: bool) -> int:
    """Returns the faster tile, 64 or 128 pairs, for experts of ``mean`` pairs.

    Microseconds a layer on an H200 with tiles of 64 and of 128: 140 and 176 at a
    mean of 32, 207 and 191 at 95, 317 and 334 at 188, 706 and 673 at 475. In FP8, both measured with a loop that took
    up to 6 % longer: 139 and 153, 184 and 169, 259 and 253, 559 and 484.
    """
    if mean <= 56:
        return 64
    # With tiles of 128, half of the second tile would be empty.
    return 64 if not fp8 and 128 < mean <= 192 else 128


def in_kernel_order(x: Tensor) -> Tensor:
    """Returns ``x`` [..., K] with every 64 inputs in the order in which the kernel multiplies them."""
    blocks: Tensor = x.unflatten(-1, (-1, 4, 4, 2, 2))  # type: ignore[no-untyped-call]
    return blocks.transpose(-4, -3).transpose(-3, -2).flatten(-5)


def takes(u: Tensor, experts: Experts, num_pairs: int) -> bool:
    """Returns whether `products` supports the device and the experts, and is faster than smaller tiles."""
    if (
        not experts.is_fp8
        or u.dtype != torch.bfloat16
        or num_pairs < MEAN_PAIRS * experts.num_experts
    ):
        return False
    fits = experts.dim % 256 == 0 and experts.inner % 128 == 0
    return fits and hopper_programs(u.device) > 0


def products(
    u: Tensor,
    chosen: Tensor,
    experts: Experts,
    outputs: Tensor,
    *,
    in_fp8: Fp8Rows | None = None,
    tile: int | None = None,
) -> None:
    """Writes the output of every pair's expert for its token's row of ``u`` [T, D] to ``outputs`` [T * k, D].

    ``chosen``: [T, k], each token's experts. ``in_fp8``: ``u`` in FP8, which is multiplied instead of ``u``; GeGLU's
    products are then rounded to FP8 as well. Hopper accumulates FP8 products with 14 bits. ``tile``: 64 or 128 pairs;
    None for the faster one.
    """
    num_pairs, k = chosen.numel(), chosen.shape[1]
    tile = tile or pairs_of_a_tile(num_pairs / experts.num_experts, fp8=in_fp8 is not None)
    grouping = group_by_expert(chosen, experts.num_experts, tile)
    product = torch.empty((num_pairs, experts.inner), dtype=torch.float16, device=u.device)
    fc1, fc2 = (experts.fc1, experts.fc1_scale), (experts.fc2, experts.fc2_scale)
    # The sorted rows share memory with the outputs, because they are no longer read when the outputs are written.
    if in_fp8 is None:
        rows = outputs.view(torch.float16)
        sorted_rows(u, rows, grouping.order, k, kernel_order=True)
        _launch(True, rows, None, grouping, *fc1, product)
        _launch(False, product, None, grouping, *fc2, outputs)
    else:
        fp8 = sorted_fp8_rows(in_fp8, outputs, grouping.order, k)
        _launch(True, *fp8, grouping, *fc1, product)
        _launch(False, *quantise_rows(product), grouping, *fc2, outputs)


def _launch(
    up: bool,
    rows: Tensor,
    row_scale: Tensor | None,
    grouping: Grouping,
    weight: Tensor,
    scale: Tensor | None,
    outputs: Tensor,
) -> None:
    """Launches one of the two products.

    ``rows``: [P, K] in the order of ``grouping``; float16 in the kernel's order, or e4m3 with ``row_scale`` [P, 1]
    float32. ``weight``: [E, N, K] e4m3. ``scale``: [E, N] float32. With up, ``outputs`` [P, N / 2] float16 are
    gelu(h) * (g + 1) * PRODUCT_SCALE, in the kernel's order unless ``rows`` are FP8. With down, ``outputs`` [P, N] are
    the products divided by PRODUCT_SCALE, in the order of pairs.
    """
    num_inputs, fp8 = weight.shape[2], row_scale is not None
    block_k = 128 if fp8 else 64
    of_weight = gl.NVMMASharedLayout(swizzle_byte_width=block_k, element_bitwidth=8, rank=2)
    of_rows = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=8 if fp8 else 16, rank=2
    )
    weights = weight.view(-1, num_inputs)
    programs = hopper_programs(rows.device)
    stage_bytes = block_k * (grouping.tile * rows.element_size() + 4 * WEIGHT_ROWS)
    _kernel[(programs,)](
        TensorDescriptor.from_tensor(rows, [grouping.tile, block_k], of_rows),
        TensorDescriptor.from_tensor(weights, [WEIGHT_ROWS, block_k], of_weight),
        grouping.order,
        grouping.tiles,
        grouping.used,
        scale,
        scale if row_scale is None else row_scale,
        outputs,
        grouping.num_tiles,
        NUM_INPUTS=num_inputs,
        NUM_ROWS=weight.shape[1],
        UP=up,
        FP8=fp8,
        STAGES=RING_BYTES // stage_bytes,
        PROGRAMS=programs,
        PRODUCT_SCALE=product_scale(torch.float16),
        num_warps=4,
    )


# The number of tiles is not specialised, so a multiple of 16 does not compile another kernel.
@gluon.jit(do_not_specialize=["num_tiles"])
def _kernel(
    rows, weight, order, tiles, used, scale, row_scale, outputs, num_tiles,
    NUM_INPUTS: gl.constexpr, NUM_ROWS: gl.constexpr, UP: gl.constexpr, FP8: gl.constexpr, STAGES: gl.constexpr,
    PROGRAMS: gl.constexpr, PRODUCT_SCALE: gl.constexpr,
):  # fmt: skip
    M: gl.constexpr = rows.block_type.shape[0]
    K: gl.constexpr = rows.block_type.shape[1]
    N: gl.constexpr = weight.block_type.shape[0]
    x = gl.allocate_shared_memory(rows.dtype, [STAGES, M, K], rows.layout)
    # [stage * 4 + group * 2 + accumulator]
    w = gl.allocate_shared_memory(weight.dtype, [STAGES * 4, N, K], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    hopper.fence_async_shared()
    # A tile of up has 128 columns of h and 128 of g. A tile of down has 256 columns.
    total = gl.load(used) * (NUM_ROWS // (4 * N))
    gl.warp_specialize(
        [
            (_multiply, (
                0, x, w, full, empty, order, tiles, scale, row_scale, outputs, num_tiles, total, NUM_INPUTS, NUM_ROWS,
                UP, FP8, STAGES, PROGRAMS, PRODUCT_SCALE,
            )),
            (_multiply, (
                1, x, w, full, empty, order, tiles, scale, row_scale, outputs, num_tiles, total, NUM_INPUTS, NUM_ROWS,
                UP, FP8, STAGES, PROGRAMS, PRODUCT_SCALE,
            )),
            (_fetch, (
                rows, weight, x, w, full, empty, tiles, num_tiles, total, NUM_INPUTS, NUM_ROWS, UP, STAGES, PROGRAMS,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _weight_row(
    work,
    group: gl.constexpr,
    part: gl.constexpr,
    NUM_ROWS: gl.constexpr,
    N: gl.constexpr,
    UP: gl.constexpr,
):
    """Returns the first row, within an expert, of a group's accumulator."""
    column = work % (NUM_ROWS // (4 * N))
    if UP:
        first = column * (2 * N) + group * N + part * (NUM_ROWS // 2)
    else:
        first = column * (4 * N) + group * (2 * N) + part * N
    return first


@gluon.jit
def _fetch(
    rows, weight, x, w, full, empty, tiles, num_tiles, total,
    NUM_INPUTS: gl.constexpr, NUM_ROWS: gl.constexpr, UP: gl.constexpr, STAGES: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    M: gl.constexpr = rows.block_type.shape[0]
    K: gl.constexpr = rows.block_type.shape[1]
    N: gl.constexpr = weight.block_type.shape[0]
    BYTES: gl.constexpr = (
        (M * rows.dtype.primitive_bitwidth + 4 * N * weight.dtype.primitive_bitwidth) * K // 8
    )
    stage = 0
    phase = 1
    for work in range(gl.program_id(0), total, PROGRAMS):
        tile = work // (NUM_ROWS // (4 * N))
        expert = gl.load(tiles + tile)
        begin = gl.load(tiles + num_tiles + tile)
        row = expert * NUM_ROWS
        row0 = row + _weight_row(work, 0, 0, NUM_ROWS, N, UP)
        row1 = row + _weight_row(work, 0, 1, NUM_ROWS, N, UP)
        row2 = row + _weight_row(work, 1, 0, NUM_ROWS, N, UP)
        row3 = row + _weight_row(work, 1, 1, NUM_ROWS, N, UP)
        for k in range(0, NUM_INPUTS, K):
            mbarrier.wait(empty.index(stage), phase)
            ready = full.index(stage)
            mbarrier.expect(ready, BYTES)
            tma.async_copy_global_to_shared(rows, [begin, k], ready, x.index(stage))
            tma.async_copy_global_to_shared(weight, [row0, k], ready, w.index(stage * 4))
            tma.async_copy_global_to_shared(weight, [row1, k], ready, w.index(stage * 4 + 1))
            tma.async_copy_global_to_shared(weight, [row2, k], ready, w.index(stage * 4 + 2))
            tma.async_copy_global_to_shared(weight, [row3, k], ready, w.index(stage * 4 + 3))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _read(w):
    """Reads [64, 64] FP8 weights: each thread reads four times 16 adjacent weights."""
    AS_READ: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 2], [0, 4], [0, 8]],
        [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
    return w.load(AS_READ)


@gluon.jit
def _operand(read, MMA: gl.constexpr):
    """Returns the weights from `_read` as a float16 operand, in the kernel's order of inputs."""
    wide = read.to(gl.float16).reshape([64, 4, 4, 2, 2]).permute((0, 2, 3, 1, 4))
    return gl.convert_layout(wide.reshape([64, 64]), gl.DotOperandLayout(0, MMA, 2))


@gluon.jit
def _wait(count: gl.constexpr, sums, operand):
    """Waits until at most ``count`` products are in flight, and returns the sums.

    A product in flight reads its operand's registers, which the compiler does not know. Naming the operand here keeps
    the compiler from overwriting these registers earlier.
    """
    sums, operand = hopper.warpgroup_mma_wait(count, deps=(sums, operand))
    return sums


@gluon.jit
def _multiply(
    group: gl.constexpr, x, w, full, empty, order, tiles, scale, row_scale, outputs, num_tiles, total,
    NUM_INPUTS: gl.constexpr, NUM_ROWS: gl.constexpr, UP: gl.constexpr, FP8: gl.constexpr, STAGES: gl.constexpr,
    PROGRAMS: gl.constexpr, PRODUCT_SCALE: gl.constexpr,
):  # fmt: skip
    M: gl.constexpr = x.shape[1]
    K: gl.constexpr = x.shape[2]
    N: gl.constexpr = w.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, M, 32 if FP8 else 16]
    )
    stage = 0
    phase = 0
    for work in range(gl.program_id(0), total, PROGRAMS):
        a = gl.zeros([N, M], gl.float32, MMA)
        b = gl.zeros([N, M], gl.float32, MMA)
        if FP8:
            for _ in range(0, NUM_INPUTS, K):
                mbarrier.wait(full.index(stage), phase)
                of_tokens = x.index(stage).permute((1, 0))
                wa = w.index(stage * 4 + group * 2)
                wb = w.index(stage * 4 + group * 2 + 1)
                a_next = hopper.warpgroup_mma(wa, of_tokens, a, is_async=True)
                b_next = hopper.warpgroup_mma(wb, of_tokens, b, is_async=True)
                a, b = hopper.warpgroup_mma_wait(0, deps=(a_next, b_next))
                mbarrier.arrive(empty.index(stage), count=1)
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
        elif M == 64:
            # Widen one half while the other is multiplied. With 128 pairs, this takes up to 2 % longer than the loop
            # below.
            mbarrier.wait(full.index(stage), phase)
            of_tokens = x.index(stage).permute((1, 0))
            wa = _operand(_read(w.index(stage * 4 + group * 2)), MMA)
            a_next = hopper.warpgroup_mma(wa, of_tokens, a, is_async=True)
            wb = _operand(_read(w.index(stage * 4 + group * 2 + 1)), MMA)
            b_next = hopper.warpgroup_mma(wb, of_tokens, b, is_async=True)
            for _ in range(K, NUM_INPUTS, K):
                done = stage
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
                mbarrier.wait(full.index(stage), phase)
                of_tokens = x.index(stage).permute((1, 0))
                ra = _read(w.index(stage * 4 + group * 2))
                rb = _read(w.index(stage * 4 + group * 2 + 1))
                a = _wait(1, a_next, wa)
                wa = _operand(ra, MMA)
                a_next = hopper.warpgroup_mma(wa, of_tokens, a, is_async=True)
                b = _wait(1, b_next, wb)
                mbarrier.arrive(empty.index(done), count=1)
                wb = _operand(rb, MMA)
                b_next = hopper.warpgroup_mma(wb, of_tokens, b, is_async=True)
            a, b, wa, wb = hopper.warpgroup_mma_wait(0, deps=(a_next, b_next, wa, wb))
            mbarrier.arrive(empty.index(stage), count=1)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        else:
            mbarrier.wait(full.index(stage), phase)
            wa = _operand(_read(w.index(stage * 4 + group * 2)), MMA)
            wb = _operand(_read(w.index(stage * 4 + group * 2 + 1)), MMA)
            for _ in range(K, NUM_INPUTS, K):
                of_tokens = x.index(stage).permute((1, 0))
                a_next = hopper.warpgroup_mma(wa, of_tokens, a, is_async=True)
                b_next = hopper.warpgroup_mma(wb, of_tokens, b, is_async=True)
                done = stage
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
                # Widen the next weights while these are multiplied.
                mbarrier.wait(full.index(stage), phase)
                wa_next = _operand(_read(w.index(stage * 4 + group * 2)), MMA)
                wb_next = _operand(_read(w.index(stage * 4 + group * 2 + 1)), MMA)
                a, b, wa, wb = hopper.warpgroup_mma_wait(0, deps=(a_next, b_next, wa, wb))
                mbarrier.arrive(empty.index(done), count=1)
                wa = wa_next
                wb = wb_next
            of_tokens = x.index(stage).permute((1, 0))
            a_next = hopper.warpgroup_mma(wa, of_tokens, a, is_async=True)
            b_next = hopper.warpgroup_mma(wb, of_tokens, b, is_async=True)
            a, b, wa, wb = hopper.warpgroup_mma_wait(0, deps=(a_next, b_next, wa, wb))
            mbarrier.arrive(empty.index(stage), count=1)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        _store(
            a,
            b,
            group,
            work,
            order,
            tiles,
            scale,
            row_scale,
            outputs,
            num_tiles,
            NUM_ROWS,
            UP,
            FP8,
            PRODUCT_SCALE,
        )


@gluon.jit
def _store(
    a, b, group: gl.constexpr, work, order, tiles, scale, row_scale, outputs, num_tiles,
    NUM_ROWS: gl.constexpr, UP: gl.constexpr, FP8: gl.constexpr, PRODUCT_SCALE: gl.constexpr,
):  # fmt: skip
    N: gl.constexpr = a.shape[0]
    M: gl.constexpr = a.shape[1]
    MMA: gl.constexpr = a.type.layout
    tile = work // (NUM_ROWS // (4 * N))
    expert = gl.load(tiles + tile)
    begin = gl.load(tiles + num_tiles + tile)
    end = gl.load(tiles + 2 * num_tiles + tile)
    of_rows = scale + expert * NUM_ROWS + gl.arange(0, N, gl.SliceLayout(1, MMA))
    a0 = _weight_row(work, group, 0, NUM_ROWS, N, UP)
    b0 = _weight_row(work, group, 1, NUM_ROWS, N, UP)
    a = a * gl.expand_dims(gl.load(of_rows + a0), 1)
    b = b * gl.expand_dims(gl.load(of_rows + b0), 1)
    if FP8:
        here = begin + gl.arange(0, M, gl.SliceLayout(0, MMA))
        factor = gl.expand_dims(gl.load(row_scale + gl.minimum(here, end - 1)), 0)
        a = a * factor
        b = b * factor
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    place = begin + gl.arange(0, M, gl.SliceLayout(1, STORE))
    valid = gl.expand_dims(place < end, 1)
    at = gl.expand_dims(gl.arange(0, N, gl.SliceLayout(0, STORE)), 0)
    if UP:
        product = _geglu(a, b, PRODUCT_SCALE).to(outputs.dtype.element_ty).permute((1, 0))
        if not FP8:
            # Store the inputs of the next product, in the order in which it reads them.
            product = product.reshape([M, 4, 4, 2, 2]).permute((0, 2, 3, 1, 4)).reshape([M, N])
        to = outputs + gl.expand_dims(place.to(gl.int64) * (NUM_ROWS // 2), 1) + a0 + at
        gl.store(to, gl.convert_layout(product, STORE), mask=valid)
    else:
        if PRODUCT_SCALE != 1.0:
            a = a * (1.0 / PRODUCT_SCALE)
            b = b * (1.0 / PRODUCT_SCALE)
        pair = gl.load(order + gl.minimum(place, end - 1))
        to = outputs + gl.expand_dims(pair.to(gl.int64) * NUM_ROWS, 1) + at
        first = a.to(outputs.dtype.element_ty).permute((1, 0))
        gl.store(to + a0, gl.convert_layout(first, STORE), mask=valid)
        second = b.to(outputs.dtype.element_ty).permute((1, 0))
        gl.store(to + b0, gl.convert_layout(second, STORE), mask=valid)


@gluon.jit
def _geglu(h, g, SCALE: gl.constexpr):
    """Returns gelu(h) * (g + 1) * SCALE, clamped to float16.

    erf is computed by Abramowitz and Stegun 7.1.26, with an error of 2e-7. This takes half the instructions of an exact
    erf, and warps that run this epilogue do not multiply meanwhile.
    """
    t = _fast("rcp.approx.ftz.f32 $0, $1;", gl.fma(gl.abs(h), 0.3275911 * 0.7071067811865476, 1.0))
    p = (
        (((0.5307027145 * t - 0.7265760135) * t) + 0.7107068705) * t - 0.142248368
    ) * t + 0.127414796
    beyond = p * t * _fast("ex2.approx.ftz.f32 $0, $1;", h * h * (-0.5 * 1.4426950408889634))
    product = (gl.maximum(h, 0.0) - gl.abs(h) * beyond) * (g * SCALE + SCALE)
    return gl.minimum(gl.maximum(product, -65504.0), 65504.0)


@gluon.jit
def _fast(instruction: gl.constexpr, x):
    return gl.inline_asm_elementwise(
        instruction, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )
