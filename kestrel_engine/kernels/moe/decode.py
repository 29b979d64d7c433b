"""Experts for up to 64 tokens. Two kernels read the weights of each chosen expert once.

A program computes a tile of output rows of one work item. A work item is an expert or, if there are fewer pairs than
experts, a pair: then the program of an expert's first pair works for all tokens of the expert, and the programs of the
other pairs exit. A program finds its tokens in the few routing entries, so the pairs need no sorting. An expert of at
most 16 tokens uses a narrow tile; other experts use a tile for all tokens. A single token is multiplied without tensor
cores.

Programmatic dependent launch (``pdl``): the up kernel lets the down kernel start once the routing is complete. So the
programs of the down kernel find their expert and prefetch its weights into L2 while the up kernel still runs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..adapters.experts import ExpertChange, ExpertChanges, add_expert_change
from ..linear.int4 import add_row_products, group_of, product_groups
from .tile import Experts, Tile, TilePair, dot_tile, geglu, product_scale, triton_type

MAX_TOKENS = 64
_NARROW = 16


# By bytes of a weight and batch class (1 token, up to 16, up to 64). Measured on an H200:
# 24, 111 and 141 us for FP8, 34, 176 and 207 us for bfloat16. Those of one token in FP8 are
# smaller now than they were for these 24 us: beside attention they are faster.
TILES: dict[tuple[int, int], TilePair] = {
    (1, 1): TilePair(Tile(4, 512, 2, 4, True), Tile(8, 512, 4, 2, True)),
    (1, 16): TilePair(Tile(32, 128, 4, 4), Tile(64, 128, 4, 4, True)),
    (1, 64): TilePair(Tile(32, 128, 4, 4), Tile(128, 128, 8, 4, True)),
    (2, 1): TilePair(Tile(4, 512, 4, 3, True), Tile(8, 1024, 4, 1, True)),
    (2, 16): TilePair(Tile(32, 128, 4, 4, True), Tile(64, 128, 4, 4, True)),
    (2, 64): TilePair(Tile(64, 64, 4, 4, True), Tile(128, 64, 4, 4, True)),
    (4, 1): TilePair(Tile(4, 256, 4, 2, True), Tile(8, 256, 4, 2, True)),
    (4, 16): TilePair(Tile(32, 32, 4, 2), Tile(64, 32, 4, 2)),
    (4, 64): TilePair(Tile(32, 32, 4, 2), Tile(64, 32, 4, 2)),
}


def tiles_of_groups(sort: int, group: int) -> TilePair:
    """Returns the tiles of weights in 4 bits for a batch class. A step reads bytes of two groups of each row, or with a
    single token of several pairs of groups. Of larger groups than 128, it reads a part: a whole one of 512 exceeds the
    shared memory."""
    if sort == 1:
        up_k, down_k = max(group, min(4 * group, 512)), max(group, min(2 * group, 256))
        return TilePair(Tile(4, up_k, 2, 2, True), Tile(32, down_k, 4, 2, True))
    part = min(group, 128)
    up = Tile(32, part, 4, 3, True)
    if sort == MAX_TOKENS:
        return TilePair(up, Tile(128, part, 4, 2, True))
    return TilePair(up, Tile(64, min(group, 64), 4, 3, True))


def batch_class(num_tokens: int) -> int:
    return next(limit for limit in (1, _NARROW, MAX_TOKENS) if num_tokens <= limit)


def moe_decode(
    u: Tensor,
    weights: Tensor,
    experts: Tensor,
    fc1: Tensor,
    fc2: Tensor,
    fc1_scale: Tensor | None = None,
    fc2_scale: Tensor | None = None,
    *,
    out: Tensor | None = None,
    adapters: ExpertChanges | None = None,
    pdl: bool = False,
    tiles: TilePair | None = None,
) -> Tensor:
    """Applies each token's experts (see `route.route`) to ``u`` [T, D] and returns parts [k, T, D] float32.

    Part i is the output of each token's i-th expert times its weight. The sum of the parts, in order, is the layer's
    output; `add_layer_norm` computes it. ``out``: [k, T, D] for the parts, in float32 or the model's dtype.
    ``adapters``: changes of the experts, which take two more launches; None if no token has an adapter.
    ``pdl``: launch as programmatic dependents (sm_90), which does not change results.

    Raises ValueError for more than 64 tokens.
    """
    layer = Experts(fc1, fc2, fc1_scale, fc2_scale)
    num_tokens, k = experts.shape
    if num_tokens > MAX_TOKENS:
        raise ValueError(f"{num_tokens} tokens are not a decode of at most {MAX_TOKENS}")
    if out is None:
        out = torch.empty((k, num_tokens, layer.dim), dtype=torch.float32, device=u.device)
    if layer.is_int4 and u.data_ptr() % 8:
        # A single row is read as int64.
        u = u.clone()
    if tiles is None:
        sort, group = batch_class(num_tokens), layer.group
        tiles = tiles_of_groups(sort, group) if group else TILES[fc1.element_size(), sort]
    product_type = layer.product_type(u.dtype)
    product = torch.empty((num_tokens * k, layer.inner), dtype=product_type, device=u.device)
    pdl = pdl and u.is_cuda
    changes: list[ExpertChange | None] = [None, None]
    if adapters is not None:
        changes[0] = adapters.of_fc1(u, experts, pdl=pdl)
    _launch(u, experts, fc1, fc1_scale, None, product, changes[0], tiles.up, product_type, pdl)
    if adapters is not None:
        changes[1] = adapters.of_fc2(product, experts, pdl=pdl)
    _launch(
        product, experts, fc2, fc2_scale, weights, out, changes[1], tiles.down, product_type, pdl
    )
    return out


def _launch(
    x: Tensor,
    experts: Tensor,
    matrix: Tensor,
    scale: Tensor | None,
    weights: Tensor | None,
    out: Tensor,
    change: ExpertChange | None,
    tile: Tile,
    product_type: torch.dtype,
    pdl: bool,
) -> None:
    """Launches the product with ``matrix``, of fc1 if there are no ``weights`` of the router, else of fc2."""
    (num_tokens, k), (num_experts, rows, columns) = experts.shape, matrix.shape
    group = group_of(matrix, scale) if scale is not None and scale.dim() == 4 else 0
    up = weights is None
    outputs = rows // 2 if up else rows
    by_expert = num_tokens * k >= num_experts
    launch: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    _decode_experts[
        (triton.cdiv(outputs, tile.block_n), num_experts if by_expert else num_tokens * k)
    ](
        x,
        experts,
        matrix,
        scale,
        weights,
        out,
        change,
        num_tokens,
        x.stride(0),
        INPUTS=columns * (2 if group else 1),
        OUTPUTS=outputs,
        ROWS=tile.block_n,
        BLOCK_K=tile.block_k,
        STAGES=tile.stages,
        SWAP=tile.swap,
        K_CHOICES=k,
        BY_EXPERT=by_expert,
        TOKENS_PAD=max(_NARROW, triton.next_power_of_2(num_tokens)) if num_tokens > 1 else 1,
        CHOICES_PAD=triton.next_power_of_2(k),
        NARROW=_NARROW,
        DOT=triton_type(product_type),
        PRODUCT_SCALE=product_scale(product_type),
        PDL=pdl,
        PREFETCH=0 if up else _prefetchable(matrix, tile.block_n),
        GROUP=group,
        PTX=x.is_cuda,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **launch,
    )


def _prefetchable(fc2: Tensor, rows: int) -> int:
    """Returns the bytes of one program's weights, which are contiguous; 0 if the last program's rows exceed the
    expert."""
    num_bytes = rows * fc2.shape[2] * fc2.element_size()
    return num_bytes if fc2.shape[1] % rows == 0 and num_bytes % (128 * 16) == 0 else 0


@triton.jit
def _prefetch_l2(address, BYTES: tl.constexpr):
    """Prefetches BYTES bytes (a multiple of 16) at each address of a block of int64, one thread each, without
    waiting."""
    tl.inline_asm_elementwise(
        f"cp.async.bulk.prefetch.L2.global [$1], {BYTES}; // $0",
        "=r,l",
        [address],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _pairs_of_slot(
    experts_ptr, slot, num_tokens, K_CHOICES: tl.constexpr, BY_EXPERT: tl.constexpr,
    TOKENS_PAD: tl.constexpr, CHOICES_PAD: tl.constexpr,
):  # fmt: skip
    """Returns the expert of a work item, and each token's pair with it, or -1. An item without work has no pairs."""
    token = tl.arange(0, TOKENS_PAD)
    choice = tl.arange(0, CHOICES_PAD)
    pair = token[:, None] * K_CHOICES + choice[None, :]
    exists = (token < num_tokens)[:, None] & (choice < K_CHOICES)[None, :]
    chosen = tl.load(experts_ptr + pair, mask=exists, other=-1)
    if BY_EXPERT:
        expert = slot
    else:
        expert = tl.load(experts_ptr + slot)
    pairs = tl.max(tl.where(chosen == expert, pair, -1), axis=1)
    if not BY_EXPERT:
        # The program of an earlier pair of the same expert does the work.
        earlier = tl.sum(((pairs >= 0) & (pairs < slot)).to(tl.int32), axis=0)
        pairs = tl.where(earlier > 0, -1, pairs)
    return expert, pairs


@triton.jit
def _compact(pairs, TOKENS_PAD: tl.constexpr, NARROW: tl.constexpr):
    """Returns the pairs that are not -1, in order, as [NARROW]."""
    exists = pairs >= 0
    place = tl.cumsum(exists.to(tl.int32), axis=0) - 1
    to = tl.arange(0, NARROW)
    mine = (place[None, :] == to[:, None]) & exists[None, :]
    return tl.max(tl.where(mine, pairs[None, :], -1), axis=1)


@triton.jit
def _row_product(
    x_ptr, w_ptr, w_valid, scales, N: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, GROUP: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Returns [1, N], as `_product` does, for one row of two bytes a value and weights in 4 bits. Words of four bytes
    are multiplied without tensor cores."""
    PAIRS: tl.constexpr = BLOCK_K // GROUP
    in_tile, word = tl.arange(0, PAIRS)[None, :, None], tl.arange(0, GROUP // 4)[None, None, :]
    keep = w_valid[:, None, None]
    words = w_ptr[:, None, None].to(tl.pointer_type(tl.int32)) + in_tile * (GROUP // 4) + word
    x = x_ptr[:, None, None].to(tl.pointer_type(tl.int64))
    acc = tl.zeros([N, PAIRS, GROUP // 4], tl.float32)
    for k in tl.range(0, K // 2, BLOCK_K, num_stages=STAGES):
        pair = k // GROUP + in_tile
        there = pair < K // (2 * GROUP)
        w = tl.load(words + k // 4, mask=keep & there, other=0, eviction_policy="evict_first")
        acc = add_row_products(
            acc, w, x, scales[:, None, None], pair, keep, there, GROUP, x_ptr.dtype.element_ty, PTX
        )
    return tl.sum(tl.sum(acc, axis=2), axis=1)[None, :]


@triton.jit
def _product(
    x_ptr, valid, w_ptr, w_valid, scales, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SWAP: tl.constexpr, DOT: tl.constexpr,
    GROUP: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Returns the rows of inputs ``x_ptr`` [M] times the rows of weights ``w_ptr`` [N], [M, N] float32. Weights are
    read once, so they are evicted first from the cache. With GROUP, a step reads bytes of weights in 4 bits, which are
    in two groups of each row; ``scales`` [N] are the addresses of the rows' scales."""
    STEP: tl.constexpr = GROUP if GROUP and BLOCK_K > GROUP else BLOCK_K
    at_k = tl.arange(0, STEP)
    if M == 1:
        acc = tl.zeros([N, STEP], tl.float32)
    elif SWAP:
        acc = tl.zeros([N, M], tl.float32)
    else:
        acc = tl.zeros([M, N], tl.float32)
    COLUMNS: tl.constexpr = K // 2 if GROUP else K
    for k in tl.range(0, COLUMNS, STEP, num_stages=STAGES):
        inside = k + at_k < COLUMNS
        w = tl.load(
            w_ptr[:, None] + (k + at_k)[None, :],
            mask=w_valid[:, None] & inside[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        if GROUP:
            # Two steps of x. The first is taken here, the second below.
            w_first, w = product_groups(w, scales, k // GROUP, w_valid, DOT, PTX)
            x_at = tl.multiple_of(k // GROUP * (2 * GROUP) + k % GROUP, 16)
            x = tl.load(x_ptr[:, None] + (x_at + at_k)[None, :], mask=valid[:, None], other=0.0)
            if M == 1:
                acc += w_first.to(tl.float32) * x.to(tl.float32)
            else:
                acc = dot_tile(x, w_first, acc, SWAP, DOT)
            x_at += GROUP
        else:
            x_at = k
        x = tl.load(
            x_ptr[:, None] + (x_at + at_k)[None, :],
            mask=valid[:, None] & inside[None, :],
            other=0.0,
        )
        if M == 1:
            acc += w.to(tl.float32) * x.to(tl.float32)
        else:
            acc = dot_tile(x, w, acc, SWAP, DOT)
    if M == 1:
        total = tl.sum(acc, axis=1)[None, :]
    elif SWAP:
        total = tl.trans(acc)
    else:
        total = acc
    return total


@triton.jit
def _compute(
    x_ptr, w_ptr, scale_ptr, weights_ptr, out_ptr, change, expert, pairs, tile, num_tokens, stride,
    K_CHOICES: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, M: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SWAP: tl.constexpr,
    DOT: tl.constexpr, PRODUCT_SCALE: tl.constexpr, GROUP: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Computes ROWS columns of the output for ``pairs`` [M] of an expert."""
    UP: tl.constexpr = weights_ptr is None
    # With up, the rows of h, then the same rows of g, so that one product computes both.
    N: tl.constexpr = 2 * ROWS if UP else ROWS
    MATRIX: tl.constexpr = 2 * OUTPUTS if UP else OUTPUTS
    valid = pairs >= 0
    pair = tl.where(valid, pairs, 0)
    token = pair // K_CHOICES
    rows = tl.arange(0, N)
    column = tile * ROWS + rows % ROWS
    row = column + (rows // ROWS) * OUTPUTS
    w_valid = column < OUTPUTS
    of_expert = expert.to(tl.int64) * MATRIX
    x_row = x_ptr + (token * stride if UP else pair * INPUTS)
    # Rows are at offsets of 32 bits from one address. With addresses of 64 bits for each row, the largest tiles exceed
    # the registers with which a multiprocessor holds two programs.
    COLUMNS: tl.constexpr = INPUTS // 2 if GROUP else INPUTS
    w_row = w_ptr + of_expert * COLUMNS + row * COLUMNS
    scales = w_row
    if GROUP:
        SCALES: tl.constexpr = 2 * (INPUTS // GROUP)
        scales = scale_ptr + of_expert * SCALES + row * SCALES
    if GROUP and M == 1 and x_ptr.dtype.element_ty != tl.float32:
        acc = _row_product(x_row, w_row, w_valid, scales, N, INPUTS, BLOCK_K, STAGES, GROUP, PTX)
    else:
        acc = _product(
            x_row, valid, w_row, w_valid, scales, M, N, INPUTS, BLOCK_K, STAGES, SWAP, DOT, GROUP, PTX
        )  # fmt: skip
    if scale_ptr is not None and not GROUP:
        acc = acc * tl.load(scale_ptr + of_expert + row, mask=w_valid, other=0.0)[None, :]
    if change is not None:
        # The products with A have the scale of the product, as the other summands do.
        acc = add_expert_change(acc, change, expert, token, valid, pair, row, w_valid, MATRIX)
    if UP:
        h, g = tl.split(tl.permute(tl.reshape(acc, [M, 2, ROWS]), [0, 2, 1]))
        result = geglu(h, g, PRODUCT_SCALE)
        at = pair
    else:
        weight = tl.load(weights_ptr + pair, mask=valid, other=0.0) * (1.0 / PRODUCT_SCALE)
        result = acc * weight[:, None]
        at = (pair % K_CHOICES) * num_tokens + token
    column = tile * ROWS + tl.arange(0, ROWS)
    to = out_ptr + at[:, None] * OUTPUTS + column[None, :]
    stored = valid[:, None] & (column < OUTPUTS)[None, :]
    tl.store(to, result.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _decode_experts(
    x_ptr, experts_ptr, w_ptr, scale_ptr, weights_ptr, out_ptr, change, num_tokens, stride,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, SWAP: tl.constexpr, K_CHOICES: tl.constexpr, BY_EXPERT: tl.constexpr,
    TOKENS_PAD: tl.constexpr, CHOICES_PAD: tl.constexpr, NARROW: tl.constexpr, DOT: tl.constexpr,
    PRODUCT_SCALE: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr,
    GROUP: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Computes, for the pairs of one work item and ROWS columns, product[pair] = gelu(h) * (g + 1) without ``weights``,
    and out[choice, token] = weight * (product[pair] @ fc2.T) with them."""
    tile = tl.program_id(0)
    if PDL and weights_ptr is None:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, pairs = _pairs_of_slot(
        experts_ptr, tl.program_id(1), num_tokens, K_CHOICES, BY_EXPERT, TOKENS_PAD, CHOICES_PAD
    )
    count = tl.sum((pairs >= 0).to(tl.int32), axis=0)
    if PDL and weights_ptr is not None:
        if PREFETCH > 0:
            if count > 0:
                row = expert.to(tl.int64) * OUTPUTS + tile * ROWS
                begin = (w_ptr + row * (INPUTS // 2 if GROUP else INPUTS)).to(tl.int64)
                _prefetch_l2(begin + tl.arange(0, 128) * (PREFETCH // 128), PREFETCH // 128)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if count > 0:
        if TOKENS_PAD <= NARROW:
            _compute(
                x_ptr, w_ptr, scale_ptr, weights_ptr, out_ptr, change, expert, pairs, tile, num_tokens,
                stride, K_CHOICES, INPUTS, OUTPUTS, TOKENS_PAD, ROWS, BLOCK_K, STAGES, SWAP, DOT,
                PRODUCT_SCALE, GROUP, PTX,
            )  # fmt: skip
        elif count <= NARROW:
            few = _compact(pairs, TOKENS_PAD, NARROW)
            _compute(
                x_ptr, w_ptr, scale_ptr, weights_ptr, out_ptr, change, expert, few, tile, num_tokens,
                stride, K_CHOICES, INPUTS, OUTPUTS, NARROW, ROWS, BLOCK_K, STAGES, SWAP, DOT,
                PRODUCT_SCALE, GROUP, PTX,
            )  # fmt: skip
        else:
            _compute(
                x_ptr, w_ptr, scale_ptr, weights_ptr, out_ptr, change, expert, pairs, tile, num_tokens,
                stride, K_CHOICES, INPUTS, OUTPUTS, TOKENS_PAD, ROWS, BLOCK_K, STAGES, SWAP, DOT,
                PRODUCT_SCALE, GROUP, PTX,
            )  # fmt: skip
