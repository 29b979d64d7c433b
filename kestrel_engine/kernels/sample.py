"""Logits and encoded rules to ids and log-probabilities on the device, exactly as `runtime.sampler` defines them.

Every row is split into chunks, so that one row keeps many processors busy. Greedy takes two launches: each chunk's
best, then the best of them (sample_logits.py). Sampling takes four (sample_draw.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .sample_draw import candidates_kernel, draw_kernel, histogram_kernel
from .sample_logits import RULE_WIDTH, best_kernel, stats_kernel


class Tiles(NamedTuple):
    """How the work is cut. None of it changes a result beyond the rounding of float64 sums."""

    chunk: int = 1024
    """Ids a program in the first three launches."""
    histogram: int = 256
    """Ids that meet the edges at once."""
    edges: int = 16
    """Values at which the weights above are summed."""
    listed: int = 8192
    """Candidates that are listed; if there are more, the whole row is searched."""
    block: int = 512
    """Candidates that meet the pivots at once."""
    pivots: int = 8
    """Parts into which a search cuts its interval at a time."""


class Workspace(NamedTuple):
    """What the launches hand to one another, for up to so many rows; holds nothing between calls."""

    stats: Tensor
    """[rows, chunks, 3] float32: largest, sum of exp(logit - largest), smallest."""
    places: Tensor
    """[rows, chunks, 2] int32: id of the largest; how many are not finite."""
    edges: Tensor
    """[rows, edges] float32: logits, descending."""
    masses: Tensor
    """[rows, chunks, edges] float64: weight at or above each edge."""
    counts: Tensor
    """[rows, chunks, edges] int32: ids at or above each edge."""
    ranges: Tensor
    """[rows, 7] float64: weight of all; number of all, of candidates, above where top-k cuts; weight above there, above
    where top-p cuts, above where the draw is."""
    bounds: Tensor
    """[rows, 6] int64: lowest and highest key where top-k cuts, where top-p cuts, where the draw is."""
    candidates: Tensor
    """[rows, listed] int32: ids, ascending."""


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
        edges=empty(tiles.edges, dtype=torch.float32),
        masses=empty(chunks, tiles.edges, dtype=torch.float64),
        counts=empty(chunks, tiles.edges, dtype=torch.int32),
        ranges=empty(7, dtype=torch.float64),
        bounds=empty(6, dtype=torch.int64),
        candidates=empty(min(vocab, tiles.listed), dtype=torch.int32),
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

    ``rules`` [M, RULE_WIDTH] int32 (sample_logits.py). ``temperature`` (0: the best), ``top_p``, ``uniforms`` [M]
    float64 and ``top_k`` [M] int32 (0: all) are as in SamplingParams and ``step.uniform``. ``ids`` [M] int32;
    ``logprobs`` [M] float32, under the rule, before temperature and truncation, 0 if forced; ``bad`` [M] int32:
    whether a row that is not forced has a logit that is not finite, which makes its id meaningless (but one of the
    vocabulary). ``greedy``: no row has a temperature, which saves two launches. ``workspace``: from allocate() with
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
    histogram = (work.edges, work.masses, work.counts)
    candidates = (work.ranges, work.bounds, work.candidates, work.candidates.shape[1])
    histogram_kernel[(rows, chunks)](
        *row, *partial, temperature, *histogram, CHUNK=tiles.chunk, CHUNKS=chunk_block,
        PART=min(tiles.histogram, tiles.chunk), EDGES=tiles.edges, WIDTH=RULE_WIDTH, num_warps=8,
        **early,
    )  # fmt: skip
    candidates_kernel[(rows, chunks)](
        *row, *partial, *drawing, *histogram, *candidates, CHUNK=tiles.chunk, CHUNKS=chunk_block,
        EDGES=tiles.edges, WIDTH=RULE_WIDTH, num_warps=4, **early,
    )  # fmt: skip
    draw_kernel[(rows,)](
        *row, *partial, *drawing, *candidates, ids, logprobs, bad, CHUNKS=chunk_block,
        BLOCK=tiles.block, PIVOTS=tiles.pivots, WIDTH=RULE_WIDTH, num_warps=8,
        **early,
    )  # fmt: skip
