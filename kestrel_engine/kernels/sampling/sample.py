"""Logits and encoded rules to ids and log-probabilities on the device, exactly as `runtime.sampler` defines them.

Every row is split into chunks, so that one row keeps many processors busy. Greedy takes two launches: each chunk's
best, then the best of them (logits.py). Drawing takes five: three find a few candidates (candidates.py),
one sorts them (draw.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .candidates import list_kernel, locate_kernel, refine_kernel
from .draw import draw_kernel
from .logits import RULE_WIDTH, best_kernel, stats_kernel


class Tiles(NamedTuple):
    """How the work is cut, in powers of two. None of it changes a result beyond the rounding of float64 sums."""

    chunk: int = 1024
    """Ids a program in all launches but the last."""
    edges: int = 8
    """Logits above which weights are summed."""
    fine: int = 32
    """Logits above which they are summed within each stretch, if there are more candidates than ``short``."""
    short: int = 512
    """Candidates that are sorted by counting, which is quicker, the fewer they are; not more than ``listed``."""
    listed: int = 2048
    """Candidates that are sorted at most; if there are more, the whole row is searched."""
    block: int = 512
    """Ids that meet the pivots at once in that search."""
    pivots: int = 8
    """Parts into which it cuts its interval at a time."""
    warps: int = 1
    """Of a program that sums above edges: with one, its two sums for every edge wait for nobody."""
    list_warps: int = 2
    """Of a program that lists candidates."""
    draw_warps: int = 8
    """Of the program that sorts a row's candidates."""

    @property
    def columns(self) -> int:
        """Room for a row's edges."""
        return int(triton.next_power_of_2(self.edges + 3 * self.fine))


class Workspace(NamedTuple):
    """What the launches hand to one another, for up to so many rows; nothing is kept between calls."""

    stats: Tensor
    """[rows, chunks, 3] float32: largest, sum of exp(logit - largest), smallest."""
    places: Tensor
    """[rows, chunks, 2] int32: id of the largest; how many are not finite."""
    edges: Tensor
    """[rows, columns] float32: logits, ``edges`` of the row and ``fine`` of each of its three stretches."""
    masses: Tensor
    """[rows, chunks, columns] float32: weight at or above each edge."""
    counts: Tensor
    """[rows, chunks, columns] float32: ids at or above each edge."""
    listed: Tensor
    """[rows, 3] int32: candidates; whether stretches were cut again; chunks that are through, 0 between launches."""
    bounds: Tensor
    """[rows, 8] float32: where top-k cuts, where top-p cuts and where the draw is, from (inclusive) and to; ids above
    the first; ids that count."""
    sums: Tensor
    """[rows, chunks, 4] float64: weight of all, and above each stretch."""
    candidates: Tensor
    """[rows, listed] int64: keys, in any order."""


def allocate(
    rows: int, vocab: int, device: torch.device | str, tiles: Tiles | None = None
) -> Workspace:
    """A workspace for ``sample_rows`` with up to ``rows`` rows of ``vocab`` logits."""
    tiles = tiles or Tiles()
    chunks = triton.cdiv(vocab, tiles.chunk)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=device)

    return Workspace(
        stats=empty(chunks, 3, dtype=torch.float32),
        places=empty(chunks, 2, dtype=torch.int32),
        edges=empty(tiles.columns, dtype=torch.float32),
        masses=empty(chunks, tiles.columns, dtype=torch.float32),
        counts=empty(chunks, tiles.columns, dtype=torch.float32),
        listed=torch.zeros(rows, 3, dtype=torch.int32, device=device),
        bounds=empty(8, dtype=torch.float32),
        sums=empty(chunks, 4, dtype=torch.float64),
        candidates=empty(tiles.listed, dtype=torch.int64),
    )


def sample_rows(
    logits: Tensor,
    rules: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    uniforms: Tensor,
    *,
    greedy: bool,
    ids: Tensor,
    logprobs: Tensor,
    bad: Tensor,
    workspace: Workspace | None = None,
    tiles: Tiles | None = None,
    pdl: bool = False,
) -> None:
    """Writes one id per row of ``logits`` [M, V] (float32, bfloat16 or float16; left as they are; row stride free).

    ``rules`` [M, RULE_WIDTH] int32 (logits.py). ``temperature`` (0: the best), ``top_p``, ``uniforms`` [M]
    float64 and ``top_k`` [M] int32 (0: all) are as in SamplingParams and ``step.uniform``. ``ids`` [M] int32;
    ``logprobs`` [M] float32, under the rule, before temperature and truncation, 0 if forced; ``bad`` [M] int32:
    whether a row that is not forced has a logit that is not finite, which makes its id meaningless (but one of the
    vocabulary). ``greedy``: no row has a temperature, which saves three launches. ``workspace``: from allocate() with
    the same tiles; made anew if None. ``pdl``: each launch may be set up while the one before it ends, also the first
    (sm_90). Doesn't wait for the device.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1, logits.stride()
    assert rules.shape == (rows, RULE_WIDTH) and rules.dtype == torch.int32, (rules.shape, rules)
    for column in (temperature, top_p, uniforms):
        assert column.dtype == torch.float64 and len(column) == rows, (column.dtype, len(column))
    for column in (rules, temperature, top_p, top_k, uniforms, ids, logprobs, bad):
        assert column.is_contiguous(), column.stride()
    if rows == 0:
        return
    tiles = tiles or Tiles()
    # A list longer than its room would be taken for a short one, and sorted over the next row's.
    assert tiles.short <= tiles.listed, tiles
    work = workspace or allocate(rows, vocab, logits.device, tiles)
    chunks = triton.cdiv(vocab, tiles.chunk)
    assert work.stats.shape[1] == chunks and len(work.stats) >= rows, work.stats.shape
    chunk_block = max(2, triton.next_power_of_2(chunks))
    row = (logits, logits.stride(0), rules, vocab)
    partial = (work.stats, work.places, chunks)
    early: dict[str, Any] = {"PDL": False}
    if pdl and logits.is_cuda:
        early = {"PDL": True, "launch_pdl": True}
    stats_kernel[(rows, chunks)](
        *row, *partial, CHUNK=tiles.chunk, WIDTH=RULE_WIDTH, num_warps=4, **early
    )
    if greedy:
        best_kernel[(rows,)](
            *row, *partial, ids, logprobs, bad,
            CHUNKS=chunk_block, WIDTH=RULE_WIDTH, num_warps=1, **early,
        )  # fmt: skip
        return
    drawing = (temperature, top_p, top_k, uniforms)
    located = (work.edges, work.masses, work.counts, work.bounds, work.listed)
    sizes: dict[str, Any] = {
        "CHUNKS": chunk_block, "EDGES": tiles.edges, "COLUMNS": tiles.columns, "WIDTH": RULE_WIDTH
    }  # fmt: skip
    by_chunk: dict[str, Any] = {"CHUNK": tiles.chunk, **sizes, **early}
    grid = (rows, chunks)
    locate_kernel[grid](
        *row, work.stats, chunks, *drawing, *located, tiles.short,
        FINE=tiles.fine, num_warps=tiles.warps, **by_chunk,
    )  # fmt: skip
    refine_kernel[grid](
        *row, work.stats, chunks, *drawing, *located,
        FINE=tiles.fine, num_warps=tiles.warps, **by_chunk,
    )  # fmt: skip
    list_kernel[grid](
        *row, work.stats, chunks, temperature, work.edges, work.bounds, work.listed, tiles.listed,
        work.sums, work.candidates, num_warps=tiles.list_warps, **by_chunk,
    )  # fmt: skip
    draw_kernel[(rows,)](
        *row, *partial, *drawing, work.edges, work.listed, tiles.listed, work.bounds, work.sums,
        work.candidates, ids, logprobs, bad, SHORT=tiles.short, LISTED=tiles.listed,
        BLOCK=tiles.block, PIVOTS=tiles.pivots, num_warps=tiles.draw_warps, **sizes, **early,
    )  # fmt: skip
