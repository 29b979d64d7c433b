"""Finds the likeliest ids of rows with their log-probabilities, after `sample_rows` has left the chunks' statistics.

A program keeps the best id of every chunk, takes the best of these, and searches only that chunk for its next one.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .candidates import key_of
from .logits import LARGEST, NUM_TOP, RULE_WIDTH, load
from .sample import SamplingTiles, Workspace

_NO_KEY = tl.constexpr(-(2**63))
_ID_MASK = tl.constexpr(2**32 - 1)


def likeliest(
    logits: Tensor,
    rules: Tensor,
    workspace: Workspace,
    out: Tensor,
    *,
    tiles: SamplingTiles | None = None,
) -> None:
    """Writes the likeliest ids of each row that asks for them to ``out``, without waiting for the device.

    ``logits``: [M, V], ``rules``: [M, RULE_WIDTH] int32, ``tiles``: those of the last `sample_rows`, which filled
    ``workspace``. A rule's column NUM_TOP says how many ids the row asks for: n, at most K. ``out``: [M, 2, K] int32.
    The first n of ``out[row, 0]`` become ids, in the order of StepToken.top, and the first n of ``out[row, 1]`` their
    log-probabilities as bits. An id is -1 where the rule allows fewer. The other values stay. Those of a row that is
    not finite are arbitrary.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1, logits.stride()
    assert rules.shape == (rows, RULE_WIDTH) and rules.is_contiguous(), (
        rules.shape,
        rules.stride(),
    )
    assert out.is_contiguous() and out.shape[:2] == (rows, 2), (out.shape, out.stride())
    tiles = tiles or SamplingTiles()
    chunks = triton.cdiv(vocab, tiles.chunk)
    assert workspace.stats.shape[1] == chunks, workspace.stats.shape
    _likeliest_kernel[(rows,)](
        logits, logits.stride(0), rules, vocab, workspace.stats, workspace.places, chunks, out,
        MOST=out.shape[2], CHUNK=tiles.chunk, CHUNKS=max(2, triton.next_power_of_2(chunks)),
        NUM_TOP=NUM_TOP, WIDTH=RULE_WIDTH, num_warps=4,
    )  # fmt: skip


@triton.jit
def _likeliest_kernel(
    logits, stride, rules, vocab, stats, places, chunks, out,
    MOST: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, NUM_TOP: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    rule = rules + row * WIDTH
    out += row * 2 * MOST
    c = tl.arange(0, CHUNKS)
    here = c < chunks
    largest = tl.load(stats + (row * chunks + c) * 3, mask=here, other=-LARGEST)
    total = tl.load(stats + (row * chunks + c) * 3 + 1, mask=here, other=0.0)
    place = tl.load(places + (row * chunks + c) * 2, mask=here, other=vocab)
    best = tl.max(largest)
    # As in `settle`, so the drawn id has the same log-probability here.
    log_total = tl.log(tl.maximum(tl.sum(total * tl.exp(largest - best)), 1.0))
    # A chunk whose ids are all forbidden has no place.
    keys = tl.where(place < vocab, key_of(largest, place), _NO_KEY)
    for i in range(tl.load(rule + NUM_TOP)):
        key = tl.max(keys)
        is_there = key > _NO_KEY
        token = ((key & _ID_MASK) ^ _ID_MASK).to(tl.int32)
        token = tl.where(is_there, token, 0)
        logprob = tl.load(logits + token).to(tl.float32) - best - log_total
        tl.store(out + i, tl.where(is_there, token, -1))
        tl.store(out + MOST + i, logprob.to(tl.int32, bitcast=True))
        part = token // CHUNK
        ids = part * CHUNK + tl.arange(0, CHUNK)
        x, is_kept = load(logits, rule, ids, ids < vocab)
        next_keys = tl.where(is_kept, key_of(x, ids), _NO_KEY)
        next_key = tl.max(tl.where(next_keys < key, next_keys, _NO_KEY))
        keys = tl.where(c == part, next_key, keys)
