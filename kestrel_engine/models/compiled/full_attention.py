"""Attention of many queries to the same keys on a CPU, in bfloat16, compiled by LLVM for the processor at hand.

A thread computes some rows of queries at a time: all of their scores, which stay in its caches in float32, then the
softmax, then the sums of values. Products are bfloat16 pairs with sums in float32. torch's kernel reaches a third of
the processor's rate at the tower's shapes, unless the processor has AMX. A row's result does not depend on the other
rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import few_rows, host_code
from .host_code import LANES, LINE

MOST_SIZE, FEWEST = 128, 8
"""The largest head, and the fewest queries."""
_ROWS = 8
"""Queries that a thread computes together."""
_COLUMNS = 3 * LANES
"""Keys, and numbers of a value, whose sums are in registers together."""

_POWERS = 4
"""Of the polynomial for exponentials: its error is a fiftieth of what the rounding to bfloat16 takes."""


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """Returns the attention of all queries of a crop or sequence to its keys, in the shape of ``q``.

    ``q``: [n, queries, heads, head_dim]. ``k``, ``v``: [n, keys, heads, head_dim]. ``causal``: the last query attends
    to all keys, and each one before it to one key less than the next one. The softmax is float32.
    """
    if _takes(q, k, v):
        found = [_attend(*each, causal) for each in zip(q, k, v, strict=True)]
        return found[0].unsqueeze(0) if len(found) == 1 else torch.stack(found)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    queries, keys = q.shape[2], k.shape[2]
    mask = None
    if causal and queries < keys:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    causal = causal and mask is None
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    return attended.transpose(1, 2)


def _takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    size = q.shape[-1]
    return (
        q.dtype == k.dtype == v.dtype == torch.bfloat16
        and q.device.type == "cpu"
        and q.shape[1] >= FEWEST
        and size % 8 == 0
        and size <= MOST_SIZE
        and len(q) > 0
        and _reads(q[0])
        and not torch.is_grad_enabled()
        and few_rows.available()
        and bool(host_code.features().get("avx512bf16"))
        # torch's attention multiplies tiles then, and takes a fourth to three fifths of the time.
        and not host_code.features().get("amx-bf16")
    )


def _reads(x: Tensor) -> bool:
    """Whether ``x`` [n, heads, size] is read as it is: in pairs of numbers."""
    return x.stride()[1:] == (x.shape[-1], 1) and x.stride(0) % 2 == 0


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    queries, heads, size = q.shape
    keys, padded = len(k), -len(k) % _COLUMNS + len(k)
    wide = -(-size // LANES) * LANES
    k, v = (x if _reads(x) else x.contiguous() for x in (k, v))
    # Pairs of numbers of a key, and numbers of a pair of values, are next to each other.
    of_keys = torch.empty(heads, size // 2, padded, 2, dtype=q.dtype)
    of_values = torch.empty(heads, padded // 2, wide, 2, dtype=q.dtype)
    scores = torch.empty(torch.get_num_threads(), _ROWS, padded, dtype=torch.float32)
    out = torch.empty(queries, heads, size, dtype=q.dtype)
    sync = torch.zeros(3, LINE, dtype=torch.int64)
    pointers = (each.data_ptr() for each in (q, k, v, of_keys, of_values, scores, out, sync))
    strides = (each.stride(0) for each in (q, k, v))
    _compiled(size)(*pointers, queries, keys, padded, heads, *strides, causal)
    return out


@cache
def _compiled(size: int) -> Callable[..., None]:
    return host_code.compiled(_Code(size))


class _Code(host_code.Code):
    """Each thread takes a head's keys and values after the other, then a block of a head's queries after the other."""

    arguments = (
        *("q", "k", "v", "of_keys", "of_values", "scores", "out", "sync"),  # pointers
        *("queries", "keys", "padded", "heads", "stride", "stride_k", "stride_v", "causal"),
    )

    def __init__(self, size: int) -> None:
        super().__init__(f"full_attention_{size}")
        self._head, self._wide = size, -(-size // LANES) * LANES

    def _share(self) -> None:
        b, long = self._b, self._long
        queries, padded = self._size("queries"), self._size("padded")
        blocks = b.sdiv(b.add(queries, long(_ROWS - 1)), long(_ROWS))
        self._turn = self._variable(long)
        with self._claims(long(1), self._size("heads")) as head:
            self._order_keys(head)
            self._order_values(head)
        self._meet()
        begin = b.mul(self._of_team("thread_num"), b.mul(padded, long(_ROWS)))
        lines = [b.add(begin, b.mul(padded, long(r))) for r in range(_ROWS)]
        last = b.sub(queries, long(1))
        with self._claims(long(2), b.mul(self._size("heads"), blocks)) as item:
            head = b.sdiv(item, blocks)
            start = b.mul(b.srem(item, blocks), long(_ROWS))
            # A block beyond the end computes the last query again.
            rows = [b.add(start, long(r)) for r in range(_ROWS)]
            rows = [b.select(b.icmp_signed("<", row, last), row, last) for row in rows]
            self._score(head, rows, lines)
            with self._loop(long(0), long(_ROWS), 1) as r:
                self._softmax(b.add(begin, b.mul(padded, r)), self._reach(b.add(start, r)))
            self._add_values(head, rows, lines)

    def _row(self, key: Any) -> Any:
        """The row of a key. Beyond the end, it is the last one again, whose score is not used."""
        last = self._b.sub(self._size("keys"), self._long(1))
        return self._b.select(self._b.icmp_signed("<", key, last), key, last)

    def _order_keys(self, head: Any) -> None:
        b, long, padded, pairs = self._b, self._long, self._size("padded"), self._head // 2
        stride = b.sdiv(self._size("stride_k"), long(2))
        with self._loop(long(0), padded, LANES) as key:
            rows = [b.mul(self._row(b.add(key, long(i))), stride) for i in range(LANES)]
            for first in range(0, pairs, LANES):
                at, left = b.add(b.mul(head, long(pairs)), long(first)), long(pairs - first)
                found = [self._load_first(left, "k", b.add(row, at), self._words) for row in rows]
                for i, vector in enumerate(self._transposed(found)[: pairs - first]):
                    place = b.add(b.mul(b.add(at, long(i)), padded), key)
                    b.store(vector, self._at("of_keys", place, self._word), align=4)

    def _order_values(self, head: Any) -> None:
        b, long, halves = self._b, self._long, self._vector(self._half)
        pairs = b.sdiv(self._size("padded"), long(2))
        high = self._ir.Constant(self._words, [16] * LANES)
        with self._loop(long(0), pairs, 1) as pair:
            out = b.mul(b.add(b.mul(head, pairs), pair), long(self._wide))
            keys = [b.add(b.mul(pair, long(2)), long(i)) for i in range(2)]
            rows = [b.mul(self._row(key), self._size("stride_v")) for key in keys]
            for first in range(0, self._head, LANES):
                at, left = b.mul(head, long(self._head)), long(self._head - first)
                x, y = (
                    b.zext(
                        self._load_first(left, "v", b.add(row, b.add(at, long(first))), halves),
                        self._words,
                    )
                    for row in rows
                )
                place = self._at("of_values", b.add(out, long(first)), self._word)
                b.store(b.or_(x, b.shl(y, high)), place, align=4)

    def _score(self, head: Any, rows: list[Any], lines: list[Any]) -> None:
        b, long, padded = self._b, self._long, self._size("padded")
        stride, of_head = self._size("stride"), b.mul(head, long(self._head))
        places = [b.sdiv(b.add(b.mul(row, stride), of_head), long(2)) for row in rows]  # of pairs
        begin = b.mul(head, b.mul(padded, long(self._head // 2)))
        with self._loop(long(0), padded, _COLUMNS) as key:
            start, pairs = b.add(begin, key), long(self._head // 2)
            sums = self._products("q", places, "of_keys", start, padded, pairs, 3)
            for line, of_row in zip(lines, sums, strict=True):
                for i, total in enumerate(of_row):
                    at = b.add(b.add(line, key), long(i * LANES))
                    b.store(total, self._at("scores", at, self._float), align=4)

    def _reach(self, query: Any) -> Any:
        """The keys to which a query attends."""
        b, last = self._b, self._b.sub(self._size("queries"), self._long(1))
        later = b.sub(last, b.select(b.icmp_signed("<", query, last), query, last))
        return b.sub(self._size("keys"), b.mul(later, self._size("causal")))

    def _softmax(self, line: Any, keys: Any) -> None:
        """Writes a row's exponentials in bfloat16 over its scores, and one over their sum where its last score was.
        ``keys``: those to which it attends."""
        b, long, padded = self._b, self._long, self._size("padded")
        lanes = self._ir.Constant(self._words, list(range(LANES)))
        lowest = self._splat(self._float(-math.inf))
        largest = self._known("llvm.vector.reduce.fmax.v16f32", self._float, self._floats)
        top, total = self._variable(self._floats), self._variable(self._floats)
        b.store(lowest, top)
        with self._loop(b.and_(keys, long(-LANES)), padded, LANES) as key:
            left = self._splat(b.trunc(b.sub(keys, key), self._word))
            x = self._load("scores", b.add(line, key), self._floats)
            x = b.select(b.icmp_signed("<", lanes, left), x, lowest)
            b.store(x, self._at("scores", b.add(line, key), self._float), align=4)
        with self._loop(long(0), padded, LANES) as key:
            x, most = (
                self._load("scores", b.add(line, key), self._floats),
                b.load(top, typ=self._floats),
            )
            b.store(b.select(b.fcmp_ordered(">", x, most), x, most), top)
        # Two to the power of scores times ``factor`` minus the largest one.
        factor = self._splat(self._float(self._head**-0.5 * math.log2(math.e)))
        most = self._splat(b.call(largest, [b.load(top, typ=self._floats)]))
        most = b.fneg(b.fmul(most, factor))
        halves = b.mul(line, long(2))
        with self._loop(long(0), padded, LANES) as key:
            x = self._fma(self._load("scores", b.add(line, key), self._floats), factor, most)
            x = self._power_of_two(x, _POWERS)
            b.store(b.fadd(b.load(total, typ=self._floats), x), total)
            narrow = b.fptrunc(x, self._vector(host_code.bfloat()))
            b.store(narrow, self._at("scores", b.add(halves, key), self._half), align=2)
        inverse = b.fdiv(self._float(1.0), self._sum(b.load(total, typ=self._floats)))
        b.store(inverse, self._at("scores", self._last_of(line), self._float))

    def _last_of(self, line: Any) -> Any:
        return self._b.add(line, self._b.sub(self._size("padded"), self._long(1)))

    def _add_values(self, head: Any, rows: list[Any], lines: list[Any]) -> None:
        b, long = self._b, self._long
        pairs = b.sdiv(self._size("padded"), long(2))
        begin, heads = b.mul(head, b.mul(pairs, long(self._wide))), self._size("heads")
        outs = [b.mul(b.add(b.mul(row, heads), head), long(self._head)) for row in rows]
        for column in range(0, self._wide, _COLUMNS):
            count = min(_COLUMNS, self._wide - column) // LANES
            start = b.add(begin, long(column))
            sums = self._products(
                "scores", lines, "of_values", start, long(self._wide), pairs, count
            )
            for out, line, of_row in zip(outs, lines, sums, strict=True):
                inverse = self._load("scores", self._last_of(line), self._float)
                for i, total in enumerate(of_row):
                    y = b.fmul(total, self._splat(inverse))
                    y = b.fptrunc(y, self._vector(host_code.bfloat()))
                    at = column + i * LANES
                    if at + LANES > self._head:
                        places = self._ir.Constant(self._vector(self._word, 8), list(range(8)))
                        y = b.shuffle_vector(y, y, places)
                    place = self._at("out", b.add(out, long(at)), self._half)
                    b.store(y, place, align=2)

    def _products(
        self, x: str, places: list[Any], y: str, start: Any, stride: Any, pairs: Any, count: int
    ) -> list[list[Any]]:
        """Sums of ``pairs`` products of pairs: for each of ``places`` in ``x``, ``count`` vectors of ``y``, whose rows
        of pairs are ``stride`` apart."""
        b, kind = self._b, self._vector(host_code.bfloat(), 32)
        kinds = (self._floats, self._floats, kind, kind)
        dot = self._known("llvm.x86.avx512bf16.dpbf16ps.512", *kinds)
        totals = [[self._variable(self._floats) for _ in range(count)] for _ in places]
        with self._loop(self._long(0), pairs, 1) as pair:
            at = b.add(start, b.mul(pair, stride))
            vectors = [
                b.bitcast(self._load(y, b.add(at, self._long(i * LANES)), self._words, 4), kind)
                for i in range(count)
            ]
            for place, of_row in zip(places, totals, strict=True):
                number = self._load(x, b.add(place, pair), self._word)
                splat = b.bitcast(self._splat(number), kind)
                for vector, total in zip(vectors, of_row, strict=True):
                    b.store(b.call(dot, [b.load(total, typ=self._floats), splat, vector]), total)
        return [[b.load(total, typ=self._floats) for total in of_row] for of_row in totals]
