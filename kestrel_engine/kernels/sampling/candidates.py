"""Finds the few ids that decide top-k and top-p, with many programs a row and without sorting the row, and draws among
the ids that both keep for certain.

Each of the two decisions is the first id, in descending order, at which a sum passes a target. Comparing the weight
above a few edges (logits) shows between which two edges this happens. Float32 sums with a margin are sufficient. The
last program of a row adds them up. If too many ids are between the two edges, that stretch is divided again. Then the
weight above each stretch is summed in float64, the ids in the stretch are listed, and of the ids above both stretches
each chunk keeps its winner (noise.py).

Ids whose weight is below exp(-48) of the best weight are omitted. All such ids of a row together weigh less than the
last bit of the row's sum, and none of them can win: noise lies between 2^-53 and 37.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .logits import extent, load
from .noise import contest

_LEAST_WEIGHT = tl.constexpr(48.0)
"""-log of the smallest weight that counts, relative to the best weight."""
_MARGIN = tl.constexpr(2e-5)
"""The margin of a float32 sum. Exponentials have an error of 1.3e-5, sums of 1,024 weights and of chunks 5e-6. A larger
error costs time but does not change the result: if the list lacks the id, the whole row is searched."""
_LN_2 = tl.constexpr(0.6931471805599453)
_ID_MASK = tl.constexpr(2**32 - 1)


@triton.jit
def weight(x, best, temperature):
    """Returns exp((x - best) / temperature) in float64, like the reference's softmax before normalisation."""
    # Use one division for all ids. Bound the quotient, because a tiny temperature would give 0 * inf for the best id.
    scale = tl.minimum(1.0 / temperature.to(tl.float64), 1e300)
    return tl.exp((x.to(tl.float64) - best.to(tl.float64)) * scale)


@triton.jit
def ordered(x):
    """Maps float32 to int64 and keeps the order. Both zeros map to the same number, as a sort treats them as equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def key_of(x, ids):
    """Returns keys whose descending order is that of the reference's stable sort: by logit, then by ascending id."""
    return (ordered(x) << 32) + (ids.to(tl.int64) ^ _ID_MASK)


@triton.jit
def _light(x, best, temperature):
    """As `weight`, in float32, for ``x`` not above ``best``."""
    # Bound the quotient, because a tiny temperature would give 0 * inf for the best id.
    scale = tl.minimum(1.0 / (temperature * _LN_2), 1e30).to(tl.float32)
    return tl.exp2(tl.minimum(x - best, 0.0) * scale)


@triton.jit
def _measure(
    x, weights, high, low, least, is_first, edges, masses, counts,
    EDGES: tl.constexpr, PARTS: tl.constexpr, TO_LEAST: tl.constexpr,
):  # fmt: skip
    """Sums the weight and the number of ``x`` at or above each of EDGES logits. The edges divide the way from ``high``
    down to ``low`` into PARTS. No edge is below ``least``, and with TO_LEAST the last edge is ``least``. ``is_first``:
    this is the first chunk, which stores the edges."""
    j = tl.arange(0, EDGES)
    mass = tl.zeros([EDGES], tl.float32)
    count = tl.zeros([EDGES], tl.float32)
    for i in tl.static_range(EDGES):
        edge = tl.maximum(high - (high - low) * ((i + 1) / PARTS), least)
        if TO_LEAST and i == EDGES - 1:
            edge = least
        tl.store(edges + i, edge, mask=is_first)
        # A product instead of a select, because product and sum are one instruction.
        is_above = (x >= edge).to(tl.float32)
        mass = tl.where(j == i, tl.sum(is_above * weights), mass)
        count = tl.where(j == i, tl.sum(is_above), count)
    tl.store(masses + j, mass)
    tl.store(counts + j, count)


@triton.jit
def _is_last(arrived, chunks):
    """Returns whether this chunk is the last of the row to finish. The stores of all chunks are then visible."""
    tl.debug_barrier()
    is_last = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == chunks - 1
    if is_last:
        tl.store(arrived, 0)
    return is_last


@triton.jit
def _summed(
    columns, row, chunks,
    CHUNKS: tl.constexpr, USED: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Returns the sums [BLOCK] of the first USED of COLUMNS columns over a row's chunks."""
    # One iteration issues all its loads at once, into about 32 registers of each thread of one warp.
    MOST: tl.constexpr = 1024 // BLOCK
    PASS: tl.constexpr = MOST if MOST < CHUNKS else CHUNKS
    j = tl.arange(0, BLOCK)[None, :]
    sums = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, chunks, PASS):
        c = begin + tl.arange(0, PASS)[:, None]
        at = (row * chunks + c) * COLUMNS + j
        sums += tl.sum(tl.load(columns + at, mask=(c < chunks) & (j < USED), other=0.0), axis=0)
    return sums


@triton.jit
def _around(edge, mass, least, most):
    """Returns the edges around the point where a sum passes a target between ``least`` and ``most``, or infinity."""
    high = tl.min(tl.where(mass * (1 + _MARGIN) <= least, edge, float("inf")))
    low = tl.max(tl.where(mass * (1 - _MARGIN) > most, edge, float("-inf")))
    return low, high


@triton.jit
def _above(edge, values, x):
    """Returns the entry of ``values`` for edge ``x``; 0 for infinity, and the greatest value for minus infinity."""
    return tl.max(tl.where(edge >= x, values, 0.0))


@triton.jit
def _bound(
    edges, masses, counts, bounds, row, chunks, top_p, top_k,
    CHUNKS: tl.constexpr, USED: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes a row's ``bounds`` and returns the number of ids in the two stretches. The bounds are [low, high) of the
    stretches in which top-k and top-p cut, infinite without a cut; the number of ids above the first stretch; and the
    number of ids that count. The edges may have any order."""
    j = tl.arange(0, BLOCK)
    edge = tl.load(edges + row * COLUMNS + j, mask=j < USED, other=float("inf"))
    mass = _summed(masses, row, chunks, CHUNKS, USED, BLOCK, COLUMNS).to(tl.float64)
    count = _summed(counts, row, chunks, CHUNKS, USED, BLOCK, COLUMNS)
    num_kept = tl.max(count)
    most = tl.max(mass)
    least = most
    rank_low = float("inf")
    rank_high = float("inf")
    if (top_k > 0) & (top_k < num_kept):
        is_before = count < top_k
        rank_high = tl.min(tl.where(is_before, edge, float("inf")))
        rank_low = tl.max(tl.where(is_before, float("-inf"), edge))
        least = tl.max(tl.where(is_before, mass, 0.0))
        most = tl.min(tl.where(is_before, most, mass))
    # The weight that top-k leaves is known only as an interval. So is the target of top-p.
    least *= 1 - _MARGIN
    most *= 1 + _MARGIN
    cut_low = float("inf")
    cut_high = float("inf")
    if top_p < 1:
        cut_low, cut_high = _around(edge, mass, top_p * least, top_p * most)
    num_before = _above(edge, count, rank_high)
    number = _above(edge, count, rank_low) - num_before
    number += _above(edge, count, cut_low) - _above(edge, count, cut_high)
    bounds += row * 6
    tl.store(bounds, rank_low)
    tl.store(bounds + 1, rank_high)
    tl.store(bounds + 2, cut_low)
    tl.store(bounds + 3, cut_high)
    tl.store(bounds + 4, num_before)
    tl.store(bounds + 5, num_kept)
    return number


@triton.jit
def locate_kernel(
    logits, stride, rules, vocab, stats, chunks, temperatures, top_ps, top_ks,
    edges, masses, counts, bounds, listed, max_short,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, EDGES: tl.constexpr, FINE: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sums one chunk's weights and ids at or above the row's EDGES edges. The last chunk computes the row's bounds."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    rule = rules + row * WIDTH
    listed += row * 3
    if (temperature > 0) & (tl.load(rule) < 0):
        top_p = tl.load(top_ps + row)
        best, worst = extent(stats, row, chunks, CHUNKS)
        least = (best.to(tl.float64) - temperature * _LEAST_WEIGHT).to(tl.float32)
        least = tl.maximum(least, worst)
        # Even if all other ids were lighter than this, together they would weigh less than 1 - top_p of the best id. So
        # top-p keeps none of them.
        spared = tl.maximum(1 - top_p, 1e-30)
        reach = tl.minimum(tl.log(vocab / spared), _LEAST_WEIGHT)
        low = (best.to(tl.float64) - reach * temperature).to(tl.float32)
        low = tl.maximum(low, least)
        to = (row * chunks + part) * COLUMNS
        if (part == 0) | (tl.load(stats + (row * chunks + part) * 3) >= least):
            ids = part * CHUNK + tl.arange(0, CHUNK)
            x, _kept = load(logits + row * stride, rule, ids, ids < vocab)
            _measure(
                x, _light(x, best, temperature), best, low, least, part == 0,
                edges + row * COLUMNS, masses + to, counts + to, EDGES, EDGES - 1, True,
            )  # fmt: skip
        else:
            nothing = tl.zeros([EDGES], tl.float32)
            tl.store(masses + to + tl.arange(0, EDGES), nothing)
            tl.store(counts + to + tl.arange(0, EDGES), nothing)
        if _is_last(listed + 2, chunks):
            number = _bound(
                edges, masses, counts, bounds, row, chunks, top_p, tl.load(top_ks + row),
                CHUNKS, EDGES, EDGES, COLUMNS,
            )  # fmt: skip
            tl.store(listed, 0)
            tl.store(listed + 1, (number > max_short).to(tl.int32))


@triton.jit
def refine_kernel(
    logits, stride, rules, vocab, stats, chunks, temperatures, top_ps, top_ks,
    edges, masses, counts, bounds, listed,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, EDGES: tl.constexpr, FINE: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `locate_kernel`, for FINE edges within each stretch, if too many ids are in the stretches."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    rule = rules + row * WIDTH
    listed += row * 3
    if (temperature > 0) & (tl.load(rule) < 0):
        if tl.load(listed + 1) > 0:
            best, _worst = extent(stats, row, chunks, CHUNKS)
            least = tl.load(edges + row * COLUMNS + EDGES - 1)
            ids = part * CHUNK + tl.arange(0, CHUNK)
            x, _is_kept = load(logits + row * stride, rule, ids, ids < vocab)
            weights = _light(x, best, temperature)
            for i in range(2):
                low = tl.load(bounds + row * 6 + 2 * i)
                high = tl.load(bounds + row * 6 + 2 * i + 1)
                to_edges = edges + row * COLUMNS + EDGES + i * FINE
                to = (row * chunks + part) * COLUMNS + EDGES + i * FINE
                if low < high:
                    _measure(
                        x, weights, tl.minimum(high, best), tl.maximum(low, least), least, part == 0,
                        to_edges, masses + to, counts + to, FINE, FINE + 1, False,
                    )  # fmt: skip
                else:
                    # An edge with no id above it.
                    j = tl.arange(0, FINE)
                    tl.store(masses + to + j, tl.zeros([FINE], tl.float32))
                    tl.store(counts + to + j, tl.zeros([FINE], tl.float32))
                    if part == 0:
                        tl.store(to_edges + j, tl.full([FINE], float("inf"), tl.float32))
            # All programs have read the bounds before the last program overwrites them.
            if _is_last(listed + 2, chunks):
                _bound(
                    edges, masses, counts, bounds, row, chunks, tl.load(top_ps + row),
                    tl.load(top_ks + row), CHUNKS, EDGES + 2 * FINE, COLUMNS, COLUMNS,
                )  # fmt: skip


@triton.jit
def list_kernel(
    logits, stride, rules, vocab, stats, chunks, temperatures, noise,
    edges, bounds, listed, max_listed, sums, leaders, candidates,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, EDGES: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Lists the keys of one chunk's ids in the stretches, in any order. Sums all weights, and those above each stretch.
    Finds the winner of the ids above both."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    rule = rules + row * WIDTH
    if (temperature > 0) & (tl.load(rule) < 0):
        least = tl.load(edges + row * COLUMNS + EDGES - 1)
        sums += (row * chunks + part) * 4
        if tl.load(stats + (row * chunks + part) * 3) >= least:
            bounds += row * 6
            r_low = tl.load(bounds)
            r_high = tl.load(bounds + 1)
            c_low = tl.load(bounds + 2)
            c_high = tl.load(bounds + 3)
            best, _worst = extent(stats, row, chunks, CHUNKS)
            ids = part * CHUNK + tl.arange(0, CHUNK)
            x, is_kept = load(logits + row * stride, rule, ids, ids < vocab)
            is_kept = is_kept & (x >= least)
            weights = tl.where(is_kept, weight(x, best, temperature), 0.0)
            tl.store(sums, tl.sum(weights))
            tl.store(sums + 1, tl.sum(tl.where(x >= r_high, weights, 0.0)))
            tl.store(sums + 2, tl.sum(tl.where(x >= c_high, weights, 0.0)))
            # Without a cut, both bounds of its stretch are infinite.
            is_sure = (x >= r_high) | (r_low == float("inf"))
            is_sure = is_sure & ((x >= c_high) | (c_low == float("inf")))
            score, leader = contest(tl.where(is_sure, weights, 0.0), tl.load(noise + row), ids)
            tl.store(sums + 3, score)
            tl.store(leaders + row * chunks + part, leader)
            taken = ((x >= r_low) & (x < r_high)) | ((x >= c_low) & (x < c_high))
            taken = is_kept & taken
            number = tl.sum(taken.to(tl.int32))
            if number > 0:
                begin = tl.atomic_add(listed + row * 3, number, sem="relaxed")
                place = begin + tl.cumsum(taken.to(tl.int32), axis=0) - 1
                taken = taken & (place < max_listed)
                tl.store(candidates + row * max_listed + place, key_of(x, ids), mask=taken)
        else:
            tl.store(sums + tl.arange(0, 4), tl.zeros([4], tl.float64))
