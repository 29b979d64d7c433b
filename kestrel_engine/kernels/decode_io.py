"""The input and the output of a decode pass: embedding each row's token, and storing the token that it samples.

The kind PREVIOUS stands for the token that the sequence sampled last, which the device stores, and which the host may
not know yet. Kinds of tokens: TEXT, COORD, SIZE.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sampling.logits import LARGEST

PREVIOUS, TEXT, COORD, SIZE = -1, 0, 1, 2

RESULT_WIDTH = 8
"""The number of int32 columns of a result: id, bad, the id's log-probability as bits, coord bin, width bin, height bin,
the probabilities of the values near the coord and near the size, as bits."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Each sequence's last token. ``ids``, ``kinds``: [num_seqs] int32. ``values``: [num_seqs, 2] float32, a
    coordinate, or a width and a height."""

    ids: Tensor
    kinds: Tensor
    values: Tensor

    @classmethod
    def empty(cls, num_seqs: int, device: torch.device) -> SampledTokens:
        ints = torch.zeros(2, num_seqs, dtype=torch.int32, device=device)
        return cls(ints[0], ints[1], torch.zeros(num_seqs, 2, device=device))


def feed_rows(
    seqs: Tensor,
    kinds: Tensor,
    ids: Tensor,
    values: Tensor,
    sampled: SampledTokens,
    wte: Tensor,
    new_pages: Tensor,
    page_table: Tensor,
    *,
    x: Tensor,
    kinds_out: Tensor,
    values_out: Tensor,
) -> None:
    """Embeds the input tokens of M rows, and adds new pages to the page table.

    ``kinds``: [M]; a row of kind PREVIOUS reads its token from ``sampled`` at ``seqs``, other rows from ``ids`` [M] or
    ``values`` [M, 2]. ``new_pages``: [M, 2] int32, an index into the flat ``page_table`` (negative for none) and the
    page to write there. ``page_table``: [num_seqs, max_pages] int32, contiguous. Writes ``x`` [M, dim], the rows of
    ``wte`` for TEXT and undefined values for other kinds, ``kinds_out`` [M] int32 and ``values_out`` [M, 2] float32.
    """
    dim = wte.shape[1]
    _feed_kernel[(len(x),)](
        seqs, kinds, ids, values, sampled.ids, sampled.kinds, sampled.values,
        wte, new_pages, page_table, x, kinds_out, values_out, dim, triton.next_power_of_2(dim),
    )  # fmt: skip


@triton.jit
def _feed_kernel(
    seqs, kinds, ids, values, last_ids, last_kinds, last_values,
    wte, new_pages, page_table, x, kinds_out, values_out, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(new_pages + 2 * row)
    tl.store(page_table + place, tl.load(new_pages + 2 * row + 1), mask=place >= 0)
    seq = tl.load(seqs + row)
    kind = tl.load(kinds + row)
    previous = kind < 0
    kind = tl.where(previous, tl.load(last_kinds + seq), kind)
    token = tl.where(previous, tl.load(last_ids + seq), tl.load(ids + row)).to(tl.int64)
    first = tl.where(previous, tl.load(last_values + 2 * seq), tl.load(values + 2 * row))
    second = tl.where(previous, tl.load(last_values + 2 * seq + 1), tl.load(values + 2 * row + 1))
    tl.store(kinds_out + row, kind)
    tl.store(values_out + 2 * row, first)
    tl.store(values_out + 2 * row + 1, second)
    columns = tl.arange(0, BLOCK)
    inside = columns < DIM
    # The id of a row with a value is not used.
    embedding = tl.load(wte + tl.where(kind == 0, token, 0) * DIM + columns, mask=inside)
    tl.store(x + row * DIM + columns, embedding, mask=inside)


@dataclass(frozen=True, slots=True)
class Bins:
    """The best bins of a region head: ``bins`` int32, and ``near`` float32, the probability of the bins near each. Both
    are [M, heads]."""

    bins: Tensor
    near: Tensor
    num_bins: int


def flag_rows(hidden: Tensor, flags: Tensor) -> None:
    """Writes 1 to ``flags`` [M, 1] int32 for each row of ``hidden`` [M, dim] with a NaN or an infinity, else 0."""
    assert hidden.stride(1) == 1 and flags.is_contiguous(), (hidden.stride(), flags.stride())
    dim = hidden.shape[1]
    _flag_kernel[(len(hidden),)](
        hidden, hidden.stride(0), flags, dim, triton.next_power_of_2(dim)
    )  # fmt: skip


@triton.jit
def _is_bad(hidden, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Returns 1 if one of DIM numbers is not finite, else 0."""
    columns = tl.arange(0, BLOCK)
    x = tl.load(hidden + columns, mask=columns < DIM, other=0.0).to(tl.float32)
    # This comparison is false for NaN.
    return tl.max(((tl.abs(x) <= LARGEST) == 0).to(tl.int32))


@triton.jit
def _flag_kernel(hidden, stride, flags, DIM: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.store(flags + row, _is_bad(hidden + row * stride, DIM, BLOCK))


def keep_rows(
    hidden: Tensor,
    seqs: Tensor,
    flags: Tensor,
    ids: Tensor,
    logprobs: Tensor,
    bad: Tensor,
    coords: Bins | None,
    sizes: Bins | None,
    sampled: SampledTokens,
    results: Tensor,
    *,
    coord_id: int,
    size_id: int,
    reads_coord: int,
    reads_size: int,
) -> None:
    """Stores the sampled tokens of M rows in ``sampled`` at ``seqs`` and in ``results`` [M, RESULT_WIDTH] int32.

    A result is bad if ``bad`` [M] int32 is set (its logits are not finite), if its row of ``hidden`` [M, dim] is not
    finite, or if the probability of the bins near its value is NaN. ``flags``: [M] int32, any stride. If the bit
    ``reads_coord`` is set and the id is ``coord_id``, the row takes its value from ``coords`` [M, 1]; likewise
    ``reads_size``, ``size_id`` and ``sizes`` [M, 2]. Both may be None if no row sets a flag.
    """
    assert (coords is None) == (sizes is None), "coordinates and sizes are read together"
    spatial = coords is not None
    nothing = Bins(ids, logprobs, 2)
    of_coords, of_sizes = coords or nothing, sizes or nothing
    assert hidden.stride(1) == 1, hidden.stride()
    dim = hidden.shape[1]
    _keep_kernel[(len(ids),)](
        hidden, hidden.stride(0), seqs, flags, flags.stride(0), ids, logprobs, bad,
        of_coords.bins, of_coords.near, of_sizes.bins, of_sizes.near,
        sampled.ids, sampled.kinds, sampled.values, results, results.stride(0),
        of_coords.num_bins, of_sizes.num_bins, coord_id, size_id, reads_coord, reads_size, spatial,
        dim, triton.next_power_of_2(dim),
    )  # fmt: skip


@triton.jit
def _keep_kernel(
    hidden, hidden_stride, seqs, flags, flag_stride, ids, logprobs, bad,
    coord_bins, near_coords, size_bins, near_sizes,
    last_ids, last_kinds, last_values, results, result_stride,
    NUM_COORD: tl.constexpr, NUM_SIZE: tl.constexpr, COORD_ID: tl.constexpr, SIZE_ID: tl.constexpr,
    READS_COORD: tl.constexpr, READS_SIZE: tl.constexpr, SPATIAL: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    seq = tl.load(seqs + row)
    token = tl.load(ids + row)
    out = results + row * result_stride
    tl.store(last_ids + seq, token)
    tl.store(out, token)
    is_bad = tl.load(bad + row) | _is_bad(hidden + row * hidden_stride, DIM, BLOCK)
    tl.store(out + 2, tl.load(logprobs + row).to(tl.int32, bitcast=True))
    kind = token * 0
    if SPATIAL:
        flag = tl.load(flags + row * flag_stride)
        kind = tl.where(((flag & READS_COORD) != 0) & (token == COORD_ID), 1, kind)
        kind = tl.where(((flag & READS_SIZE) != 0) & (token == SIZE_ID), 2, kind)
        place = tl.load(coord_bins + row)
        width = tl.load(size_bins + 2 * row)
        height = tl.load(size_bins + 2 * row + 1)
        tl.store(out + 3, place)
        tl.store(out + 4, width)
        tl.store(out + 5, height)
        of_coord = tl.load(near_coords + row)
        tl.store(out + 6, of_coord.to(tl.int32, bitcast=True))
        of_size = tl.load(near_sizes + 2 * row) * tl.load(near_sizes + 2 * row + 1)
        tl.store(out + 7, of_size.to(tl.int32, bitcast=True))
        of_value = tl.where(kind == 1, of_coord, tl.where(kind == 2, of_size, 0.0))
        is_bad = is_bad | (of_value != of_value).to(tl.int32)
        # In float64, like models.region on the host (moondream.md section 7).
        coord = (place.to(tl.float64) / NUM_COORD).to(tl.float32)
        w = tl.exp2(10.0 * width.to(tl.float64) / (NUM_SIZE - 1) - 10.0).to(tl.float32)
        h = tl.exp2(10.0 * height.to(tl.float64) / (NUM_SIZE - 1) - 10.0).to(tl.float32)
        tl.store(last_values + 2 * seq, tl.where(kind == 1, coord, w))
        tl.store(last_values + 2 * seq + 1, h)
    tl.store(last_kinds + seq, kind)
    tl.store(out + 1, is_bad)
