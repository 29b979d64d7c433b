"""The router for few tokens, in one launch: computes the logits and each token's experts from the LayerNorm's output.

It does not depend on attention, so experts can run concurrently with attention. A program computes the logits of a few
experts for one token. The program of a token that finishes last ranks all experts. Every sum has a fixed order, so
results are deterministic.

`add_norm_route` also computes the LayerNorm, once in each program. It is for so few tokens that this costs nothing: the
experts then begin without waiting for the kernel of the LayerNorm. Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layer_norm import EPS, normalised, part_arguments, row_warps, summed_stream
from .route import rank_token

MAX_TOKENS = 64
_ROWS = 4
"""The experts whose logits a program computes."""


class RouterWorkspace:
    """Buffers for one launch at a time. ``logits``: [tokens, experts] in the model's dtype; they remain readable after
    the launch. ``arrived``: [tokens] int32, which every launch leaves at zero."""

    def __init__(
        self, tokens: int, num_experts: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.logits = torch.empty(tokens, num_experts, dtype=dtype, device=device)
        self.arrived = torch.zeros(tokens, dtype=torch.int32, device=device)


def route_tokens(
    u: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    k: int,
    workspace: RouterWorkspace,
    *,
    out: tuple[Tensor, Tensor] | None = None,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Routes ``u`` [T, D] and returns weights [T, k] float32 and experts [T, k] int32, as `route.route` does.

    The logits are ``u @ weight.T + bias``, rounded to the dtype of ``workspace``, in prefill the model's. ``weight``:
    [E, D]. ``bias``: [E]. ``pdl``: launch as a programmatic dependent (sm_90), whose own dependents may start at once;
    this does not change results.

    Raises ValueError for more than 64 tokens.
    """
    tokens, (num_experts, dim) = u.shape[0], weight.shape
    if tokens > MAX_TOKENS:
        raise ValueError(f"{tokens} tokens; this router is for {MAX_TOKENS} at most")
    if not 1 <= k <= num_experts:
        raise ValueError(f"{k} of {num_experts} experts")
    if out is None:
        weights = torch.empty((tokens, k), dtype=torch.float32, device=u.device)
        experts = torch.empty((tokens, k), dtype=torch.int32, device=u.device)
    else:
        weights, experts = out
    if not tokens:
        return weights, experts
    assert weight.stride(1) == u.stride(1) == 1 and len(workspace.arrived) >= tokens
    pdl = pdl and u.is_cuda
    launch = {"launch_pdl": True} if pdl else {}
    block = triton.next_power_of_2(dim)
    _router[(triton.cdiv(num_experts, _ROWS), tokens)](
        u,
        weight,
        bias,
        workspace.logits,
        workspace.arrived,
        weights,
        experts,
        u.stride(0),
        weight.stride(0),
        DIM=dim,
        BLOCK=block,
        NUM_EXPERTS=num_experts,
        EXPERTS_PAD=triton.next_power_of_2(num_experts),
        K=k,
        ROWS=_ROWS,
        PDL=pdl,
        num_warps=row_warps(block),
        **launch,
    )
    return weights, experts


def add_norm_route(
    x: Tensor,
    parts: Sequence[Tensor],
    output_bias: Tensor | None,
    ln_weight: Tensor,
    ln_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    k: int,
    workspace: RouterWorkspace,
    *,
    u: Tensor,
    out: tuple[Tensor, Tensor],
) -> None:
    """Writes ``u``, the LayerNorm of ``x + output_bias + sum(parts)``, and ``out``, the experts of its rows.

    The first five arguments are those of `layer_norm.add_layer_norm`, but ``x`` is not changed. The others are those of
    `route_tokens`. ``u``: [T, D]. ``out``: weights [T, k] float32 and experts [T, k] int32. A programmatic dependent
    starts at the end: programs of the experts that wait would hold multiprocessors which the other stream needs.
    """
    (tokens, dim), num_experts = x.shape, weight.shape[0]
    summands, splits = part_arguments(parts)
    assert 0 < tokens <= len(workspace.arrived) and 1 <= k <= num_experts, (tokens, k)
    assert weight.stride(1) == x.stride(1) == u.stride(1) == 1
    block = triton.next_power_of_2(dim)
    _add_norm_route[(triton.cdiv(num_experts, _ROWS), tokens)](
        x,
        summands,
        output_bias,
        ln_weight,
        ln_bias,
        u,
        weight,
        bias,
        workspace.logits,
        workspace.arrived,
        *out,
        x.stride(0),
        u.stride(0),
        weight.stride(0),
        EPS,
        DIM=dim,
        BLOCK=block,
        NUM_EXPERTS=num_experts,
        EXPERTS_PAD=triton.next_power_of_2(num_experts),
        K=k,
        ROWS=_ROWS,
        SPLITS=splits,
        num_warps=row_warps(block),
    )


@triton.jit
def _router(
    u, weight, bias, logits, arrived, weights, experts, u_stride, w_stride,
    DIM: tl.constexpr, BLOCK: tl.constexpr, NUM_EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr,
    K: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1)
    mine = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < DIM
    known = mine < NUM_EXPERTS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # Load the weights before the wait, because no kernel writes them.
    w, bias_rows = _experts(weight, bias, mine, known, column, inside, w_stride, ROWS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    v = tl.load(u + token.to(tl.int64) * u_stride + column, mask=inside, other=0.0)
    _store_and_rank(
        w, v, bias_rows, token, mine, known, logits, arrived, weights, experts, NUM_EXPERTS, EXPERTS_PAD, K
    )  # fmt: skip


@triton.jit
def _add_norm_route(
    x, parts, output_bias, ln_weight, ln_bias, u, weight, bias, logits, arrived, weights, experts,
    x_stride, u_stride, w_stride, eps, DIM: tl.constexpr, BLOCK: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1)
    row = token.to(tl.int64)
    mine = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = cols < DIM
    known = mine < NUM_EXPERTS
    added = tl.zeros([BLOCK], tl.float32)
    if output_bias is not None:
        added = tl.load(output_bias + cols, mask=mask, other=0.0)
    stored = summed_stream(x, parts, added, row, cols, mask, x_stride, SPLITS)
    # These loads do not wait for the sums of the LayerNorm.
    gain = tl.load(ln_weight + cols, mask=mask, other=0.0).to(tl.float32)
    shift = tl.load(ln_bias + cols, mask=mask, other=0.0).to(tl.float32)
    w, bias_of_mine = _experts(weight, bias, mine, known, cols, mask, w_stride, ROWS)
    v = normalised(stored.to(tl.float32), mask, gain, shift, DIM, eps).to(u.dtype.element_ty)
    if tl.program_id(0) == 0:
        tl.store(u + row * u_stride + cols, v, mask=mask)
    v = tl.where(mask, v, 0.0)
    _store_and_rank(
        w, v, bias_of_mine, token, mine, known, logits, arrived, weights, experts, NUM_EXPERTS,
        EXPERTS_PAD, K,
    )  # fmt: skip


@triton.jit
def _experts(weight, bias, mine, known, cols, mask, w_stride, ROWS: tl.constexpr):
    """Returns the weights [ROWS, BLOCK] and biases [ROWS] float32 of a program's experts ``mine``."""
    w = tl.load(
        weight + mine[:, None] * w_stride + cols[None, :],
        mask=known[:, None] & mask[None, :],
        other=0.0,
    )
    bias_rows = tl.zeros([ROWS], tl.float32)
    if bias is not None:
        bias_rows = tl.load(bias + mine, mask=known, other=0.0).to(tl.float32)
    return w, bias_rows


@triton.jit
def _store_and_rank(
    w, v, bias_rows, token, mine, known, logits, arrived, weights, experts, NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Stores the logits ``w`` [ROWS, BLOCK] times ``v`` [BLOCK] plus ``bias_rows`` [ROWS]. The token's last program
    ranks all."""
    total = tl.sum(w.to(tl.float32) * v.to(tl.float32)[None, :], axis=1) + bias_rows
    tl.store(logits + token * NUM_EXPERTS + mine, total.to(logits.dtype.element_ty), mask=known)
    # All threads have written their logits before one of them increments the counter.
    tl.debug_barrier()
    if tl.atomic_add(arrived + token, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(arrived + token, 0)
        expert = tl.arange(0, EXPERTS_PAD)
        valid = expert < NUM_EXPERTS
        # Bypass the L1 cache, which may be stale.
        all_logits = tl.load(
            logits + token * NUM_EXPERTS + expert, mask=valid, other=0.0, cache_modifier=".cg"
        ).to(tl.float32)
        rank_token(
            all_logits, expert, valid, weights + token * K, experts + token * K, K, EXPERTS_PAD
        )
