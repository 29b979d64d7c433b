"""Samples ids and log-probabilities from logits and encoded rules on the device, exactly as `runtime.sampler` does.

Every row is divided into chunks, so that a single row uses many multiprocessors. Greedy sampling takes two launches:
the best id of each chunk, then the best of these (logits.py). Drawing takes five: the statistics, three launches that
find a few candidates for the cuts and draw among the other ids (candidates.py), and one that sorts the candidates and
ends the draw (draw.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .candidates import list_kernel, locate_kernel, refine_kernel
from .draw import draw_kernel
from .logits import RULE_WIDTH, best_kernel, stats_kernel


class SamplingTiles(NamedTuple):
    """The sizes of the kernels' tiles, powers of two. They change results only by the rounding of float64 sums."""

    chunk: int = 1024
    """Ids of a program in all launches but the last."""
    edges: int = 8
    """The number of edges, logits above which weights are summed."""
    fine: int = 32
    """The number of edges within each stretch, if there are more candidates than ``short``."""
    short: int = 512
    """The most candidates that are sorted by counting, which is faster for few; at most ``listed``."""
    listed: int = 2048
    """The most candidates that are sorted. If there are more, the whole row is searched."""
    block: int = 512
    """Ids that are compared with the pivots at once in that search."""
    pivots: int = 8
    """Parts into which that search divides its interval in each pass."""
    warps: int = 1
    """Warps of a program that sums above edges. With one warp, its sums need no barrier."""
    list_warps: int = 2
    """Warps of a program that lists candidates."""
    draw_warps: int = 8
    """Warps of the program that sorts a row's candidates."""

    @property
    def columns(self) -> int:
        """The number of a row's edges."""
        return int(triton.next_power_of_2(self.edges + 2 * self.fine))


class Workspace(NamedTuple):
    """Buffers that pass results between the launches of one call."""

    stats: Tensor
    """[rows, chunks, 3] float32: the largest logit, the sum of exp(logit - largest), the smallest logit."""
    places: Tensor
    """[rows, chunks, 2] int32: the id of the largest logit, the number of logits that are not finite."""
    edges: Tensor
    """[rows, columns] float32: the row's edges: ``edges`` of the row, then ``fine`` of each of its two stretches."""
    masses: Tensor
    """[rows, chunks, columns] float32: the weight at or above each edge."""
    counts: Tensor
    """[rows, chunks, columns] float32: the number of ids at or above each edge."""
    listed: Tensor
    """[rows, 3] int32: the number of candidates; whether stretches were divided again; the number of finished chunks,
    which is 0 between launches."""
    bounds: Tensor
    """[rows, 6] float32: the bounds [from, to) of the stretches of top-k and top-p; the number of ids above the first
    stretch; the number of ids that count."""
    sums: Tensor
    """[rows, chunks, 4] float64: the weight of all ids, and of those above each stretch; the score of the leader."""
    leaders: Tensor
    """[rows, chunks] int32: the winner of the ids above both stretches; any id if the score is 0."""
    candidates: Tensor
    """[rows, listed] int64: the keys of the candidates, in any order."""


def allocate(
    rows: int, vocab: int, device: torch.device | str, tiles: SamplingTiles | None = None
) -> Workspace:
    """Allocates a workspace for `sample_rows` with up to ``rows`` rows of ``vocab`` logits."""
    tiles = tiles or SamplingTiles()
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
        bounds=empty(6, dtype=torch.float32),
        sums=empty(chunks, 4, dtype=torch.float64),
        leaders=empty(chunks, dtype=torch.int32),
        candidates=empty(tiles.listed, dtype=torch.int64),
    )


def sample_rows(
    logits: Tensor,
    rules: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    noise: Tensor,
    *,
    greedy: bool,
    ids: Tensor,
    logprobs: Tensor,
    bad: Tensor,
    workspace: Workspace | None = None,
    tiles: SamplingTiles | None = None,
    pdl: bool = False,
) -> None:
    """Samples one id for each row of ``logits`` [M, V] into ``ids``, without waiting for the device.

    ``logits``: float32, bfloat16 or float16, with any row stride; not modified. ``rules``: [M, RULE_WIDTH] int32 (see
    logits.py). ``temperature`` (0: greedy), ``top_p``: [M] float64. ``top_k``: [M] int32 (0: all ids). ``noise``: [M]
    int64, the bits of ``step.noise_key``. They have the meaning of SamplingParams.

    Outputs: ``ids`` [M] int32. ``logprobs`` [M] float32, under the rule, before temperature and truncation; 0 for a
    forced id. ``bad`` [M] int32, 1 if a row that is not forced has a logit that is not finite; its id is arbitrary.

    ``greedy``: no row has a temperature, which saves three launches. ``workspace``: from `allocate` with the same
    tiles. ``pdl``: each launch, including the first, may start while the preceding one ends (sm_90).
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1, logits.stride()
    assert rules.shape == (rows, RULE_WIDTH) and rules.dtype == torch.int32, (rules.shape, rules)
    for column in (temperature, top_p):
        assert column.dtype == torch.float64 and len(column) == rows, (column.dtype, len(column))
    assert noise.dtype == torch.int64 and len(noise) == rows, (noise.dtype, len(noise))
    for column in (rules, temperature, top_p, top_k, noise, ids, logprobs, bad):
        assert column.is_contiguous(), column.stride()
    if rows == 0:
        return
    tiles = tiles or SamplingTiles()
    # If ``short`` exceeded ``listed``, a list that is too long would be sorted as a short one, over the next row's
    # list.
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
    drawing = (temperature, top_p, top_k)
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
        *row, work.stats, chunks, temperature, noise, work.edges, work.bounds, work.listed,
        tiles.listed, work.sums, work.leaders, work.candidates, num_warps=tiles.list_warps, **by_chunk,
    )  # fmt: skip
    draw_kernel[(rows,)](
        *row, *partial, *drawing, noise, work.edges, work.listed, tiles.listed, work.bounds,
        work.sums, work.leaders, work.candidates, ids, logprobs, bad, SHORT=tiles.short, LISTED=tiles.listed,
        BLOCK=tiles.block, PIVOTS=tiles.pivots, num_warps=tiles.draw_warps, **sizes, **early,
    )  # fmt: skip
