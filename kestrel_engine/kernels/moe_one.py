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
    """Of the up kernel: columns of a program, warps, stages. ``registers``: of a thread of the down kernel, at most."""

    columns: int = 16
    warps: int = 4
    stages: int = 4
    registers: int | None = None


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
    """``u`` [1, D] through its k experts -> the first of ``out`` [n, 1, D], which holds the weighted sum, [1, 1, D].
    Arguments as of `moe_decode.moe_decode`."""
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
    tiles = triton.cdiv(t.columns, t.warps)
    _up_one[(triton.cdiv(inner, tiles * t.warps), k)](
        u, experts, layer.fc1, layer.fc1 if layer.fc1_scale is None else layer.fc1_scale, product,
        TILES=tiles, WARPS=t.warps, BLOCK_K=block,
        K_BLOCKS=triton.next_power_of_2(triton.cdiv(dim, block)),
        EVEN=inner % (tiles * t.warps) == 0 and _is_even(dim, block),
        STAGES=t.stages, num_stages=t.stages, num_warps=t.warps, **shared,
    )  # fmt: skip
    block = min(512 // element, triton.next_power_of_2(inner))
    choices = triton.next_power_of_2(k)
    if t.registers is not None and u.is_cuda:
        shared["maxnreg"] = t.registers
    _down_one[(triton.cdiv(dim, 4),)](
        product, weights, experts, layer.fc2, layer.fc2 if layer.fc2_scale is None else layer.fc2_scale,
        out, K_CHOICES=k, CHOICES=choices, BLOCK_K=block,
        K_BLOCKS=triton.next_power_of_2(triton.cdiv(inner, block)),
        EVEN=dim % 4 == 0 and k == choices and _is_even(inner, block),
        num_warps=min(choices, 16), **shared,
    )  # fmt: skip
    return out[:1]


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


# Tiles are [K_BLOCKS, rows, BLOCK_K], a row a warp: so laid out a warp's lanes lie along K, no product crosses warps.
# Inputs are read in the same shape: that gives them the weights' layout.


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
    DIM: tl.constexpr, INNER: tl.constexpr, K_CHOICES: tl.constexpr, CHOICES: tl.constexpr,
    BLOCK_K: tl.constexpr, K_BLOCKS: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr,
    PRODUCT_SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = sum over choices of weight * (product[choice] @ fc2.T), four columns a program; an expert a warp."""
    choice = tl.arange(0, CHOICES)
    chosen = choice < K_CHOICES
    within = tl.arange(0, K_BLOCKS)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    first = tl.program_id(0) * 4
    # The up kernel lets this one start once the routing is complete: all but its own product may be read.
    row = tl.load(experts + choice, mask=chosen, other=0).to(tl.int64) * DIM + first
    at = fc2 + row[None, :, None] * INNER + within
    keep = chosen[None, :, None] & (within < INNER)
    w0 = _streamed(at, keep, EVEN)
    w1 = _streamed(at + INNER, keep & (first + 1 < DIM), EVEN)
    w2 = _streamed(at + 2 * INNER, keep & (first + 2 < DIM), EVEN)
    w3 = _streamed(at + 3 * INNER, keep & (first + 3 < DIM), EVEN)
    factor = tl.load(weights + choice, mask=chosen, other=0.0) * (1.0 / PRODUCT_SCALE)
    # As tl.join lays out four vectors: the last dimension is the outer join's.
    four = tl.arange(0, 2)[:, None] + 2 * tl.arange(0, 2)[None, :]
    known = first + four < DIM
    factors = tl.full([CHOICES, 2, 2], 1.0, tl.float32) * factor[:, None, None]
    if SCALED:
        factors *= tl.load(
            scale + row[:, None, None] + four[None, :, :],
            mask=chosen[:, None, None] & known[None, :, :],
            other=0.0,
        )
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(product + choice[None, :, None] * INNER + within, mask=keep, other=0.0)
    sums = tl.join(
        tl.join(_row_sums(w0, x), _row_sums(w1, x)), tl.join(_row_sums(w2, x), _row_sums(w3, x))
    )
    total = tl.sum(sums * factors, axis=0)
    tl.store(out + first + four, total.to(out.dtype.element_ty), mask=known)
