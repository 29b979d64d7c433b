"""The changes of experts by adapters: the products with A, and what the kernels of experts do with them.

A slab of experts holds EXPERT_RANKS ranks of every expert: A [experts, ranks, in] and B [experts, ranks, out] of each
layer. A pair is a token and one of its experts. The kernels of experts add B times the products of their pairs with A,
before GeGLU and before the router's weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .slabs import MOST_SLABS, RowSlabs

EXPERT_RANKS = 2
"""The ranks of a slab. Moondream's fine-tunes of rank 16 have 2 for each expert."""
WIDTH = EXPERT_RANKS * MOST_SLABS
"""The most ranks of an expert's change."""

_RANKS = tl.constexpr(EXPERT_RANKS)
_WIDTH = tl.constexpr(WIDTH)


class ExpertChange(NamedTuple):
    """What a kernel reads of the change of fc1 or of fc2: the slabs of the tokens (`RowSlabs`), ``shrunk`` [pairs,
    WIDTH] float32, the products of the pairs with A, and the offset of B in a slab."""

    anchor: Tensor
    slabs: Tensor
    first: Tensor
    num_slabs: Tensor
    shrunk: Tensor
    b_at: int


@dataclass(frozen=True, slots=True)
class ExpertChanges:
    """The changes of one layer's experts, for tokens with the slabs ``rows``: the offsets of A and B of fc1 and fc2."""

    rows: RowSlabs
    fc1_a: int
    fc1_b: int
    fc2_a: int
    fc2_b: int

    def of_fc1(self, u: Tensor, experts: Tensor, *, pdl: bool = False) -> ExpertChange:
        """``u``: [T, dim], the inputs of tokens. ``experts``, ``pdl``: as of `shrink_experts`."""
        shrunk = shrink_experts(u, experts, self.rows, self.fc1_a, of_tokens=True, pdl=pdl)
        return self._of(shrunk, self.fc1_b)

    def of_fc2(
        self, product: Tensor, experts: Tensor, *, order: Tensor | None = None, pdl: bool = False
    ) -> ExpertChange:
        """``product``: [pairs, inner]. The others are those of `shrink_experts`."""
        shrunk = shrink_experts(
            product, experts, self.rows, self.fc2_a, of_tokens=False, order=order, pdl=pdl
        )
        return self._of(shrunk, self.fc2_b)

    def _of(self, shrunk: Tensor, b_at: int) -> ExpertChange:
        rows = self.rows
        return ExpertChange(rows.anchor, rows.slabs, rows.first, rows.count, shrunk, b_at)


@triton.jit
def _shrink_kernel(
    x, order, experts, out, anchor, slabs, slab_first, slab_count, x_stride, inputs, a_at,
    K_CHOICES: tl.constexpr, OF_TOKENS: tl.constexpr, ORDERED: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    pair = place
    if ORDERED:
        pair = tl.load(order + place)
    token = pair // K_CHOICES
    count = tl.load(slab_count + token)
    if count > 0:
        first = tl.load(slab_first + token)
        expert = tl.load(experts + pair).to(tl.int64)
        row = place
        if OF_TOKENS:
            row = token
        column = tl.arange(0, BLOCK)
        inside = column < inputs
        rank = tl.arange(0, _RANKS)
        v = tl.load(x + row.to(tl.int64) * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        for i in range(count):
            at = anchor + tl.load(slabs + first + i) * 16 + a_at + expert * (_RANKS * inputs)
            a = tl.load(
                at + rank[:, None] * inputs + column[None, :], mask=inside[None, :], other=0.0
            )
            s = tl.sum(a.to(tl.float32) * v[None, :], 1)
            tl.store(out + place.to(tl.int64) * _WIDTH + i * _RANKS + rank, s)


@triton.jit
def add_expert_change(acc, change, expert, token, valid, at, column, inside, outputs):
    """Adds the `ExpertChange` of one expert to ``acc`` [M, N] float32. ``token``, ``valid``, ``at``: [M], the token of
    each row, whether it exists, and its row in ``shrunk``. ``column``, ``inside``: [N], columns of the ``outputs``."""
    first = tl.load(change.first + token, mask=valid, other=0)
    count = tl.load(change.num_slabs + token, mask=valid, other=0)
    # The first bytes of B of this expert, relative to a slab.
    of_expert = change.b_at + expert.to(tl.int64) * (_RANKS * outputs)
    for i in range(tl.max(count, 0)):
        has = i < count
        base = change.anchor + tl.load(change.slabs + first + i, mask=has, other=0) * 16
        for rank in tl.static_range(_RANKS):
            of_rank = change.shrunk + at.to(tl.int64) * _WIDTH + i * _RANKS + rank
            s = tl.load(of_rank, mask=has, other=0.0)
            b = tl.load(
                base[:, None] + of_expert + rank * outputs + column[None, :],
                mask=has[:, None] & inside[None, :],
                other=0.0,
            )
            acc += b.to(tl.float32) * s.to(b.dtype).to(tl.float32)[:, None]
    return acc


def shrink_experts(
    x: Tensor,
    experts: Tensor,
    rows: RowSlabs,
    a_at: int,
    *,
    of_tokens: bool,
    order: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Returns the products [pairs, WIDTH] float32 of the inputs of pairs with the A at ``a_at``. Elements beyond a
    pair's ranks are not written.

    ``x``: with ``of_tokens`` [T, K], the inputs of tokens; otherwise [pairs, K]. ``experts``: [T, k] int32. ``order``:
    [pairs] int32, the pair of each row of ``x`` and of the result; None if in order. ``pdl``: launch as a programmatic
    dependent (sm_90).
    """
    inputs, (num_tokens, k) = x.shape[1], experts.shape
    out = torch.empty((num_tokens * k, WIDTH), dtype=torch.float32, device=x.device)
    assert x.stride(1) == 1 and len(rows.first) == len(rows.count) == num_tokens
    pdl = pdl and x.is_cuda
    launch: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    block = triton.next_power_of_2(inputs)
    if num_tokens:
        _shrink_kernel[(num_tokens * k,)](
            x, experts if order is None else order, experts, out, rows.anchor, rows.slabs, rows.first,
            rows.count, x.stride(0), inputs, a_at, K_CHOICES=k, OF_TOKENS=of_tokens,
            ORDERED=order is not None, BLOCK=block, PDL=pdl, num_warps=min(max(block // 256, 1), 8),
            **launch,
        )  # fmt: skip
    return out
