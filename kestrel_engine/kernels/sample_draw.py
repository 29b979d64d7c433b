"""Drawing an id with a temperature, top-k and top-p: what `runtime.sampler` defines, without a sort.

Each chunk sums its weights above a few edges between the row's best and worst logit; those sums tell between which
edges top-k and top-p cut and where the draw falls. The few ids there are listed, and one program a row finds each of
the three by splitting an interval of keys.
A key orders by logit descending, then id ascending, as the reference's stable sort does. Weights are float64 and all
sums have a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .sample_logits import extent, first_best, load, settle

_NO_KEY = tl.constexpr(-(2**63))
_ID_MASK = tl.constexpr(2**32 - 1)
_BELOW_ONE = tl.constexpr(1 - 2**-52)


@triton.jit
def _weight(x, best, temperature):
    """exp((x - best) / temperature) in float64, as the reference's softmax before it is normalised."""
    return tl.exp((x.to(tl.float64) - best.to(tl.float64)) / temperature.to(tl.float64))


@triton.jit
def _edges(best, worst, EDGES: tl.constexpr):
    """[EDGES] values from just below ``best`` down, none above the one before it; all is above the last."""
    j = tl.arange(0, EDGES)
    share = (j + 1).to(tl.float32) / EDGES
    # A mean of the two could be rounded past either of them, and edges out of order.
    return tl.where(j < EDGES - 1, best - (best - worst) * share, float("-inf"))


@triton.jit
def histogram_kernel(
    logits, stride, rules, vocab, stats, places, chunks, temperatures, edges_of, masses, counts,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PART: tl.constexpr, EDGES: tl.constexpr,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What weighs, and how many there are, at or above each edge, of one chunk."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    rule = rules + row * WIDTH
    if (temperature > 0) & (tl.load(rule) < 0):
        best, worst = extent(stats, row, chunks, CHUNKS)
        edges = _edges(best, worst, EDGES)
        if part == 0:
            tl.store(edges_of + row * EDGES + tl.arange(0, EDGES), edges)
        mass = tl.zeros([PART, EDGES], tl.float64)
        count = tl.zeros([PART, EDGES], tl.int32)
        for begin in range(0, CHUNK, PART):
            ids = part * CHUNK + begin + tl.arange(0, PART)
            x, kept = load(logits + row * stride, rule, ids, ids < vocab)
            weight = _weight(x, best, temperature)
            above = kept[:, None] & (x[:, None] >= edges[None, :])
            mass += tl.where(above, weight[:, None], 0.0)
            count += above.to(tl.int32)
        to = (row * chunks + part) * EDGES + tl.arange(0, EDGES)
        tl.store(masses + to, tl.sum(mass, axis=0))
        tl.store(counts + to, tl.sum(count, axis=0))


@triton.jit
def _ordered(x):
    """float32 to int64, keeping the order; the two zeros are equal to a sort, so they are one here."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _first_over(above, target, EDGES: tl.constexpr):
    """The first edge above which there is more than ``target``; the last if rounding says there is none."""
    j = tl.arange(0, EDGES)
    return tl.min(tl.where(above > target, j, EDGES - 1))


@triton.jit
def _at(values, index, EDGES: tl.constexpr):
    """values[index]; 0 for index -1."""
    return tl.sum(tl.where(tl.arange(0, EDGES) == index, values, 0))


@triton.jit
def _within(x, edges, first, last, EDGES: tl.constexpr):
    """Whether ``x`` lies above edge ``last`` and not above edge ``first - 1``; nothing does if last < first."""
    low = tl.where(last < EDGES - 1, _at(edges, last, EDGES), float("-inf"))
    high = _at(edges, first - 1, EDGES)
    return (x >= low) & ((first == 0) | (x < high)) & (first <= last)


@triton.jit
def _store_stretch(bounds, base, edges, above, best, worst, first, last, EDGES: tl.constexpr):
    """Lowest and highest key between two edges, and what lies above."""
    low = tl.where(last < EDGES - 1, _at(edges, last, EDGES), worst)
    # What is equal to an edge lies above it.
    below_edge = (_ordered(_at(edges, first - 1, EDGES)) << 32) - 1
    tl.store(bounds, _ordered(low) << 32)
    tl.store(bounds + 1, tl.where(first > 0, below_edge, (_ordered(best) << 32) + _ID_MASK))
    tl.store(base, _at(above, first - 1, EDGES))


@triton.jit
def candidates_kernel(
    logits, stride, rules, vocab, stats, places, chunks, temperatures, top_ps, top_ks, uniforms,
    edges_of, masses, counts, ranges, bounds, candidates, max_listed,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, EDGES: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Lists one chunk's ids in three stretches between edges: where top-k cuts, where top-p cuts, where the draw is."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    rule = rules + row * WIDTH
    if (temperature > 0) & (tl.load(rule) < 0):
        top_p = tl.load(top_ps + row)
        top_k = tl.load(top_ks + row)
        drawn = tl.load(uniforms + row)
        best, worst = extent(stats, row, chunks, CHUNKS)
        # Kept rather than worked out anew: the list must be as long as was counted, to the last bit of an edge.
        edges = tl.load(edges_of + row * EDGES + tl.arange(0, EDGES))
        c = tl.arange(0, CHUNKS)[:, None]
        at = (row * chunks + c) * EDGES + tl.arange(0, EDGES)[None, :]
        count = tl.load(counts + at, mask=c < chunks, other=0)
        above = tl.sum(tl.load(masses + at, mask=c < chunks, other=0.0), axis=0)
        number = tl.sum(count, axis=0)
        total = _at(above, EDGES - 1, EDGES)
        num_kept = _at(number, EDGES - 1, EDGES)
        # Where top-k cuts is known between two edges only, so the weight that it leaves is known between two values,
        # and so are the cut of top-p and the draw after it.
        cut_by_rank = (top_k > 0) & (top_k < num_kept)
        rank = tl.where(cut_by_rank, _first_over(number, top_k - 1, EDGES), EDGES - 1)
        least = tl.where(cut_by_rank, _at(above, rank - 1, EDGES), total)
        most = tl.where(cut_by_rank, _at(above, rank, EDGES), total)
        cut_by_mass = top_p < 1
        cut_first = _first_over(above, top_p * least, EDGES)
        cut_last = _first_over(above, top_p * most, EDGES)
        least = tl.where(cut_by_mass, _at(above, cut_first - 1, EDGES), least)
        most = tl.where(cut_by_mass, _at(above, cut_last, EDGES), most)
        first = _first_over(above, drawn * least, EDGES)
        last = _first_over(above, drawn * most, EDGES)
        # What does not cut has no stretch.
        rank_last = tl.where(cut_by_rank, rank, -1)
        cut_last = tl.where(cut_by_mass, cut_last, -1)
        # How often a cumulated count counts: once for the last edge of listed ones, minus once for the one before.
        j = tl.arange(0, EDGES)
        here = (
            (j == rank_last) | ((j >= cut_first) & (j <= cut_last)) | ((j >= first) & (j <= last))
        )
        after = (j + 1 == rank_last) | ((j + 1 >= cut_first) & (j + 1 <= cut_last))
        after = after | ((j + 1 >= first) & (j + 1 <= last))
        between = count * (here.to(tl.int32) - after.to(tl.int32))[None, :]
        listed = tl.sum(between)
        if part == 0:
            ranges += row * 7
            bounds += row * 6
            tl.store(ranges, total)
            tl.store(ranges + 1, num_kept.to(tl.float64))
            tl.store(ranges + 2, listed.to(tl.float64))
            tl.store(ranges + 3, _at(number, rank - 1, EDGES).to(tl.float64))
            _store_stretch(bounds, ranges + 4, edges, above, best, worst, rank, rank, EDGES)
            _store_stretch(
                bounds + 2, ranges + 5, edges, above, best, worst, cut_first, cut_last, EDGES
            )
            _store_stretch(bounds + 4, ranges + 6, edges, above, best, worst, first, last, EDGES)
        if listed <= max_listed:
            begin = tl.sum(tl.where(c < part, between, 0))
            if tl.sum(tl.where(c == part, between, 0)) > 0:
                ids = part * CHUNK + tl.arange(0, CHUNK)
                x, kept = load(logits + row * stride, rule, ids, ids < vocab)
                taken = _within(x, edges, rank, rank_last, EDGES)
                taken = taken | _within(x, edges, cut_first, cut_last, EDGES)
                taken = kept & (taken | _within(x, edges, first, last, EDGES))
                place = begin + tl.cumsum(taken.to(tl.int32), axis=0) - 1
                tl.store(candidates + row * max_listed + place, ids, mask=taken)


@triton.jit
def _logit(key):
    """The logit in a key."""
    bits = (key >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _element(logits, rule, candidates, places, is_list, number, best, temperature):
    """Keys and weights of the candidates at ``places``: of a list, or of the whole row."""
    inside = places < number
    ids = tl.load(candidates + places, mask=inside & is_list, other=0)
    ids = tl.where(is_list, ids, places)
    x, kept = load(logits, rule, ids, inside)
    key = tl.where(kept, (_ordered(x) << 32) + (ids.to(tl.int64) ^ _ID_MASK), _NO_KEY)
    return key, tl.where(kept, _weight(x, best, temperature), 0.0)


@triton.jit
def _summed(key, weight, COUNT: tl.constexpr):
    """The weights, or 1 for every candidate if COUNT."""
    return tl.where(key > _NO_KEY, 1.0, 0.0).to(tl.float64) if COUNT else weight


@triton.jit
def _search(
    logits, rule, candidates, is_list, number, best, temperature, keys, weights,
    base, target, low, high, COUNT: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """The first candidate, best first, with which more than ``target`` is reached: its key, and what is reached.

    ``base`` is what lies above ``high`` (other candidates too); ``keys`` and ``weights`` are those of the first BLOCK,
    mostly of all. What is summed is weights, or numbers if COUNT. The answer lies in [low, high] throughout; each pass
    cuts that at ``high`` itself and at PIVOTS - 1 places below, evenly by logit, or by id between equal logits, and
    ``high`` always moves to a candidate, so every pass ends nearer.
    """
    top = high
    j = tl.arange(0, PIVOTS)
    share = j.to(tl.float32) / PIVOTS
    reached = base
    going = 1
    while going > 0:
        low_logit = _logit(low)
        high_logit = _logit(high)
        by_logit = _ordered(high_logit * (1 - share) + low_logit * share) << 32
        by_id = high - ((high - low) & _ID_MASK) * j // PIVOTS
        pivots = tl.where(high_logit > low_logit, by_logit, by_id)
        pivots = tl.where(j == 0, high, tl.minimum(tl.maximum(pivots, low), high))
        is_over = keys[:, None] >= pivots[None, :]
        is_counted = is_over & (keys <= top)[:, None]
        over = tl.where(is_counted, _summed(keys, weights, COUNT)[:, None], 0.0)
        below = tl.where(is_over, _NO_KEY, keys[:, None])
        for begin in range(BLOCK, number, BLOCK):
            key, weight = _element(
                logits, rule, candidates, begin + tl.arange(0, BLOCK), is_list, number, best,
                temperature,
            )  # fmt: skip
            is_more = key[:, None] >= pivots[None, :]
            is_counted = is_more & (key <= top)[:, None]
            over += tl.where(is_counted, _summed(key, weight, COUNT)[:, None], 0.0)
            below = tl.maximum(below, tl.where(is_more, _NO_KEY, key[:, None]))
        sums = base + tl.sum(over, axis=0)
        first = tl.min(tl.where(sums > target, j, PIVOTS))
        next_high = tl.max(tl.where(j == first - 1, tl.max(below, axis=0), _NO_KEY))
        reached = tl.sum(tl.where(j == 0, sums, 0.0))
        going = tl.where((first > 0) & (next_high >= low), 1, 0)
        low = tl.maximum(low, tl.max(tl.where(j == first, pivots, _NO_KEY)))
        high = tl.where(going > 0, next_high, high)
    return high, reached


@triton.jit
def draw_kernel(
    logits, stride, rules, vocab, stats, places, chunks, temperatures, top_ps, top_ks, uniforms,
    ranges, bounds, candidates, max_listed, ids, logprobs, bad,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Top-k, top-p and the draw among one row's candidates."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    rule = rules + row * WIDTH
    temperature = tl.load(temperatures + row)
    token = first_best(stats, places, row, chunks, vocab, CHUNKS)
    not_finite = tl.sum(
        tl.load(
            places + (row * chunks + tl.arange(0, CHUNKS)) * 2 + 1,
            mask=tl.arange(0, CHUNKS) < chunks,
            other=0,
        )
    )
    if (temperature > 0) & (tl.load(rule) < 0) & (not_finite == 0):
        best, _worst = extent(stats, row, chunks, CHUNKS)
        candidates += row * max_listed
        ranges += row * 7
        bounds += row * 6
        left = tl.load(ranges)
        num_kept = tl.load(ranges + 1)
        number = tl.load(ranges + 2).to(tl.int32)
        is_list = number <= max_listed
        number = tl.where(is_list, number, vocab)
        keys, weights = _element(
            logits, rule, candidates, tl.arange(0, BLOCK), is_list, number, best, temperature
        )
        top_k = tl.load(top_ks + row).to(tl.float64)
        low = tl.load(bounds + 4)
        if (top_k > 0) & (top_k < num_kept):
            highest = tl.load(bounds + 1)
            ranked, _num_left = _search(
                logits, rule, candidates, is_list, number, best, temperature, keys, weights,
                tl.load(ranges + 3), top_k - 1, tl.load(bounds), highest, True, BLOCK, PIVOTS,
            )  # fmt: skip
            sums = tl.where((keys >= ranked) & (keys <= highest), weights, 0.0)
            for begin in range(BLOCK, number, BLOCK):
                key, weight = _element(
                    logits, rule, candidates, begin + tl.arange(0, BLOCK), is_list, number, best,
                    temperature,
                )  # fmt: skip
                sums += tl.where((key >= ranked) & (key <= highest), weight, 0.0)
            left = tl.load(ranges + 4) + tl.sum(sums)
            low = tl.maximum(low, ranked)
        top_p = tl.load(top_ps + row)
        if top_p < 1:
            cut, left = _search(
                logits, rule, candidates, is_list, number, best, temperature, keys, weights,
                tl.load(ranges + 5), top_p * left, tl.load(bounds + 2), tl.load(bounds + 3),
                False, BLOCK, PIVOTS,
            )  # fmt: skip
            low = tl.maximum(low, cut)
        # Below the sum even where the product rounds up to it.
        target = tl.minimum(tl.load(uniforms + row) * left, left * _BELOW_ONE)
        key, _reached = _search(
            logits, rule, candidates, is_list, number, best, temperature, keys, weights,
            tl.load(ranges + 6), target, low, tl.load(bounds + 5), False, BLOCK, PIVOTS,
        )  # fmt: skip
        token = ((key & _ID_MASK) ^ _ID_MASK).to(tl.int32)
    settle(logits, rule, row, token, stats, places, chunks, ids, logprobs, bad, CHUNKS)
