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

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..adapters.experts import ExpertChanges, add_expert_change, shrink_experts
from .tile import Experts, dot_tile, geglu, product_scale, triton_type

MAX_TOKENS = 64
_NARROW = 16


class Tile(NamedTuple):
    """The output rows of a program, the inputs of a step, warps, stages, and whether weights are the first operand."""

    rows: int
    block_k: int
    warps: int
    stages: int
    swap: bool = True


class Tiles(NamedTuple):
    up: Tile
    down: Tile


# By bytes of a weight and batch class (1 token, up to 16, up to 64). Measured on an H200:
# 24, 111 and 141 us for FP8, 34, 176 and 207 us for bfloat16. Those of one token in FP8 are
# smaller now than they were for these 24 us: beside attention they are faster.
TILES: dict[tuple[int, int], Tiles] = {
    (1, 1): Tiles(Tile(4, 512, 2, 4), Tile(8, 512, 4, 2)),
    (1, 16): Tiles(Tile(32, 128, 4, 4, False), Tile(64, 128, 4, 4)),
    (1, 64): Tiles(Tile(32, 128, 4, 4, False), Tile(128, 128, 8, 4)),
    (2, 1): Tiles(Tile(4, 512, 4, 3), Tile(8, 1024, 4, 1)),
    (2, 16): Tiles(Tile(32, 128, 4, 4), Tile(64, 128, 4, 4)),
    (2, 64): Tiles(Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
    (4, 1): Tiles(Tile(4, 256, 4, 2), Tile(8, 256, 4, 2)),
    (4, 16): Tiles(Tile(32, 32, 4, 2, False), Tile(64, 32, 4, 2, False)),
    (4, 64): Tiles(Tile(32, 32, 4, 2, False), Tile(64, 32, 4, 2, False)),
}


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
    tiles: Tiles | None = None,
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
    num_experts, dim, inner = layer.num_experts, layer.dim, layer.inner
    num_pairs = num_tokens * k
    by_expert = num_pairs >= num_experts
    num_slots = num_experts if by_expert else num_pairs
    if out is None:
        out = torch.empty((k, num_tokens, dim), dtype=torch.float32, device=u.device)
    tiles = tiles or TILES[fc1.element_size(), batch_class(num_tokens)]
    product_type = layer.product_type(u.dtype)
    product = torch.empty((num_pairs, inner), dtype=product_type, device=u.device)
    pdl = pdl and u.is_cuda
    shared: dict[str, Any] = {
        "PDL": pdl,
        "K_CHOICES": k,
        "BY_EXPERT": by_expert,
        "TOKENS_PAD": max(_NARROW, triton.next_power_of_2(num_tokens)) if num_tokens > 1 else 1,
        "CHOICES_PAD": triton.next_power_of_2(k),
        "NARROW": _NARROW,
        "SCALED": fc1_scale is not None,
        "DOT": triton_type(product_type),
        "PRODUCT_SCALE": product_scale(product_type),
        "ADAPTERS": adapters is not None,
    }
    if pdl:
        shared["launch_pdl"] = True
    # Without adapters, the kernels read none of these.
    on_device, places = (fc1, fc1, experts, experts), (0, 0)
    shrunk = out
    if adapters is not None:
        own = adapters.rows
        on_device, places = (
            (own.anchor, own.slabs, own.first, own.count),
            (adapters.fc1_b, adapters.fc2_b),
        )
        shrunk = shrink_experts(u, experts, own, adapters.fc1_a, of_tokens=True, pdl=pdl)
    _up_kernel[(triton.cdiv(inner, tiles.up.rows), num_slots)](
        u,
        experts,
        fc1,
        fc1 if fc1_scale is None else fc1_scale,
        product,
        *on_device,
        shrunk,
        places[0],
        num_tokens,
        u.stride(0),
        DIM=dim,
        INNER=inner,
        ROWS=tiles.up.rows,
        BLOCK_K=tiles.up.block_k,
        STAGES=tiles.up.stages,
        SWAP=tiles.up.swap,
        num_warps=tiles.up.warps,
        num_stages=tiles.up.stages,
        **shared,
    )
    if adapters is not None:
        shrunk = shrink_experts(product, experts, own, adapters.fc2_a, of_tokens=False, pdl=pdl)
    _down_kernel[(triton.cdiv(dim, tiles.down.rows), num_slots)](
        product,
        weights,
        experts,
        fc2,
        fc2 if fc2_scale is None else fc2_scale,
        out,
        *on_device,
        shrunk,
        places[1],
        num_tokens,
        DIM=dim,
        INNER=inner,
        ROWS=tiles.down.rows,
        BLOCK_K=tiles.down.block_k,
        STAGES=tiles.down.stages,
        SWAP=tiles.down.swap,
        TILE_BYTES=_prefetchable(fc2, tiles.down.rows),
        num_warps=tiles.down.warps,
        num_stages=tiles.down.stages,
        **shared,
    )
    return out


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
    experts_ptr,
    slot,
    num_tokens,
    K_CHOICES: tl.constexpr,
    BY_EXPERT: tl.constexpr,
    TOKENS_PAD: tl.constexpr,
    CHOICES_PAD: tl.constexpr,
):
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
def _product(
    x_ptr,  # [M] rows of inputs
    valid,  # [M]
    w_ptr,  # [N] rows of weights
    w_valid,  # [N]
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    DOT: tl.constexpr,
):
    """Returns inputs times weights, [M, N] float32. Weights are read once, so they are evicted first from the cache."""
    at_k = tl.arange(0, BLOCK_K)
    if M == 1:
        sums = tl.zeros([N, BLOCK_K], tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            inside = k + at_k < K
            w = tl.load(
                w_ptr[:, None] + (k + at_k)[None, :],
                mask=w_valid[:, None] & inside[None, :],
                other=0.0,
                eviction_policy="evict_first",
            )
            x = tl.load(
                x_ptr[:, None] + (k + at_k)[None, :],
                mask=valid[:, None] & inside[None, :],
                other=0.0,
            )
            sums += w.to(tl.float32) * x.to(tl.float32)
        total = tl.sum(sums, axis=1)[None, :]
    else:
        if SWAP:
            acc = tl.zeros([N, M], tl.float32)
        else:
            acc = tl.zeros([M, N], tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            inside = k + at_k < K
            w = tl.load(
                w_ptr[:, None] + (k + at_k)[None, :],
                mask=w_valid[:, None] & inside[None, :],
                other=0.0,
                eviction_policy="evict_first",
            )
            x = tl.load(
                x_ptr[:, None] + (k + at_k)[None, :],
                mask=valid[:, None] & inside[None, :],
                other=0.0,
            )
            acc = dot_tile(x, w, acc, SWAP, DOT)
        if SWAP:
            total = tl.trans(acc)
        else:
            total = acc
    return total


@triton.jit
def _up_tile(
    u_ptr,
    fc1_ptr,
    scale_ptr,
    product_ptr,
    expert,
    pairs,
    tile,
    stride,
    anchor,
    slabs,
    slab_first,
    slab_count,
    shrunk,
    b_at,
    K_CHOICES: tl.constexpr,
    DIM: tl.constexpr,
    INNER: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    SCALED: tl.constexpr,
    DOT: tl.constexpr,
    PRODUCT_SCALE: tl.constexpr,
    ADAPTERS: tl.constexpr,
):
    valid = pairs >= 0
    token = tl.where(valid, pairs, 0) // K_CHOICES
    # The rows of h, then the same rows of g, so that one product computes both.
    both = tl.arange(0, 2 * ROWS)
    column = tile * ROWS + both % ROWS
    row = column + (both // ROWS) * INNER
    w_valid = column < INNER
    of_expert = expert.to(tl.int64) * (2 * INNER)
    w_ptr = fc1_ptr + of_expert * DIM + row * DIM
    x_ptr = u_ptr + token * stride
    acc = _product(x_ptr, valid, w_ptr, w_valid, M, 2 * ROWS, DIM, BLOCK_K, STAGES, SWAP, DOT)
    if SCALED:
        scale = tl.load(scale_ptr + of_expert + row, mask=w_valid, other=0.0)
        acc = acc * scale[None, :]
    if ADAPTERS:
        acc = add_expert_change(
            acc, anchor, slabs, slab_first, slab_count, shrunk, b_at, expert, token, valid, pairs, row,
            w_valid, 2 * INNER,
        )  # fmt: skip
    h, g = tl.split(tl.permute(tl.reshape(acc, [M, 2, ROWS]), [0, 2, 1]))
    column = tile * ROWS + tl.arange(0, ROWS)
    product = geglu(h, g, PRODUCT_SCALE)
    at = product_ptr + tl.where(valid, pairs, 0)[:, None] * INNER + column[None, :]
    tl.store(
        at,
        product.to(product_ptr.dtype.element_ty),
        mask=valid[:, None] & (column < INNER)[None, :],
    )


@triton.jit
def _up_kernel(
    u_ptr,
    experts_ptr,
    fc1_ptr,
    scale_ptr,
    product_ptr,
    anchor,
    slabs,
    slab_first,
    slab_count,
    shrunk,
    b_at,
    num_tokens,
    stride,
    DIM: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    K_CHOICES: tl.constexpr,
    BY_EXPERT: tl.constexpr,
    TOKENS_PAD: tl.constexpr,
    CHOICES_PAD: tl.constexpr,
    NARROW: tl.constexpr,
    SCALED: tl.constexpr,
    DOT: tl.constexpr,
    PRODUCT_SCALE: tl.constexpr,
    ADAPTERS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes product[pair] = gelu(h) * (g + 1) for the pairs of one work item and ROWS of its columns."""
    tile = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, pairs = _pairs_of_slot(
        experts_ptr, tl.program_id(1), num_tokens, K_CHOICES, BY_EXPERT, TOKENS_PAD, CHOICES_PAD
    )
    count = tl.sum((pairs >= 0).to(tl.int32), axis=0)
    if count > 0:
        if TOKENS_PAD <= NARROW:
            _up_tile(
                    u_ptr, fc1_ptr, scale_ptr, product_ptr, expert, pairs, tile, stride, anchor, slabs,
                    slab_first, slab_count, shrunk, b_at, K_CHOICES, DIM, INNER, TOKENS_PAD, ROWS,
                    BLOCK_K, STAGES, SWAP, SCALED, DOT, PRODUCT_SCALE, ADAPTERS,
                )  # fmt: skip
        else:
            if count <= NARROW:
                few = _compact(pairs, TOKENS_PAD, NARROW)
                _up_tile(
                    u_ptr, fc1_ptr, scale_ptr, product_ptr, expert, few, tile, stride, anchor, slabs,
                    slab_first, slab_count, shrunk, b_at, K_CHOICES, DIM, INNER, NARROW, ROWS,
                    BLOCK_K, STAGES, SWAP, SCALED, DOT, PRODUCT_SCALE, ADAPTERS,
                )  # fmt: skip
            else:
                _up_tile(
                    u_ptr, fc1_ptr, scale_ptr, product_ptr, expert, pairs, tile, stride, anchor, slabs,
                    slab_first, slab_count, shrunk, b_at, K_CHOICES, DIM, INNER, TOKENS_PAD, ROWS,
                    BLOCK_K, STAGES, SWAP, SCALED, DOT, PRODUCT_SCALE, ADAPTERS,
                )  # fmt: skip


@triton.jit
def _down_tile(
    product_ptr,
    weights_ptr,
    fc2_ptr,
    scale_ptr,
    out_ptr,
    expert,
    pairs,
    tile,
    num_tokens,
    anchor,
    slabs,
    slab_first,
    slab_count,
    shrunk,
    b_at,
    K_CHOICES: tl.constexpr,
    DIM: tl.constexpr,
    INNER: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    SCALED: tl.constexpr,
    DOT: tl.constexpr,
    PRODUCT_SCALE: tl.constexpr,
    ADAPTERS: tl.constexpr,
):
    valid = pairs >= 0
    pair = tl.where(valid, pairs, 0)
    row = tile * ROWS + tl.arange(0, ROWS)
    w_valid = row < DIM
    of_expert = expert.to(tl.int64) * DIM
    w_ptr = fc2_ptr + of_expert * INNER + row * INNER
    x_ptr = product_ptr + pair * INNER
    acc = _product(x_ptr, valid, w_ptr, w_valid, M, ROWS, INNER, BLOCK_K, STAGES, SWAP, DOT)
    if SCALED:
        acc = acc * tl.load(scale_ptr + of_expert + row, mask=w_valid, other=0.0)[None, :]
    if ADAPTERS:
        # The products with A have the scale of the product, as the other summands do.
        acc = add_expert_change(
            acc, anchor, slabs, slab_first, slab_count, shrunk, b_at, expert, pair // K_CHOICES, valid,
            pair, row, w_valid, DIM,
        )  # fmt: skip
    weight = tl.load(weights_ptr + pair, mask=valid, other=0.0) * (1.0 / PRODUCT_SCALE)
    part = (pair % K_CHOICES) * num_tokens + pair // K_CHOICES
    at = out_ptr + part[:, None] * DIM + row[None, :]
    result = acc * weight[:, None]
    tl.store(at, result.to(out_ptr.dtype.element_ty), mask=valid[:, None] & w_valid[None, :])


@triton.jit
def _down_kernel(
    product_ptr,
    weights_ptr,
    experts_ptr,
    fc2_ptr,
    scale_ptr,
    out_ptr,
    anchor,
    slabs,
    slab_first,
    slab_count,
    shrunk,
    b_at,
    num_tokens,
    DIM: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    K_CHOICES: tl.constexpr,
    BY_EXPERT: tl.constexpr,
    TOKENS_PAD: tl.constexpr,
    CHOICES_PAD: tl.constexpr,
    NARROW: tl.constexpr,
    SCALED: tl.constexpr,
    DOT: tl.constexpr,
    PRODUCT_SCALE: tl.constexpr,
    ADAPTERS: tl.constexpr,
    PDL: tl.constexpr,
    TILE_BYTES: tl.constexpr,
):
    """Computes out[choice, token] = weight * (product[pair] @ fc2.T) for the pairs of one work item and ROWS
    columns."""
    tile = tl.program_id(0)
    expert, pairs = _pairs_of_slot(
        experts_ptr, tl.program_id(1), num_tokens, K_CHOICES, BY_EXPERT, TOKENS_PAD, CHOICES_PAD
    )
    count = tl.sum((pairs >= 0).to(tl.int32), axis=0)
    if PDL:
        if TILE_BYTES > 0:
            if count > 0:
                row = expert.to(tl.int64) * DIM + tile * ROWS
                begin = (fc2_ptr + row * INNER).to(tl.int64)
                _prefetch_l2(begin + tl.arange(0, 128) * (TILE_BYTES // 128), TILE_BYTES // 128)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if count > 0:
        if TOKENS_PAD <= NARROW:
            _down_tile(
                    product_ptr, weights_ptr, fc2_ptr, scale_ptr, out_ptr, expert, pairs, tile,
                    num_tokens, anchor, slabs, slab_first, slab_count, shrunk, b_at, K_CHOICES, DIM,
                    INNER, TOKENS_PAD, ROWS, BLOCK_K, STAGES, SWAP, SCALED, DOT, PRODUCT_SCALE, ADAPTERS,
                )  # fmt: skip
        else:
            if count <= NARROW:
                few = _compact(pairs, TOKENS_PAD, NARROW)
                _down_tile(
                    product_ptr, weights_ptr, fc2_ptr, scale_ptr, out_ptr, expert, few, tile,
                    num_tokens, anchor, slabs, slab_first, slab_count, shrunk, b_at, K_CHOICES, DIM,
                    INNER, NARROW, ROWS, BLOCK_K, STAGES, SWAP, SCALED, DOT, PRODUCT_SCALE, ADAPTERS,
                )  # fmt: skip
            else:
                _down_tile(
                    product_ptr, weights_ptr, fc2_ptr, scale_ptr, out_ptr, expert, pairs, tile,
                    num_tokens, anchor, slabs, slab_first, slab_count, shrunk, b_at, K_CHOICES, DIM,
                    INNER, TOKENS_PAD, ROWS, BLOCK_K, STAGES, SWAP, SCALED, DOT, PRODUCT_SCALE, ADAPTERS,
                )  # fmt: skip
