"""Experts for many tokens: a grouped GEMM over the pairs, sorted by expert, then the sum over each token's pairs.

FP8 experts of bfloat16 models have a separate kernel on Hopper (hopper.py). On other GPUs, and for few tokens, three
kernels run after the grouping (route.py): up with GeGLU, which gathers its rows of ``u``; down, which scatters its rows
back to their pairs; and the sum over a token's pairs in the order of choice, so results are deterministic. Tiles of the
same rows, and the row tiles of an expert, are adjacent, so programs that run at the same time share weights.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..adapters.experts import ExpertChange, ExpertChanges, add_expert_change
from ..gluon_support import hopper_programs
from ..linear.fp8_rows import Fp8Rows
from ..linear.int4 import group_of, product_groups
from .route import Grouping, group_by_expert
from .tile import Experts, Tile, TilePair, dot_tile, geglu, product_scale, triton_type

# The pairs of a tile and the tiles of both products, by bytes of a weight and the largest mean pairs
# of an expert (0: no limit). Measured on an H200 at 64, 256, 730 and 11,680 tokens: 138, 176, 305 and
# 2,410 us for FP8 (489 TFLOP/s), 222, 253, 287 and 2,237 us for bfloat16.
TILES: dict[tuple[int, int], tuple[int, TilePair]] = {
    (1, 24): (16, TilePair(Tile(64, 128, 4, 4, True, True), Tile(128, 128, 4, 4, True, True))),
    (1, 48): (32, TilePair(Tile(64, 128, 4, 3, True, True), Tile(128, 128, 4, 3, True, True))),
    (1, 144): (32, TilePair(Tile(64, 128, 4, 3, True, True), Tile(128, 128, 4, 3, True, True))),
    (1, 0): (128, TilePair(Tile(128, 64, 8, 4, True, True), Tile(256, 64, 8, 4, True, True))),
    (2, 24): (16, TilePair(Tile(64, 64, 4, 4, True, True), Tile(128, 64, 4, 4, True, True))),
    (2, 48): (64, TilePair(Tile(128, 64, 4, 3, False, True), Tile(256, 64, 4, 3, False, True))),
    (2, 144): (128, TilePair(Tile(128, 64, 8, 3, False, True), Tile(256, 64, 8, 3, False, True))),
    (2, 0): (128, TilePair(Tile(128, 64, 8, 4, False, True), Tile(256, 64, 8, 4, False, True))),
    (4, 24): (32, TilePair(Tile(32, 32, 4, 2), Tile(64, 32, 4, 2))),
    (4, 48): (64, TilePair(Tile(32, 32, 4, 2), Tile(64, 32, 4, 2))),
    (4, 144): (64, TilePair(Tile(32, 32, 4, 2), Tile(64, 32, 4, 2))),
    (4, 0): (64, TilePair(Tile(64, 32, 8, 2), Tile(64, 32, 8, 2))),
}


def tiles_for(element_size: int, num_pairs: int, num_experts: int) -> tuple[int, TilePair]:
    mean = num_pairs / num_experts
    limit = next((limit for limit in (24, 48, 144) if mean <= limit), 0)
    return TILES[element_size, limit]


def tiles_of_groups(group: int, num_pairs: int, num_experts: int) -> tuple[int, TilePair]:
    """Returns the tiles of weights in 4 bits, measured at a mean of 16, 32, 93 and 375 pairs of an expert. A step reads
    bytes of two groups of each row."""
    half, mean = min(group, 64), num_pairs / num_experts
    if mean <= 24:
        return 16, TilePair(Tile(64, half, 4, 3, True), Tile(64, half, 4, 3, True))
    if mean <= 56:
        return 32, TilePair(Tile(64, half, 4, 3, True), Tile(128, half, 4, 3, True))
    down = Tile(128, half, 4, 2, True) if mean <= 144 else Tile(128, half, 8, 3, True)
    return 128, TilePair(Tile(64, half, 4, 2, True), down)


def hopper_kernels(device: torch.device) -> ModuleType | None:
    """Returns the module hopper.py if it can be imported and run on ``device``, else None."""
    if not hopper_programs(device):
        return None
    from . import hopper as moe_hopper

    return moe_hopper


def moe_prefill(
    u: Tensor,
    weights: Tensor,
    experts: Tensor,
    fc1: Tensor,
    fc2: Tensor,
    fc1_scale: Tensor | None = None,
    fc2_scale: Tensor | None = None,
    *,
    add_to: Tensor | None = None,
    out: Tensor | None = None,
    tiles: tuple[int, TilePair] | None = None,
    in_fp8: Fp8Rows | None = None,
    adapters: ExpertChanges | None = None,
) -> Tensor:
    """Applies each token's experts (see `route.route`) to ``u`` [T, D] and returns their weighted sum [T, D].

    ``add_to``: [T, D], added to the sum, or None. ``out`` may be ``add_to``. The experts' outputs are rounded to the
    model's dtype, then weighted and summed in float32. ``in_fp8``: ``u`` in FP8. If hopper.py is used, FP8 experts
    multiply it instead of ``u``, with FP8 products of GeGLU. ``tiles``: use these tiles, and the kernels of this
    module, on any GPU. ``adapters``: changes of the experts, which only the kernels of this module compute; None if no
    token has an adapter.
    """
    layer = Experts(fc1, fc2, fc1_scale, fc2_scale)
    num_tokens, k = experts.shape
    dim, num_pairs = layer.dim, num_tokens * k
    if out is None:
        out = torch.empty_like(u)
    if not num_tokens:
        return out
    outputs = torch.empty((num_pairs, dim), dtype=u.dtype, device=u.device)
    hopper = hopper_kernels(u.device) if tiles is None and adapters is None else None
    if hopper is not None and hopper.takes(u, layer, num_pairs):
        hopper.products(u, experts, layer, outputs, in_fp8=in_fp8)
    else:
        if tiles is None and layer.is_int4:
            tiles = tiles_of_groups(layer.group, num_pairs, layer.num_experts)
        rows, pair = tiles or tiles_for(fc1.element_size(), num_pairs, layer.num_experts)
        grouping = group_by_expert(experts, layer.num_experts, rows)
        product_type = layer.product_type(u.dtype)
        product = torch.empty((num_pairs, layer.inner), dtype=product_type, device=u.device)
        change = None if adapters is None else adapters.of_fc1(u, experts)
        x = u.to(product_type)
        _launch(True, pair.up, grouping, x, fc1, fc1_scale, product, k, change)
        if adapters is not None:
            change = adapters.of_fc2(product, experts, order=grouping.order)
        _launch(False, pair.down, grouping, product, fc2, fc2_scale, outputs, k, change)
    block = min(triton.next_power_of_2(dim), 2048)
    _sum_kernel[(num_tokens, triton.cdiv(dim, block))](
        outputs,
        weights,
        add_to,
        out,
        0 if add_to is None else add_to.stride(0),
        out.stride(0),
        DIM=dim,
        K_CHOICES=k,
        BLOCK=block,
        num_warps=4,
    )
    return out


def _launch(
    up: bool,
    tile: Tile,
    grouping: Grouping,
    inputs: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    outputs: Tensor,
    k: int,
    change: ExpertChange | None,
) -> None:
    group = group_of(weight, scale) if scale is not None and scale.dim() == 4 else 0
    num_inputs = weight.shape[2] * (2 if group else 1)
    num_columns = weight.shape[1] // 2 if up else weight.shape[1]
    product_type = outputs.dtype if up else inputs.dtype
    rows: Any = weight
    # What the tensor memory accelerator can address.
    tma = tile.tma and not group and num_inputs * weight.element_size() % 16 == 0
    if tma:
        rows = TensorDescriptor.from_tensor(
            weight.view(-1, num_inputs), [tile.block_n, tile.block_k]
        )
    _prefill_experts[(grouping.num_tiles * triton.cdiv(num_columns, tile.block_n),)](
        inputs,
        grouping.order,
        grouping.tiles,
        rows,
        scale,
        outputs,
        change,
        grouping.num_tiles,
        inputs.stride(0),
        UP=up,
        NUM_INPUTS=num_inputs,
        NUM_COLUMNS=num_columns,
        K_CHOICES=k,
        BLOCK_M=grouping.tile,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        SWAP=tile.swap,
        TMA=tma,
        DOT=triton_type(product_type),
        PRODUCT_SCALE=product_scale(product_type),
        GROUP=group,
        PTX=inputs.is_cuda,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@triton.jit
def _weights(
    w, row, k, num_rows, NUM_INPUTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Loads weights [BLOCK_N, BLOCK_K] from ``row`` on. Beyond the expert's rows, they belong to another expert or are
    zero."""
    if TMA:
        tile = w.load([row, k])
    else:
        at_n = tl.arange(0, BLOCK_N)
        at_k = k + tl.arange(0, BLOCK_K)
        pointers = w + row.to(tl.int64) * NUM_INPUTS + at_n[:, None] * NUM_INPUTS + at_k[None, :]
        tile = tl.load(
            pointers, mask=(at_n < num_rows)[:, None] & (at_k < NUM_INPUTS)[None, :], other=0.0
        )
    return tile


@triton.jit
def _group_weights(
    w, scales, row, k, num_rows, NUM_INPUTS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, DOT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Loads BLOCK_K bytes of weights in 4 bits of BLOCK_N rows, from ``row`` and from byte ``k`` on, as two tiles in
    DOT."""
    packed = _weights(w, row, k, num_rows, NUM_INPUTS // 2, BLOCK_N, BLOCK_K, False)
    at_n = tl.arange(0, BLOCK_N)
    own = scales + (row + at_n).to(tl.int64) * (NUM_INPUTS // GROUP * 2)
    return product_groups(packed, own, k // GROUP, at_n < num_rows, DOT, PTX)


# The number of tiles is not specialised, so a multiple of 16 does not compile another kernel.
@triton.jit(do_not_specialize=["num_tiles"])
def _prefill_experts(
    x_ptr, order_ptr, tiles_ptr, w_ptr, scale_ptr, out_ptr, change, num_tiles, stride,
    UP: tl.constexpr, NUM_INPUTS: tl.constexpr, NUM_COLUMNS: tl.constexpr, K_CHOICES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr,
    TMA: tl.constexpr, DOT: tl.constexpr, PRODUCT_SCALE: tl.constexpr, GROUP: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Computes, for the places of one tile and BLOCK_N columns, product[place] = gelu(h) * (g + 1) with UP, and
    outputs[pair] = product[place] @ fc2.T without."""
    MATRIX: tl.constexpr = 2 * NUM_COLUMNS if UP else NUM_COLUMNS
    tile = tl.program_id(0) // tl.cdiv(NUM_COLUMNS, BLOCK_N)
    first = (tl.program_id(0) % tl.cdiv(NUM_COLUMNS, BLOCK_N)) * BLOCK_N
    expert = tl.load(tiles_ptr + tile)
    if expert >= 0:
        begin = tl.load(tiles_ptr + num_tiles + tile)
        end = tl.load(tiles_ptr + 2 * num_tiles + tile)
        place = begin + tl.arange(0, BLOCK_M)
        valid = place < end
        # Beyond the end, read some other row, which costs less than a mask.
        if UP:
            x_row = tl.load(order_ptr + place, mask=valid, other=0) // K_CHOICES
        else:
            x_row = tl.minimum(place, end - 1)
        rows = x_ptr + x_row.to(tl.int64) * stride
        row = expert * MATRIX + first
        if SWAP:
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        at_k = tl.arange(0, BLOCK_K)
        n = NUM_COLUMNS - first
        if GROUP:
            for k in range(0, NUM_INPUTS // 2, BLOCK_K):
                at_x = tl.multiple_of(k // GROUP * (2 * GROUP) + k % GROUP, 16)
                of_first = rows[:, None] + (at_x + at_k)[None, :]
                x = tl.load(of_first)
                x_second = tl.load(of_first + GROUP)
                w, w_second = _group_weights(
                    w_ptr, scale_ptr, row, k, n, NUM_INPUTS, BLOCK_N, BLOCK_K, GROUP, DOT, PTX
                )
                acc = dot_tile(x, w, acc, SWAP, DOT)
                acc = dot_tile(x_second, w_second, acc, SWAP, DOT)
                if UP:
                    w, w_second = _group_weights(
                        w_ptr, scale_ptr, row + NUM_COLUMNS, k, n, NUM_INPUTS, BLOCK_N, BLOCK_K, GROUP,
                        DOT, PTX,
                    )  # fmt: skip
                    gate = dot_tile(x, w, gate, SWAP, DOT)
                    gate = dot_tile(x_second, w_second, gate, SWAP, DOT)
        else:
            for k in range(0, NUM_INPUTS, BLOCK_K):
                if NUM_INPUTS % BLOCK_K == 0:
                    x = tl.load(rows[:, None] + (k + at_k)[None, :])
                else:
                    x = tl.load(
                        rows[:, None] + (k + at_k)[None, :],
                        mask=(k + at_k < NUM_INPUTS)[None, :],
                        other=0.0,
                    )
                w = _weights(w_ptr, row, k, n, NUM_INPUTS, BLOCK_N, BLOCK_K, TMA)
                if UP:
                    wg = _weights(w_ptr, row + NUM_COLUMNS, k, n, NUM_INPUTS, BLOCK_N, BLOCK_K, TMA)
                acc = dot_tile(x, w, acc, SWAP, DOT)
                if UP:
                    gate = dot_tile(x, wg, gate, SWAP, DOT)
        if SWAP:
            acc = tl.trans(acc)
            gate = tl.trans(gate)
        column = first + tl.arange(0, BLOCK_N)
        inside = column < NUM_COLUMNS
        if scale_ptr is not None and not GROUP:
            scales = scale_ptr + expert.to(tl.int64) * MATRIX + column
            acc = acc * tl.load(scales, mask=inside, other=0.0)[None, :]
            if UP:
                gate = gate * tl.load(scales + NUM_COLUMNS, mask=inside, other=0.0)[None, :]
        pair = tl.load(order_ptr + place, mask=valid, other=0)
        if change is not None:
            # The products with A have the scale of the product, as the other summands do.
            token = pair // K_CHOICES
            shrunk = pair if UP else place
            acc = add_expert_change(
                acc, change, expert, token, valid, shrunk, column, inside, MATRIX
            )
            if UP:
                # The rows of g are those behind h.
                gate = add_expert_change(
                    gate, change, expert, token, valid, shrunk, column + NUM_COLUMNS, inside, MATRIX
                )
        if UP:
            result = geglu(acc, gate, PRODUCT_SCALE)
            to = place
        else:
            result = acc if PRODUCT_SCALE == 1.0 else acc * (1.0 / PRODUCT_SCALE)
            to = pair
        at = to.to(tl.int64)[:, None] * NUM_COLUMNS + column[None, :]
        result = result.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at, result, mask=valid[:, None] & inside[None, :])


@triton.jit
def _sum_kernel(
    outputs_ptr, weights_ptr, add_ptr, out_ptr, add_stride, out_stride,
    DIM: tl.constexpr, K_CHOICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes out[token], the weighted sum of the token's pairs in order, plus add_to[token] if given."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < DIM
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(K_CHOICES):
        pair = token * K_CHOICES + i
        output = tl.load(outputs_ptr + pair * DIM + column, mask=inside, other=0.0)
        total += tl.load(weights_ptr + pair) * output.to(tl.float32)
    if add_ptr is not None:
        total += tl.load(add_ptr + token * add_stride + column, mask=inside, other=0.0).to(
            tl.float32
        )
    tl.store(out_ptr + token * out_stride + column, total.to(out_ptr.dtype.element_ty), mask=inside)
