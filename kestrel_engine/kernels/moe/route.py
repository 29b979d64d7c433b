"""Routing of a mixture of experts: chooses each token's experts and their weights, and groups the pairs by expert.

A pair is a token with one of its experts: pair = token * k + choice. All results stay on the device, and grids depend
on shapes only, so a captured graph works for every routing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..e4m3 import as_bytes
from ..linear.fp8_rows import Fp8Rows

_CHUNK = 256


@dataclass(frozen=True, slots=True)
class Grouping:
    """Pairs in the order of their experts, divided into tiles of at most ``tile`` pairs of one expert.

    ``order``: [pairs] int32, the pair at each place of the order. ``tiles``: [3, num_tiles] int32, the expert of a tile
    (-1 for an unused tile), its first place, and the end of its expert's places (a tile may end earlier). ``used``: [1]
    int32, the number of used tiles.
    """

    order: Tensor
    tiles: Tensor
    used: Tensor
    tile: int

    @property
    def num_tiles(self) -> int:
        return self.tiles.shape[1]


def route(
    logits: Tensor, k: int, *, pdl: bool = False, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the weights [T, k] float32 and the experts [T, k] int32 of the k largest of ``logits`` [T, E].

    The largest is first, and ties go to the lower expert. The weights are a softmax over the chosen logits. NaN counts
    as the largest value and makes the weights NaN. ``pdl``: launch as a programmatic dependent (sm_90), which does not
    change results.

    Raises ValueError if k exceeds the number of experts.
    """
    num_tokens, num_experts = logits.shape
    if not 1 <= k <= num_experts:
        raise ValueError(f"{k} of {num_experts} experts")
    if out is None:
        weights = torch.empty((num_tokens, k), dtype=torch.float32, device=logits.device)
        experts = torch.empty((num_tokens, k), dtype=torch.int32, device=logits.device)
    else:
        weights, experts = out
    pdl = pdl and logits.is_cuda
    launch = {"launch_pdl": True} if pdl else {}
    if num_tokens:
        _rank_kernel[(num_tokens,)](
            logits,
            weights,
            experts,
            logits.stride(0),
            NUM_EXPERTS=num_experts,
            K=k,
            EXPERTS_PAD=triton.next_power_of_2(num_experts),
            PDL=pdl,
            num_warps=2,
            **launch,
        )
    return weights, experts


def group_by_expert(experts: Tensor, num_experts: int, tile: int) -> Grouping:
    """Groups the pairs of ``experts`` [T, k] int32. Pairs of an expert keep their order, so results are
    deterministic."""
    num_pairs = experts.numel()
    device = experts.device
    num_chunks = triton.cdiv(num_pairs, _CHUNK)
    num_tiles = num_pairs // tile + min(num_experts, num_pairs)
    counts = torch.empty((num_chunks, num_experts), dtype=torch.int32, device=device)
    order = torch.empty(num_pairs, dtype=torch.int32, device=device)
    tiles = torch.empty((3, num_tiles), dtype=torch.int32, device=device)
    used = torch.empty(1, dtype=torch.int32, device=device)
    experts_pad = triton.next_power_of_2(num_experts)
    _count_kernel[(num_chunks,)](
        experts,
        counts,
        num_pairs,
        NUM_EXPERTS=num_experts,
        EXPERTS_PAD=experts_pad,
        CHUNK=_CHUNK,
        num_warps=8,
    )
    _place_kernel[(num_chunks,)](
        experts,
        counts,
        order,
        tiles,
        used,
        num_pairs,
        num_chunks,
        num_tiles,
        NUM_EXPERTS=num_experts,
        EXPERTS_PAD=experts_pad,
        CHUNK=_CHUNK,
        TILE=tile,
        num_warps=8,
    )
    return Grouping(order, tiles, used, tile)


@triton.jit
def rank_token(
    logits, expert, valid, weights_ptr, experts_ptr, K: tl.constexpr, EXPERTS_PAD: tl.constexpr
):
    """Stores the K weights and experts of one token's ``logits`` [EXPERTS_PAD] float32.

    Each expert counts the experts before it, all in parallel. Finding the experts one by one would take K rounds.
    """
    logits = tl.where(logits == 0.0, 0.0, logits)  # -0.0 ties with 0.0
    # Integers in the order of the logits, with ties to the lower expert. The bits of a float are monotonic after those
    # of negative numbers are flipped.
    bits = logits.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (bits.to(tl.int64) << 32) | (EXPERTS_PAD - 1 - expert).to(tl.int64)
    key = tl.where(valid, key, -0x7FFFFFFFFFFFFFFF)
    rank = tl.sum((key[None, :] > key[:, None]).to(tl.int32), axis=1)
    chosen = valid & (rank < K)
    values = tl.where(chosen, logits, float("-inf"))
    exponentials = tl.exp(values - tl.max(values, axis=0))
    weights = exponentials / tl.sum(exponentials, axis=0)
    tl.store(weights_ptr + rank, weights, mask=chosen)
    tl.store(experts_ptr + rank, expert, mask=chosen)


@triton.jit
def _rank_kernel(
    logits_ptr, weights_ptr, experts_ptr, stride,
    NUM_EXPERTS: tl.constexpr, K: tl.constexpr, EXPERTS_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Routes one token in each program."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS_PAD)
    valid = expert < NUM_EXPERTS
    logits = tl.load(logits_ptr + token * stride + expert, mask=valid, other=0.0).to(tl.float32)
    rank_token(
        logits, expert, valid, weights_ptr + token * K, experts_ptr + token * K, K, EXPERTS_PAD
    )


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(
    experts_ptr, counts_ptr, num_pairs,
    NUM_EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Counts the pairs of each expert in one chunk of pairs."""
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.arange(0, EXPERTS_PAD)
    of_pair = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1)
    counts = tl.sum((of_pair[:, None] == expert[None, :]).to(tl.int32), axis=0)
    tl.store(counts_ptr + chunk * NUM_EXPERTS + expert, counts, mask=expert < NUM_EXPERTS)


# Sizes are not specialised, so a multiple of 16 does not compile another kernel.
@triton.jit(do_not_specialize=["num_pairs", "num_chunks", "num_tiles"])
def _place_kernel(
    experts_ptr, counts_ptr, order_ptr, tiles_ptr, used_ptr, num_pairs, num_chunks, num_tiles,
    NUM_EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Places one chunk's pairs after the pairs of lower experts and of the same expert in earlier chunks. Program 0
    also divides the experts into tiles."""
    chunk = tl.program_id(0)
    expert = tl.arange(0, EXPERTS_PAD)
    total = tl.zeros([EXPERTS_PAD], tl.int32)
    before = tl.zeros([EXPERTS_PAD], tl.int32)
    for first in range(0, num_chunks, 32):
        other = first + tl.arange(0, 32)
        counts = tl.load(
            counts_ptr + other[:, None] * NUM_EXPERTS + expert[None, :],
            mask=(other < num_chunks)[:, None] & (expert < NUM_EXPERTS)[None, :],
            other=0,
        )
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where((other < chunk)[:, None], counts, 0), axis=0)
    begin = tl.cumsum(total, axis=0) - total

    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    of_pair = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1)
    belongs = of_pair[:, None] == expert[None, :]
    rank = tl.cumsum(belongs.to(tl.int32), axis=0) - 1
    place = tl.sum(tl.where(belongs, (begin + before)[None, :] + rank, 0), axis=1)
    tl.store(order_ptr + place, pair, mask=pair < num_pairs)

    if chunk == 0:
        tiles = (total + TILE - 1) // TILE
        tl.store(used_ptr, tl.sum(tiles, axis=0))
        last = tl.cumsum(tiles, axis=0)
        for first in range(0, num_tiles, 32):
            tile = first + tl.arange(0, 32)
            of_tile = tl.sum((last[None, :] <= tile[:, None]).to(tl.int32), axis=1)
            mine = of_tile[:, None] == expert[None, :]
            first_tile = tl.sum(tl.where(mine, (last - tiles)[None, :], 0), axis=1)
            first_place = tl.sum(tl.where(mine, begin[None, :], 0), axis=1)
            count = tl.sum(tl.where(mine, total[None, :], 0), axis=1)
            stored = tile < num_tiles
            of_tile = tl.where(of_tile < EXPERTS_PAD, of_tile, -1)
            tl.store(tiles_ptr + tile, of_tile, mask=stored)
            at = first_place + (tile - first_tile) * TILE
            tl.store(tiles_ptr + num_tiles + tile, at, mask=stored)
            tl.store(tiles_ptr + 2 * num_tiles + tile, first_place + count, mask=stored)


def sorted_rows(x: Tensor, out: Tensor, order: Tensor, k: int, *, kernel_order: bool) -> None:
    """Writes the rows ``order // k`` of ``x`` [T, D] to ``out`` [P, D], in out's dtype.

    ``order``: [P] int32 (see `route.Grouping`). ``kernel_order``: reorder every 64 inputs as `hopper.in_kernel_order`
    does.
    """
    dim = out.shape[1]
    assert not kernel_order or dim % 64 == 0, dim
    _launch(x, out, None, None, order, k, kernel_order)


def sorted_fp8_rows(x: Fp8Rows, memory: Tensor, order: Tensor, k: int) -> Fp8Rows:
    """Returns the rows ``order // k`` of ``x`` [T, D] as [P, D], stored in ``memory`` (at least P * D bytes,
    contiguous)."""
    num_rows, dim = len(order), x.values.shape[1]
    values = memory.view(torch.float8_e4m3fn).flatten()[: num_rows * dim].view(num_rows, dim)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=values.device)
    _launch(as_bytes(x.values), as_bytes(values), x.scales, scales, order, k, False)
    return Fp8Rows(values, scales)


def _launch(
    x: Tensor,
    out: Tensor,
    scales: Tensor | None,
    out_scales: Tensor | None,
    order: Tensor,
    k: int,
    kernel_order: bool,
) -> None:
    num_rows, dim = out.shape
    assert out.is_contiguous() and x.stride(1) == 1 and x.shape[1] == dim, (x.shape, out.shape)
    assert len(order) == num_rows, (len(order), num_rows)
    if num_rows:
        _sort_kernel[(num_rows,)](
            x,
            out,
            scales,
            out_scales,
            order,
            x.stride(0),
            DIM=dim,
            K_CHOICES=k,
            KERNEL_ORDER=kernel_order,
            BLOCK=triton.next_power_of_2(dim),
            num_warps=4,
        )


@triton.jit
def _sort_kernel(
    x_ptr, out_ptr, scales_ptr, out_scales_ptr, order_ptr, stride,
    DIM: tl.constexpr, K_CHOICES: tl.constexpr, KERNEL_ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    token = (tl.load(order_ptr + place) // K_CHOICES).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < DIM
    source = column
    if KERNEL_ORDER:
        # Reorders 64 inputs from (quad, chunk, half, one of two) to (chunk, half, quad, one of two).
        chunk, half, quad = (column // 16) % 4, (column // 8) % 2, (column // 2) % 4
        source = (column // 64) * 64 + quad * 16 + chunk * 4 + half * 2 + column % 2
    x = tl.load(x_ptr + token * stride + source, mask=inside, other=0)
    tl.store(out_ptr + place * DIM + column, x.to(out_ptr.dtype.element_ty), mask=inside)
    if scales_ptr is not None:
        tl.store(out_scales_ptr + place, tl.load(scales_ptr + token))
