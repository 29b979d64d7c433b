"""Experts for one token: two kernels of multiply-adds that keep as many bytes as they can on their way.

A program streams rows of one chosen expert. Each warp has its own, so nothing crosses warps. The up kernel reads
tile after tile through shared memory; the down kernel holds its only tile in registers, asked for before it waits for
what the up kernel computes, so that the stream goes on between the two.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .moe_tile import Experts, geglu, product_scale


class OneTile(NamedTuple):
    """``up``: columns of a program, warps, stages. ``down``: warps; a program has four rows for each."""

    up_columns: int = 32
    up_warps: int = 4
    up_stages: int = 4
    down_warps: int = 8


def moe_one(
    u: Tensor,
    weights: Tensor,
    experts: Tensor,
    layer: Experts,
    *,
    out: Tensor,
    pdl: bool = False,
    tile: OneTile | None = None,
) -> Tensor:
    """``u`` [1, D] through its k experts -> ``out`` [k, 1, D]; arguments as of `moe_decode.moe_decode`."""
    k = experts.shape[1]
    dim, inner = layer.dim, layer.inner
    assert u.shape == (1, dim) and u.stride(1) == 1
    t = tile or OneTile()
    product_type = layer.product_type(u.dtype)
    product = torch.empty((k, inner), dtype=product_type, device=u.device)
    element = layer.fc1.element_size()
    pdl = pdl and u.is_cuda
    shared: dict[str, Any] = {
        "DIM": dim,
        "INNER": inner,
        "SCALED": layer.fc1_scale is not None,
        "PRODUCT_SCALE": product_scale(product_type),
        "PDL": pdl,
    }
    if pdl:
        shared["launch_pdl"] = True
    # What a warp reads at once: 16 bytes a thread.
    block = min(512 // element, triton.next_power_of_2(dim))
    tiles = triton.cdiv(t.up_columns, t.up_warps)
    _up_one[(triton.cdiv(inner, tiles * t.up_warps), k)](
        u, experts, layer.fc1, layer.fc1 if layer.fc1_scale is None else layer.fc1_scale, product,
        TILES=tiles, WARPS=t.up_warps, BLOCK_K=block,
        K_BLOCKS=triton.next_power_of_2(triton.cdiv(dim, block)),
        EVEN=inner % (tiles * t.up_warps) == 0 and _is_even(dim, block),
        STAGES=t.up_stages, num_stages=t.up_stages, num_warps=t.up_warps, **shared,
    )  # fmt: skip
    block = min(512 // element, triton.next_power_of_2(inner))
    _down_one[(triton.cdiv(dim, 4 * t.down_warps), k)](
        product, weights, experts, layer.fc2, layer.fc2 if layer.fc2_scale is None else layer.fc2_scale,
        out, WARPS=t.down_warps, BLOCK_K=block,
        K_BLOCKS=triton.next_power_of_2(triton.cdiv(inner, block)),
        EVEN=dim % (4 * t.down_warps) == 0 and _is_even(inner, block),
        num_warps=t.down_warps, **shared,
    )  # fmt: skip
    return out


def _is_even(k: int, block: int) -> bool:
    """Whether a power of two of blocks is all there is."""
    return k % block == 0 and (k // block).bit_count() == 1


@triton.jit
def _streamed(w, keep, EVEN: tl.constexpr):
    """Weights pass by once: they should not displace others from the cache."""
    if EVEN:
        tile = tl.load(w, eviction_policy="evict_first")
    else:
        tile = tl.load(w, mask=keep, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def _row_sums(w, x):
    """[WARPS] float32: of each row of ``w`` [K_BLOCKS, WARPS, BLOCK_K] its product with x."""
    return tl.sum(tl.sum(w.to(tl.float32) * x.to(tl.float32), axis=0), axis=1)


# Tiles are [K_BLOCKS, WARPS, BLOCK_K], a row a warp: so laid out a warp's lanes lie along K, and no sum crosses warps.
# Inputs are read in the same shape, once for every row: that gives them the weights' layout.


@triton.jit
def _up_one(
    u, experts, fc1, scale, product,
    DIM: tl.constexpr, INNER: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr, BLOCK_K: tl.constexpr,
    K_BLOCKS: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, SCALED: tl.constexpr,
    PRODUCT_SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """product[pair] = gelu(h) * (g + 1) of TILES * WARPS columns."""
    pair = tl.program_id(1)
    mine = tl.arange(0, WARPS)
    within = tl.arange(0, K_BLOCKS)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    of_expert = tl.load(experts + pair).to(tl.int64) * (2 * INNER)
    everywhere = within + (mine * 0)[None, :, None]
    x = tl.load(u + everywhere, mask=everywhere < DIM, other=0.0)
    first = tl.program_id(0) * (TILES * WARPS)
    base = fc1 + of_expert * DIM
    for tile in tl.range(0, TILES, num_stages=STAGES):
        row = first + tile * WARPS + mine
        known = row < INNER
        at = base + row[None, :, None] * DIM + within
        keep = known[None, :, None] & (within < DIM)
        h = _row_sums(_streamed(at, keep, EVEN), x)
        g = _row_sums(_streamed(at + INNER * DIM, keep, EVEN), x)
        if SCALED:
            h *= tl.load(scale + of_expert + row, mask=known, other=0.0)
            g *= tl.load(scale + of_expert + INNER + row, mask=known, other=0.0)
        result = geglu(h, g, PRODUCT_SCALE).to(product.dtype.element_ty)
        tl.store(product + pair * INNER + row, result, mask=known)


@triton.jit
def _down_one(
    product, weights, experts, fc2, scale, out,
    DIM: tl.constexpr, INNER: tl.constexpr, WARPS: tl.constexpr, BLOCK_K: tl.constexpr, K_BLOCKS: tl.constexpr,
    EVEN: tl.constexpr, SCALED: tl.constexpr, PRODUCT_SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[choice] = weight * (product[pair] @ fc2.T) of 4 * WARPS columns."""
    pair = tl.program_id(1)
    within = tl.arange(0, K_BLOCKS)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    row = tl.program_id(0) * (4 * WARPS) + tl.arange(0, WARPS)
    # The up kernel lets this one start once the routing is complete: all but its own product may be read.
    of_expert = tl.load(experts + pair).to(tl.int64) * DIM
    at = fc2 + of_expert * INNER + row[None, :, None] * INNER + within
    keep = within < INNER
    w0 = _streamed(at, (row < DIM)[None, :, None] & keep, EVEN)
    w1 = _streamed(at + WARPS * INNER, (row + WARPS < DIM)[None, :, None] & keep, EVEN)
    w2 = _streamed(at + 2 * WARPS * INNER, (row + 2 * WARPS < DIM)[None, :, None] & keep, EVEN)
    w3 = _streamed(at + 3 * WARPS * INNER, (row + 3 * WARPS < DIM)[None, :, None] & keep, EVEN)
    factor = tl.load(weights + pair) * (1.0 / PRODUCT_SCALE)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    everywhere = within + (row * 0)[None, :, None]
    x = tl.load(product + pair * INNER + everywhere, mask=everywhere < INNER, other=0.0)
    scale += of_expert
    out += pair * DIM
    _store_rows(out, row, _row_sums(w0, x) * factor, scale, DIM, SCALED)
    _store_rows(out, row + WARPS, _row_sums(w1, x) * factor, scale, DIM, SCALED)
    _store_rows(out, row + 2 * WARPS, _row_sums(w2, x) * factor, scale, DIM, SCALED)
    _store_rows(out, row + 3 * WARPS, _row_sums(w3, x) * factor, scale, DIM, SCALED)


@triton.jit
def _store_rows(out, row, total, scale, DIM: tl.constexpr, SCALED: tl.constexpr):
    if SCALED:
        total *= tl.load(scale + row, mask=row < DIM, other=0.0)
    tl.store(out + row, total.to(out.dtype.element_ty), mask=row < DIM)
