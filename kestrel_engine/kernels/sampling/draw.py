"""Decides top-k and top-p among a row's candidates (candidates.py), and draws, with one program a row.

The program sorts the listed keys and accumulates their weights, as `runtime.sampler` does, starting with the weight
above them. If the stretches have more ids than a list holds (thousands of equal logits), or a sum does not pass its
target within a stretch, it searches the whole row by bisecting an interval of keys. Weights are float64, and all sums
have a fixed order. The winner of the candidates that both cuts keep then meets the winners of the chunks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .candidates import key_of, ordered, weight
from .logits import extent, first_best, load, settle
from .noise import contest

_NO_KEY = tl.constexpr(-(2**63))
_ID_MASK = tl.constexpr(2**32 - 1)
_AT_ONCE = tl.constexpr(16)
"""Keys that are compared with all others at once when a short list is sorted."""


@triton.jit
def _logit(key):
    """Returns the logit of a key."""
    bits = (key >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _id(key):
    """Returns the id of a key; of _NO_KEY, the largest int32."""
    return (((key & _ID_MASK) ^ _ID_MASK) & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _passes(x, weights, reached, low, high, base, target, SIZE: tl.constexpr):
    """Returns the index of the first of SIZE sorted candidates in [low, high) whose cumulative weight exceeds
    ``target``, or SIZE. ``base``: the weight of all ids at or above ``high``."""
    i = tl.arange(0, SIZE)
    sums = reached + (base - tl.sum(tl.where(x >= high, weights, 0.0)))
    is_over = (x >= low) & (x < high) & (sums > target)
    return tl.where(base <= target, tl.min(tl.where(is_over, i, SIZE)), SIZE)


@triton.jit
def _ranked(candidates, number, SIZE: tl.constexpr):
    """Sorts the list of ``number`` candidates in descending order and returns it, padded with _NO_KEY."""
    i = tl.arange(0, SIZE)
    key = tl.load(candidates + i, mask=i < number, other=_NO_KEY)
    before = tl.zeros([SIZE, _AT_ONCE], tl.int32)
    for begin in range(0, number, _AT_ONCE):
        j = begin + tl.arange(0, _AT_ONCE)
        other = tl.load(candidates + j, mask=j < number, other=_NO_KEY)
        before += (other[None, :] > key[:, None]).to(tl.int32)
    # No two keys are equal, so each key has its own rank.
    place = tl.sum(before, axis=1)
    tl.debug_barrier()
    tl.store(candidates + place, key, mask=i < number)
    tl.debug_barrier()
    return tl.load(candidates + i, mask=i < number, other=_NO_KEY)


@triton.jit
def _among(
    candidates, number, bounds, total, base_rank, base_cut, best, temperature, top_p, top_k, noise,
    SIZE: tl.constexpr, IS_SHORT: tl.constexpr,
):  # fmt: skip
    """Whether the cuts are in a list of at most SIZE keys, and the score and id of the winner among those kept."""
    i = tl.arange(0, SIZE)
    if IS_SHORT:
        key = _ranked(candidates, number, SIZE)
    else:
        key = tl.sort(tl.load(candidates + i, mask=i < number, other=_NO_KEY), descending=True)
    is_listed = key > _NO_KEY
    x = tl.where(is_listed, _logit(key), float("-inf"))
    weights = tl.where(is_listed, weight(x, best, temperature), 0.0)
    reached = tl.cumsum(weights, axis=0)
    left = total
    last = SIZE - 1
    is_found = number > 0
    if (top_k > 0) & (top_k < tl.load(bounds + 5)):
        high = tl.load(bounds + 1)
        num_above = tl.sum((x >= high).to(tl.int32))
        last = num_above + top_k - tl.load(bounds + 4).to(tl.int32) - 1
        left = base_rank - tl.sum(tl.where(x >= high, weights, 0.0))
        left += tl.sum(tl.where(i == last, reached, 0.0))
    if top_p < 1:
        cut = _passes(
            x, weights, reached, tl.load(bounds + 2), tl.load(bounds + 3), base_cut, top_p * left, SIZE
        )  # fmt: skip
        is_found = is_found & (cut < SIZE)
        last = tl.minimum(last, cut)
    score, token = contest(tl.where(i <= last, weights, 0.0), noise, _id(key))
    return is_found, score, token


@triton.jit
def _element(logits, rule, vocab, least, begin, best, temperature, BLOCK: tl.constexpr):
    """Returns the keys and the weights of BLOCK ids."""
    ids = begin + tl.arange(0, BLOCK)
    x, is_kept = load(logits, rule, ids, ids < vocab)
    is_kept = is_kept & (x >= least)
    keys = tl.where(is_kept, key_of(x, ids), _NO_KEY)
    return keys, tl.where(is_kept, weight(x, best, temperature), 0.0)


@triton.jit
def _search(
    logits, rule, vocab, least, best, temperature, target, is_rank, low,
    BLOCK: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """Returns the key of the first id of the row, in descending order, whose cumulative weight exceeds ``target``, and
    that weight. With ``is_rank``, the number of ids is compared with ``target`` instead.

    The answer is always in [low, high]. Each pass divides this interval at ``high`` and at PIVOTS - 1 keys below,
    evenly by logit, or by id between equal logits. ``high`` always moves to an existing key, so every pass makes the
    interval smaller.
    """
    j = tl.arange(0, PIVOTS)
    share = j.to(tl.float32) / PIVOTS
    high = (ordered(best) << 32) + _ID_MASK
    reached = target * 0
    going = 1
    while going > 0:
        low_logit = _logit(low)
        high_logit = _logit(high)
        by_logit = ordered(high_logit * (1 - share) + low_logit * share) << 32
        by_id = high - ((high - low) & _ID_MASK) * j // PIVOTS
        pivots = tl.where(high_logit > low_logit, by_logit, by_id)
        pivots = tl.where(j == 0, high, tl.minimum(tl.maximum(pivots, low), high))
        over = tl.zeros([BLOCK, PIVOTS], tl.float64)
        number = tl.zeros([BLOCK, PIVOTS], tl.int32)
        below = tl.full([BLOCK, PIVOTS], _NO_KEY, tl.int64)
        for begin in range(0, vocab, BLOCK):
            keys, weights = _element(logits, rule, vocab, least, begin, best, temperature, BLOCK)
            is_over = keys[:, None] >= pivots[None, :]
            over += tl.where(is_over, weights[:, None], 0.0)
            number += is_over.to(tl.int32)
            below = tl.maximum(below, tl.where(is_over, _NO_KEY, keys[:, None]))
        sums = tl.sum(over, axis=0)
        compared = tl.where(is_rank, tl.sum(number, axis=0).to(tl.float64), sums)
        first = tl.min(tl.where(compared > target, j, PIVOTS))
        next_high = tl.max(tl.where(j == first - 1, tl.max(below, axis=0), _NO_KEY))
        reached = tl.sum(tl.where(j == 0, sums, 0.0))
        going = tl.where((first > 0) & (next_high >= low), 1, 0)
        low = tl.maximum(low, tl.max(tl.where(j == first, pivots, _NO_KEY)))
        high = tl.where(going > 0, next_high, high)
    return high, reached


@triton.jit
def _among_all(
    logits, rule, vocab, least, num_kept, total, best, temperature, top_p, top_k, noise,
    BLOCK: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """Returns the score and id of the winner of the whole row."""
    cut = ordered(least) << 32
    left = total
    # Top-k and top-p share one loop body, because the body takes long to compile.
    for step in range(2):
        target = tl.where(step == 1, top_p * left, (top_k - 1).to(tl.float64))
        if tl.where(step == 1, top_p < 1, (top_k > 0) & (top_k < num_kept)):
            cut, left = _search(
                logits, rule, vocab, least, best, temperature, target, step == 0, cut, BLOCK, PIVOTS
            )
    score = left * 0
    token = tl.full([], 0, tl.int32)
    for begin in range(0, vocab, BLOCK):
        keys, weights = _element(logits, rule, vocab, least, begin, best, temperature, BLOCK)
        here, winner = contest(
            tl.where(keys >= cut, weights, 0.0), noise, begin + tl.arange(0, BLOCK)
        )
        token = tl.where(here > score, winner, token)
        score = tl.maximum(score, here)
    return score, token


@triton.jit
def draw_kernel(
    logits, stride, rules, vocab, stats, places, chunks, temperatures, top_ps, top_ks, noise,
    edges, listed, max_listed, bounds, sums, leaders, candidates, ids, logprobs, bad,
    CHUNKS: tl.constexpr, EDGES: tl.constexpr, COLUMNS: tl.constexpr, SHORT: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr, PIVOTS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    rule = rules + row * WIDTH
    temperature = tl.load(temperatures + row)
    token = first_best(stats, places, row, chunks, vocab, CHUNKS)
    c = tl.arange(0, CHUNKS)
    not_finite = tl.sum(tl.load(places + (row * chunks + c) * 2 + 1, mask=c < chunks, other=0))
    if (temperature > 0) & (tl.load(rule) < 0) & (not_finite == 0):
        best, _worst = extent(stats, row, chunks, CHUNKS)
        top_p = tl.load(top_ps + row)
        top_k = tl.load(top_ks + row)
        noise_key = tl.load(noise + row)
        number = tl.load(listed + row * 3)
        candidates += row * max_listed
        bounds += row * 6
        at = sums + (row * chunks + c) * 4
        total = tl.sum(tl.load(at, mask=c < chunks, other=0.0))
        base_rank = tl.sum(tl.load(at + 1, mask=c < chunks, other=0.0))
        base_cut = tl.sum(tl.load(at + 2, mask=c < chunks, other=0.0))
        scores = tl.load(at + 3, mask=c < chunks, other=0.0)
        score = tl.max(scores)
        of_chunk = tl.load(leaders + row * chunks + c, mask=c < chunks, other=0)
        token = tl.min(tl.where((scores == score) & (c < chunks), of_chunk, 2**31 - 1))
        is_cut = (top_p < 1) | ((top_k > 0) & (top_k < tl.load(bounds + 5)))
        other_score = total * 0
        other = token
        is_found = is_cut == 0
        if is_cut & (number <= SHORT):
            is_found, other_score, other = _among(
                candidates, number, bounds, total, base_rank, base_cut, best, temperature, top_p,
                top_k, noise_key, SHORT, True,
            )  # fmt: skip
        elif is_cut & (number <= LISTED):
            is_found, other_score, other = _among(
                candidates, number, bounds, total, base_rank, base_cut, best, temperature, top_p,
                top_k, noise_key, LISTED, False,
            )  # fmt: skip
        if is_found == 0:
            least = tl.load(edges + row * COLUMNS + EDGES - 1)
            other_score, other = _among_all(
                logits, rule, vocab, least, tl.load(bounds + 5), total, best, temperature, top_p,
                top_k, noise_key, BLOCK, PIVOTS,
            )  # fmt: skip
        # The ids of chunks are ids of the whole row, so a search of the whole row finds their winner too.
        token = tl.where(other_score > score, other, token)
    settle(logits, rule, row, token, stats, places, chunks, ids, logprobs, bad, CHUNKS)
