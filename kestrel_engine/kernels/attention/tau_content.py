"""The content of tau attention, ``gelu(qkv) @ weights.T`` with the exact GELU, in one launch (moondream.md section 6).

There are few output columns, so programs divide the sum over a row. The program of a tile that finishes last adds the
partial sums in order, so the result is deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 264
"""The most programs of a launch that divides rows: two for each multiprocessor of an H200."""
_MAX_SPLITS = 32
_MAX_ROWS = 64


@dataclass(frozen=True, slots=True)
class TauTiling:
    rows: int
    block_k: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class TauWorkspace:
    """Partial sums, for one launch at a time. ``sums``: [entries] float32. ``arrived``: [tiles] int32, left at 0."""

    sums: Tensor
    arrived: Tensor

    @classmethod
    def allocate(cls, columns: int, device: torch.device) -> TauWorkspace:
        """Allocates a workspace for ``columns`` of output and any number of tokens."""
        # The more tokens, the fewer divisions: a launch that divides rows has at most _PROGRAMS programs.
        entries = _PROGRAMS * _MAX_ROWS * columns
        return cls(
            torch.empty(entries, dtype=torch.float32, device=device),
            torch.zeros(_PROGRAMS, dtype=torch.int32, device=device),
        )


def _config(tokens: int, element_bytes: int) -> TauTiling:
    """Returns the tiling. In bfloat16 on an H200, it takes 8 us for 1 token and 32 us for 2,250 tokens."""
    if element_bytes == 4:
        return TauTiling(16 if tokens <= 64 else 32, 32, 4, 2)
    return TauTiling(16, 64, 8, 4) if tokens <= 64 else TauTiling(_MAX_ROWS, 128, 4, 3)


def tau_content(
    qkv: Tensor, weights: Tensor, workspace: TauWorkspace, *, out: Tensor | None = None
) -> Tensor:
    """Returns the content [T, C] float32 of ``qkv`` [T, >= K] before RoPE, which may have any row stride. ``weights``:
    [C, K]. The GELU is rounded to the weights' dtype, and the sum is float32."""
    tokens, (columns, k) = qkv.shape[0], weights.shape
    assert qkv.stride(1) == 1 and qkv.shape[1] >= k and weights.is_contiguous()
    if out is None:
        out = torch.empty(tokens, columns, dtype=torch.float32, device=qkv.device)
    assert out.shape == (tokens, columns) and out.is_contiguous(), (out.shape, out.stride())
    if not tokens:
        return out
    tiling = _config(tokens, weights.element_size())
    tiles = triton.cdiv(tokens, tiling.rows)
    blocks = triton.cdiv(k, tiling.block_k)
    wanted = max(1, min(_PROGRAMS // tiles, _MAX_SPLITS, blocks))
    per_split = triton.cdiv(blocks, wanted) * tiling.block_k
    splits = triton.cdiv(k, per_split)
    assert splits == 1 or tiles * splits * tiling.rows * columns <= len(workspace.sums)
    _tau_content[(tiles, splits)](
        qkv,
        weights,
        out,
        workspace.sums,
        workspace.arrived,
        tokens,
        columns,
        k,
        per_split,
        splits,
        qkv.stride(0),
        ROWS=tiling.rows,
        COLUMNS=max(16, triton.next_power_of_2(columns)),
        BLOCK_K=tiling.block_k,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return out


@triton.jit(do_not_specialize=["tokens", "splits"])
def _tau_content(
    qkv, weights, out, sums, arrived, tokens, columns, k, per_split, splits, stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tile * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    there = (row < tokens)[:, None]
    wanted = (column < columns)[None, :]
    begin = split * per_split
    end = tl.minimum(begin + per_split, k)
    at = begin + tl.arange(0, BLOCK_K)
    x = qkv + row.to(tl.int64)[:, None] * stride
    w = weights + column[None, :] * k
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, end - begin, BLOCK_K):
        inside = at + first < end
        v = tl.load(x + (at + first)[None, :], mask=there & inside[None, :], other=0.0)
        v = v.to(tl.float32)
        v = 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
        b = tl.load(w + (at + first)[:, None], mask=inside[:, None] & wanted, other=0.0)
        acc = tl.dot(v.to(weights.dtype.element_ty), b, acc, input_precision="ieee")
    target = out + row.to(tl.int64)[:, None] * columns + column[None, :]
    if splits == 1:
        tl.store(target, acc, mask=there & wanted)
    else:
        part = tl.arange(0, ROWS)[:, None] * columns + column[None, :]
        base = sums + tile * splits * ROWS * columns
        tl.store(base + split * ROWS * columns + part, acc, mask=there & wanted)
        # All threads have written their partial sums before one of them increments the counter.
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == splits - 1:
            tl.store(arrived + tile, 0)
            total = tl.zeros([ROWS, COLUMNS], tl.float32)
            for other in range(splits):
                # Bypass the L1 cache, which may be stale.
                total += tl.load(
                    base + other * ROWS * columns + part,
                    mask=there & wanted,
                    other=0.0,
                    cache_modifier=".cg",
                )
            tl.store(target, total, mask=there & wanted)
