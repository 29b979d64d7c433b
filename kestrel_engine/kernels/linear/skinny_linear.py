"""Linear layers of few rows (M <= 128 in a decode step). They are bound by reading the weight once.

There are two kernels (`skinny_kernels`): one multiplies on tensor cores, the other one a single row by multiply-adds.
`skinny_tiling` divides the weight among their programs.

Numerics: sums are accumulated in float32. A row's result does not depend on the other rows. The number of splits
depends on N and K only, and ``dot_kernel`` adds along K in the same order for every tile, so a row's result does not
depend on the number of rows either. There are two exceptions: `tiling_of` may give a single row to ``row_kernel``, and
it may give tiles of different depth to different numbers of rows, if K / splits is not a multiple of both depths.

A weight in FP8 has a scale for each of its rows. Its values are widened to the dtype of x, which represents them
exactly, and each sum is scaled at the end. A weight in 4 bits is widened in its tiles (int4.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..adapters.slabs import MOST_SLABS, RANKS, RowSlabs
from .int4 import group_of, int4_row_kernel
from .skinny_kernels import dot_kernel, row_kernel
from .skinny_tiling import MAX_ROWS, Tiling, splits_of, tiling_of, tiling_of_groups, tiling_of_row

ADAPTERS_AT_ONCE = 8
"""The slabs of adapters that a tile multiplies at once. 16 rows with 8 adapters of rank 16 have so many."""
HELD_ROWS = 16
"""The most rows for which a tile loads these slabs before it waits, into 64 kB of shared memory. With more rows, and on
cards without ``pdl``, there is not as much. On a CPU, tests load them so, too."""


@dataclass(frozen=True, slots=True)
class ColumnChange:
    """The change of some columns: B [columns, 16], at ``b_at`` in the slabs of ``rows``, times ``shrunk`` [M, ranks]
    float32, the products of the input with A."""

    rows: RowSlabs
    b_at: int
    shrunk: Tensor


@dataclass(frozen=True, slots=True)
class GemmChanges:
    """The changes of a GEMM by adapters: ``first`` of the columns below ``begin``, ``hidden`` of those from ``begin``
    on, before GELU. None if they are not changed.

    The columns from ``begin`` on may be the hidden layer of an MLP. ``parts`` [`adapter_parts`, M, ranks] float32 is
    for the products of the hidden layer with the next A [16, N - begin] at ``a_at``, as partial sums.
    """

    begin: int
    first: ColumnChange | None
    hidden: ColumnChange | None = None
    a_at: int = 0
    parts: Tensor | None = None


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    scales: Tensor | None = None,
    gelu_from: int | None = None,
    tau: tuple[Tensor, Tensor] | None = None,
    adapted: GemmChanges | None = None,
    pdl: bool = False,
    tiling: Tiling | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Returns ``x @ weight.T + bias`` [M, N] in x's dtype. Columns from ``gelu_from`` on get the tanh GELU, in float32.

    ``x``: [M, K], M <= 128. ``weight``: [N, K]. Both have the same dtype (bfloat16, float16 or float32) and any row
    stride. With ``scales`` [1, N] float32, the weight is float8_e4m3fn instead, divided by the scales of its rows, and
    x is not float32. With ``scales`` [N, K / g, 2], the weight is uint8 [N, K / 2] (int4.py). ``bias``: [N] or None.
    ``pdl``: launch as a programmatic dependent (sm_90), which does not change results. ``tiling``: for benchmarks, a
    tiling to use instead of the one from the table.

    ``tau``: weights [C, K'], and a buffer [`content_parts`, M, C] float32 for partial sums of ``gelu(out[:, :K']) @
    weights.T`` with the exact GELU, rounded to the dtype of these weights (see `tau_content`). Each program multiplies
    its own columns.
    ``adapted``: the changes by adapters; None if no row has one.

    Raises ValueError for more than 128 rows.
    """
    out = x.new_empty((x.shape[0], weight.shape[0])) if out is None else out
    _launch(x, weight, bias, scales, gelu_from, out.unsqueeze(0), pdl, tiling, tau, adapted)
    return out


def skinny_partials(
    x: Tensor,
    weight: Tensor,
    *,
    splits: int | None = None,
    scales: Tensor | None = None,
    pdl: bool = False,
    tiling: Tiling | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Returns ``x @ weight.T`` as partial sums [S, M, N] float32 over S parts of K, which `add_layer_norm` adds.

    ``splits``: S; None for `splits_of` the weight. ``out``: [S, M, N], whose S replaces ``splits``. The
    other arguments are those of `skinny_linear`.
    """
    if out is None:
        splits = splits_of(weight) if splits is None else splits
        shape = (splits, x.shape[0], weight.shape[0])
        out = torch.empty(shape, dtype=torch.float32, device=x.device)
    _launch(x, weight, None, scales, None, out, pdl, tiling)
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    gelu_from: int | None,
    out: Tensor,
    pdl: bool,
    tiling: Tiling | None,
    tau: tuple[Tensor, Tensor] | None = None,
    adapted: GemmChanges | None = None,
) -> None:
    """Launches the kernel that ``tiling`` selects. ``out``: [S, M, N]."""
    (rows, k), n, splits = x.shape, weight.shape[0], out.shape[0]
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows; this kernel is for {MAX_ROWS} at most")
    if not rows:
        return
    group = 0 if scales is None or scales.dim() == 2 else group_of(weight, scales)
    if group:
        assert scales is not None and scales.shape[:2] == (n, k // group), scales
        t = tiling_of_groups(rows, group)
    else:
        t = tiling or tiling_of(rows, n, k, splits, weight.element_size())
        assert (weight.dtype == x.dtype) if scales is None else scales.shape == (1, n), scales
    pdl = pdl and x.is_cuda
    depth = 2 * group or t.block_k
    k_per_split = triton.cdiv(triton.cdiv(k, splits), depth) * depth
    even_k = k % splits == 0 and k // splits == k_per_split
    grid = (triton.cdiv(n, t.block_n), splits)
    options: dict[str, Any] = {
        "HAS_BIAS": bias is not None,
        "HAS_GELU": gelu_from is not None,
        "EVEN_N": n % t.block_n == 0,
        "BLOCK_N": t.block_n,
        "BLOCK_K": t.block_k,
        "PDL": pdl,
        "num_warps": t.warps,
    }
    if pdl:
        options["launch_pdl"] = True
    gelu_from = n if gelu_from is None else gelu_from
    # Without a bias, the kernel still needs a pointer.
    given_bias = out if bias is None else bias
    if t.one_row:
        assert tau is None and adapted is None and scales is None, "not of one row by multiply-adds"
        row_kernel[grid](
            x, weight, given_bias, out, n, k, k_per_split, weight.stride(0), out.stride(0),
            gelu_from, EVEN_K=even_k, ONE_TILE=k_per_split == t.block_k, **options,
        )  # fmt: skip
        return
    if rows == 1 and group and scales is not None and tau is None and adapted is None:
        if _takes_words(x, weight):
            _launch_int4_row(x, weight, given_bias, scales, out, k_per_split, gelu_from, options)
            return
    boxes = t.boxes and even_k and not group and _is_aligned(weight)
    tau_weights, content = (out, out) if tau is None else tau
    columns, tau_k = (0, 0) if tau is None else tau_weights.shape
    if tau is not None:
        assert splits == 1 and tau_k <= n and tau_weights.is_contiguous()
        assert content.shape == (triton.cdiv(tau_k, t.block_n), rows, columns), content.shape
        assert content.is_contiguous()
    changes = adapted or _UNCHANGED
    on_device, places = _change_arguments(changes, x, out)
    parts = changes.parts
    if parts is not None:
        shape = triton.cdiv(n, t.block_n) - changes.begin // t.block_n, rows, RANKS * MOST_SLABS
        assert splits == 1 and parts.shape == shape and parts[0].is_contiguous(), parts.shape
    dot_kernel[grid](
        x, weight, _boxes(weight, t) if boxes else weight, given_bias, out if scales is None else scales, out,
        tau_weights, content,
        *on_device, rows, n, k, k_per_split, x.stride(0), weight.stride(0), out.stride(1), out.stride(0),
        gelu_from, _prefetchable(weight, t, k_per_split) if pdl and even_k and not group else 0, columns, tau_k,
        changes.begin, *places, changes.a_at, 0 if parts is None else parts.stride(0),
        0 if scales is None else scales.stride(0),
        EVEN_K=even_k,
        BLOCK_M=max(triton.next_power_of_2(rows), 16),
        STAGES=t.stages,
        SCALED=scales is not None and not group,
        GROUP=group,
        PTX=x.is_cuda,
        TILE_BYTES=t.block_k * weight.element_size(),
        BOXES=boxes,
        TAU_PAD=0 if tau is None else max(16, triton.next_power_of_2(columns)),
        FIRST=0 if changes.first is None else ADAPTERS_AT_ONCE,
        HIDDEN=0 if changes.hidden is None else ADAPTERS_AT_ONCE,
        HELD=int(changes.hidden is not None and rows <= HELD_ROWS and (pdl or not x.is_cuda)),
        **options,
    )  # fmt: skip


def _takes_words(x: Tensor, weight: Tensor) -> bool:
    """Returns whether `int4_row_kernel` takes one row: values of two bytes, and addresses that are aligned for it."""
    aligned = weight.data_ptr() % 4 == 0 and weight.stride(0) % 4 == 0 and x.data_ptr() % 8 == 0
    return aligned and x.element_size() == 2


def _launch_int4_row(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    scales: Tensor,
    out: Tensor,
    k_per_split: int,
    gelu_from: int,
    options: dict[str, Any],
) -> None:
    n, group = len(weight), group_of(weight, scales)
    t = tiling_of_row(k_per_split // (2 * group))
    given = {
        name: options[name]
        for name in ("HAS_BIAS", "HAS_GELU", "PDL", "launch_pdl")
        if name in options
    }
    int4_row_kernel[(triton.cdiv(n, t.block_n), len(out))](
        x.view(torch.int64), weight.view(torch.int32), bias, scales, out, n, k_per_split, x.shape[1],
        weight.stride(0) // 4, scales.stride(0), out.stride(0), gelu_from,
        X_DTYPE=getattr(tl, str(x.dtype).removeprefix("torch.")), GROUP=group, PAIRS=t.pairs,
        BLOCK_N=t.block_n, PTX=x.is_cuda, num_warps=t.warps, **given,
    )  # fmt: skip


_UNCHANGED = GemmChanges(0, None)


def _change_arguments(
    changes: GemmChanges, x: Tensor, unused: Tensor
) -> tuple[list[Tensor], list[int]]:
    """Returns the kernel's pointers and the places in slabs. ``unused``: a pointer that the kernel does not read."""
    parts = [each for each in (changes.first, changes.hidden) if each is not None]
    shared = [parts[0].rows.anchor, parts[0].rows.slabs] if parts else [unused] * 2
    pointers, places = list[Tensor](), list[int]()
    for each in (changes.first, changes.hidden):
        if each is None:
            pointers += [unused] * 3
            places.append(0)
            continue
        own = each.rows
        assert own.anchor is shared[0] and own.slabs is shared[1] and own.anchor.dtype == x.dtype
        assert len(own.first) == len(own.count) == len(x) and each.shrunk.is_contiguous()
        pointers += [own.first, own.count, each.shrunk]
        places.append(each.b_at)
    return [*shared, *pointers, unused if changes.parts is None else changes.parts], places


def _is_aligned(weight: Tensor) -> bool:
    """Returns whether every row is aligned to 16 bytes, which bulk loads require."""
    return weight.data_ptr() % 16 == 0 and weight.stride(0) * weight.element_size() % 16 == 0


def _boxes(weight: Tensor, t: Tiling) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(weight, [t.block_n, t.block_k])


def _prefetchable(weight: Tensor, t: Tiling, k_per_split: int) -> int:
    """Returns the tiles to prefetch; 0 if a row is not aligned, or if the last program's rows exceed the weight."""
    whole = weight.shape[0] % t.block_n == 0
    return min(t.prefetch, k_per_split // t.block_k) if whole and _is_aligned(weight) else 0
