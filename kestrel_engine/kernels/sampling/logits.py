"""Applies a rule to a row of logits, and computes the chunks' statistics, the best id and the row's output.

The statistics of a chunk are its largest logit and that logit's id, the sum of exp(logit - largest), its smallest
logit, and whether all logits are finite.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

RULE_WIDTH = 34
"""The number of int32 columns of a rule: forced id or -1, id for all but the stop id or -1, stop id, number of
suppressed ids, number of allowed ids (0: all), a column that is not read here, the number of likeliest ids to find
(likeliest.py), another column that is not read here, 8 suppressed ids, 16 allowed ids, the low and the high half of the
device address of a mask (0: none).

A mask is [ceil(vocab / 1024) * 32] int32, with a bit for each id as in TokenRule. A captured graph holds no address of
it, so that each step may have masks of its own."""
FORCED, OTHERWISE, STOP, NUM_SUPPRESSED, NUM_ALLOWED, NUM_TOP = 0, 1, 2, 3, 4, 6
SUPPRESSED, MAX_SUPPRESSED = 8, 8
ALLOWED, MAX_ALLOWED = 16, 16
MASK = 32

MASKED_AT_ONCE = 1024
"""A mask is a multiple of this number of bits long, because the kernels read ids up to the next multiple."""

LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def masked(x, rule, ids):
    """Returns ``x`` where the rule allows ``ids``, -inf elsewhere."""
    # Update x itself, because the compiler packs and unpacks a predicate in every iteration of a loop.
    for i in range(tl.load(rule + 3)):
        x = tl.where(ids == tl.load(rule + 8 + i), float("-inf"), x)
    num_allowed = tl.load(rule + 4)
    if num_allowed > 0:
        listed = tl.full(x.shape, float("-inf"), tl.float32)
        for i in range(num_allowed):
            listed = tl.where(ids == tl.load(rule + 16 + i), x, listed)
        x = listed
    low, high = tl.load(rule + 32), tl.load(rule + 33)
    if (low != 0) | (high != 0):
        address = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
        words = address.to(tl.pointer_type(tl.int32))
        bits = tl.load(words + ids // 32) >> (ids % 32)
        x = tl.where(bits & 1 != 0, x, float("-inf"))
    return x


@triton.jit
def load(logits, rule, ids, inside):
    """Returns the logits of ``ids`` as float32, -inf if not finite or forbidden, and whether the rule allows them."""
    # Load the logits before the rule, whose loads depend on one another.
    x = tl.load(logits + ids, mask=inside, other=float("-inf")).to(tl.float32)
    x = masked(x, rule, ids)
    return x, x > float("-inf")


@triton.jit
def stats_kernel(
    logits, stride, rules, vocab, stats, places, chunks,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    ids = part * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab
    x = tl.load(logits + row * stride + ids, mask=inside, other=0.0).to(tl.float32)
    # This comparison is false for NaN.
    finite = tl.abs(x) <= LARGEST
    bad = tl.sum(tl.where(inside & (finite == 0), 1, 0))
    x = masked(tl.where(inside, x, float("-inf")), rules + row * WIDTH, ids)
    is_kept = tl.abs(x) <= LARGEST
    best = tl.max(tl.where(is_kept, x, -LARGEST))
    place = tl.min(tl.where(is_kept & (x == best), ids, vocab))
    total = tl.sum(tl.exp(tl.where(is_kept, x, float("-inf")) - best))
    worst = tl.min(tl.where(is_kept, x, LARGEST))
    stats += (row * chunks + part) * 3
    places += (row * chunks + part) * 2
    tl.store(stats, best)
    tl.store(stats + 1, total)
    tl.store(stats + 2, worst)
    tl.store(places, place)
    tl.store(places + 1, bad)


@triton.jit
def extent(stats, row, chunks, CHUNKS: tl.constexpr):
    """Returns the row's largest and smallest logit under its rule."""
    c = tl.arange(0, CHUNKS)
    stats += (row * chunks + c) * 3
    best = tl.max(tl.load(stats, mask=c < chunks, other=-LARGEST))
    worst = tl.min(tl.load(stats + 2, mask=c < chunks, other=LARGEST))
    return best, worst


@triton.jit
def first_best(stats, places, row, chunks, vocab, CHUNKS: tl.constexpr):
    """Returns the row's best id; 0 if there is none, which can only happen in a row that is not finite."""
    c = tl.arange(0, CHUNKS)
    largest = tl.load(stats + (row * chunks + c) * 3, mask=c < chunks, other=-LARGEST)
    place = tl.load(places + (row * chunks + c) * 2, mask=c < chunks, other=vocab)
    first = tl.min(tl.where(largest == tl.max(largest), place, vocab))
    return tl.where(first < vocab, first, 0)


@triton.jit
def settle(
    logits, rule, row, token, stats, places, chunks, ids, logprobs, bad, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Writes the row's id (its rule's forced id, or ``otherwise``, or ``token``) and its log-probability."""
    c = tl.arange(0, CHUNKS)
    here = c < chunks
    largest = tl.load(stats + (row * chunks + c) * 3, mask=here, other=-LARGEST)
    total = tl.load(stats + (row * chunks + c) * 3 + 1, mask=here, other=0.0)
    not_finite = tl.sum(tl.load(places + (row * chunks + c) * 2 + 1, mask=here, other=0))
    best = tl.max(largest)
    # The sum is at least 1, the best id's own term, unless no logit is finite.
    log_total = tl.log(tl.maximum(tl.sum(total * tl.exp(largest - best)), 1.0))
    logprob = tl.load(logits + token).to(tl.float32) - best - log_total
    forced = tl.load(rule)
    otherwise = tl.load(rule + 1)
    stop = tl.load(rule + 2)
    # A suppressed stop id has probability 0, so the other ids together have probability 1.
    stop_logit, stop_kept = load(logits, rule, stop + tl.arange(0, 1), tl.arange(0, 1) == 0)
    stopping = tl.sum(tl.where(stop_kept, tl.exp(stop_logit - best - log_total), 0.0))
    rest = tl.log(tl.maximum(1.0 - stopping.to(tl.float64), 1e-300)).to(tl.float32)
    joined = (otherwise >= 0) & (token != stop)
    logprob = tl.where(joined & (stopping < 1.0), rest, logprob)
    token = tl.where(joined, otherwise, token)
    is_forced = forced >= 0
    tl.store(ids + row, tl.where(is_forced, forced, token))
    tl.store(logprobs + row, tl.where(is_forced, 0.0, logprob))
    tl.store(bad + row, tl.where((not_finite > 0) & (is_forced == 0), 1, 0))


@triton.jit
def best_kernel(
    logits, stride, rules, vocab, stats, places, chunks, ids, logprobs, bad,
    CHUNKS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    token = first_best(stats, places, row, chunks, vocab, CHUNKS)
    settle(
        logits + row * stride, rules + row * WIDTH, row, token, stats, places, chunks, ids,
        logprobs, bad, CHUNKS,
    )  # fmt: skip
