"""Attention of one query a sequence on a CPU, compiled by LLVM for the processor at hand.

It reads keys and values in place, by slot, so its time is that of one read. torch's attention first needs a copy of
them and reads that slowly. Sums and softmax are float32. Rows go through the positions together, block by block: keys
and values that several rows share come from memory once. A row's result does not depend on the other rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import few_rows, host_code
from .host_code import LANES

MORE = 2 * LANES
"""Numbers of a line of slots or scores beyond the longest sequence."""
_TOGETHER = 4
"""Positions that are computed together."""
_BLOCK = 32
"""Positions that all rows go through before the next ones: the keys and values of a block stay in the caches."""
_AHEAD = 8
"""Positions between what is computed and what begins to be read."""
_SMALL = 1024
"""Bytes of a position's keys up to which torch attends in float32: so few are not worth the compiler's 0.2 s."""


def available(pool: Tensor) -> bool:
    """Whether `DecodeAttention` takes ``pool`` [layers, num_slots, heads, head_dim]."""
    is_narrow = pool.dtype in (torch.bfloat16, torch.float16)
    return (
        pool.device.type == "cpu"
        and (is_narrow or (pool.dtype == torch.float32 and pool[0, 0].nbytes > _SMALL))
        and pool.shape[-1] % LANES == 0
        and few_rows.available()
    )


def compile_for(pool: Tensor) -> None:
    """Compiles what `DecodeAttention` needs for ``pool``, if it takes it, so that no later call waits for that."""
    if available(pool):
        _compiled(pool.dtype, pool.shape[-1])


class DecodeAttention:
    """`Attention` of one forward pass with one token of each sequence, which attends to all positions of its sequence.

    ``key_pool``, ``value_pool``: pools that are `available`. ``slots``: for each sequence, the slots of its positions,
    [positions] int64, in order. The last slot is the token's.
    """

    def __init__(self, key_pool: Tensor, value_pool: Tensor, slots: list[Tensor]) -> None:
        self.keys, self.values = key_pool, value_pool
        self.newest = torch.stack([each[-1] for each in slots])
        self.lengths = torch.tensor([len(each) for each in slots])
        # What is computed or read beyond a sequence's end is its newest position again.
        self.slots = self.newest[:, None].repeat(1, int(self.lengths.max()) + MORE)
        for line, each in zip(self.slots, slots, strict=True):
            line[: len(each)] = each

    @property
    def longest(self) -> int:
        """The most positions of a sequence."""
        return self.slots.shape[1] - MORE

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values, q = self.keys[layer], self.values[layer], q.contiguous()
        keys.index_copy_(0, self.newest, k)
        values.index_copy_(0, self.newest, v)
        rows, heads, size = q.shape
        longest = self.longest
        scores = torch.empty(rows, heads, longest + MORE, dtype=torch.float32)
        out = torch.zeros(q.shape, dtype=torch.float32)
        pointers = (q, keys, values, self.slots, self.lengths, scores, out)
        run = _compiled(q.dtype, size)
        run(*(tensor.data_ptr() for tensor in pointers), rows, heads, longest)
        return out.to(q.dtype)


@cache
def _compiled(dtype: torch.dtype, size: int) -> Callable[..., None]:
    return host_code.compiled(Code(dtype, size))


class Code(host_code.Code):
    """Each thread computes its heads."""

    arguments = (
        *("q", "keys", "values", "slots", "lengths", "scores", "out"),  # pointers
        *("rows", "heads", "longest"),
    )

    def __init__(self, dtype: torch.dtype, size: int, module: Any = None) -> None:
        super().__init__(f"attention_{dtype}_{size}", module)
        self._dtype, self._size_of_head = dtype, size
        self._number = self._float if dtype == torch.float32 else self._half
        self._in_pairs = dtype == torch.bfloat16 and size % (2 * LANES) == 0

    def function(self) -> Any:
        """Adds a function to the module that one thread calls, for the heads from the second argument to the third
        one, exclusive."""
        attend = self._begin("attend", self._long, self._long)
        self._attend(*attend.args[1:])
        self._b.ret_void()
        return attend

    def _share(self) -> None:
        self._attend(*self._part(self._size("heads")))

    def _attend(self, first: Any, end: Any) -> None:
        b, long, rows = self._b, self._long, self._size("rows")
        for work, name in ((self._score, "keys"), (self._add_values, "values")):
            with (
                self._loop(long(0), self._size("longest"), _BLOCK) as at,
                self._loop(long(0), rows, 1) as row,
            ):
                length = self._load("lengths", row, long)
                block_end = b.add(at, long(_BLOCK))
                block_end = b.select(b.icmp_signed("<", length, block_end), length, block_end)
                with self._loop(at, block_end, _TOGETHER) as position:
                    places = self._places(b.add(self._line_of(row), position))
                    with self._loop(first, end, 1) as head:
                        found = [self._head(name, b.add(place, head)) for place in places]
                        for place in self._places_ahead:
                            self._fetch_head(name, b.add(place, head))
                        line = b.add(b.mul(row, self._size("heads")), head)
                        work(line, b.add(self._line_of(line), position), found)
            with self._loop(long(0), rows, 1) as row, self._loop(first, end, 1) as head:
                line = b.add(b.mul(row, self._size("heads")), head)
                self._softmax(row, line) if name == "keys" else self._normalise(line)

    def _places(self, at: Any) -> list[Any]:
        """Where the heads begin at the positions that are computed together, whose first slot is ``at``. Those that
        follow begin to be read."""
        b, heads = self._b, self._size("heads")
        now, self._places_ahead = (
            [
                b.mul(self._load("slots", b.add(at, self._long(start + i)), self._long), heads)
                for i in range(_TOGETHER)
            ]
            for start in (0, _AHEAD)
        )
        return now

    def _score(self, line: Any, scores: Any, keys: list[list[Any]]) -> None:
        """Products of a query with keys. ``line``: the row's head. ``scores``: where the first one's score is."""
        b, totals = self._b, []
        scale = self._splat(self._float(self._size_of_head**-0.5))
        q = [b.fmul(x, scale) for x in self._head("q", line)]
        for key in keys:
            total = self._ir.Constant(self._floats, None)
            for x, k in zip(q, key, strict=True):
                total = self._fma(x, k, total)
            totals.append(total)
        x, y = (self._folded(totals[i], totals[i + 1], 8) for i in (0, 2))
        total = self._folded(x, y, 4)
        for width in (2, 1):
            total = self._folded(total, total, width)
        four = self._ir.Constant(self._vector(self._word, _TOGETHER), [*range(_TOGETHER)])
        b.store(
            b.shuffle_vector(total, total, four), self._at("scores", scores, self._float), align=4
        )

    def _folded(self, x: Any, y: Any, width: int) -> Any:
        """The sums of each ``width`` numbers of two vectors and the ``width`` that follow them."""
        b = self._b
        low = [i for i in range(2 * LANES) if i // width % 2 == 0]
        parts = (
            b.shuffle_vector(x, y, self._ir.Constant(self._words, places))
            for places in (low, [i + width for i in low])
        )
        return b.fadd(*parts)

    def _softmax(self, row: Any, line: Any) -> None:
        """Writes a row's exponentials over its scores, and one over their sum behind them."""
        b, long = self._b, self._long
        begin = self._line_of(line)
        end = b.add(begin, self._load("lengths", row, long))
        lanes = self._ir.Constant(self._words, list(range(LANES)))
        lowest = self._splat(self._float(-math.inf))
        largest = self._known("llvm.vector.reduce.fmax.v16f32", self._float, self._floats)
        top, total = self._variable(self._floats), self._variable(self._floats)
        b.store(lowest, top)
        with self._loop(begin, end, LANES) as at:
            left = self._splat(b.trunc(b.sub(end, at), self._word))
            x = self._load("scores", at, self._floats)
            x = b.select(b.icmp_signed("<", lanes, left), x, lowest)
            b.store(x, self._at("scores", at, self._float), align=4)
            most = b.load(top, typ=self._floats)
            b.store(b.select(b.fcmp_ordered(">", x, most), x, most), top)
        most = self._splat(b.call(largest, [b.load(top, typ=self._floats)]))
        with self._loop(begin, end, LANES) as at:
            x = self._exp(b.fsub(self._load("scores", at, self._floats), most))
            b.store(x, self._at("scores", at, self._float), align=4)
            b.store(b.fadd(b.load(total, typ=self._floats), x), total)
        inverse = b.fdiv(self._float(1.0), self._sum(b.load(total, typ=self._floats)))
        b.store(inverse, self._at("scores", self._last_of(line), self._float))

    def _add_values(self, line: Any, scores: Any, values: list[list[Any]]) -> None:
        b = self._b
        weights = [
            self._splat(self._load("scores", b.add(scores, self._long(i)), self._float))
            for i in range(_TOGETHER)
        ]
        for i, place in enumerate(self._outs(line)):
            total = b.load(place, typ=self._floats, align=4)
            for weight, value in zip(weights, values, strict=True):
                total = self._fma(weight, value[i], total)
            b.store(total, place, align=4)

    def _normalise(self, line: Any) -> None:
        b, words = self._b, self._words
        inverse = self._splat(self._load("scores", self._last_of(line), self._float))
        places = self._outs(line)
        found = [b.fmul(b.load(each, typ=self._floats, align=4), inverse) for each in places]
        if self._in_pairs:
            halves = [[n // 2 + LANES * (n % 2) for n in range(i, i + LANES)] for i in (0, LANES)]
            found = [
                b.shuffle_vector(*found[i : i + 2], self._ir.Constant(words, half))
                for i in range(0, len(found), 2)
                for half in halves
            ]
        for vector, place in zip(found, places, strict=True):
            b.store(vector, place, align=4)

    def _outs(self, line: Any) -> list[Any]:
        """Where the vectors of a row's head are in ``out``."""
        begin = self._b.mul(line, self._long(self._size_of_head))
        return [
            self._at("out", self._b.add(begin, self._long(i)), self._float)
            for i in range(0, self._size_of_head, LANES)
        ]

    def _line_of(self, line: Any) -> Any:
        """Where the scores of a row's head begin, or the slots of a row."""
        return self._b.mul(line, self._b.add(self._size("longest"), self._long(MORE)))

    def _last_of(self, line: Any) -> Any:
        return self._b.sub(self._line_of(self._b.add(line, self._long(1))), self._long(1))

    def _fetch_head(self, name: str, line: Any) -> None:
        for i in range(0, self._size_of_head, 64 // self._dtype.itemsize):
            number = self._b.add(self._b.mul(line, self._long(self._size_of_head)), self._long(i))
            self._fetch(name, number, self._number)

    def _head(self, name: str, line: Any) -> list[Any]:
        """The numbers of a head, as floats: ``_in_pairs`` those with even places of 32, then those with odd ones."""
        b, long, found = self._b, self._long, []
        begin = b.mul(line, long(self._size_of_head))
        if self._in_pairs:
            for i in range(0, self._size_of_head, 2 * LANES):
                pairs = self._load(name, b.add(begin, long(i)), self._vector(self._half, 2 * LANES))
                pairs = b.bitcast(pairs, self._words)
                found += [self._low_halves(pairs), self._high_halves(pairs)]
            return found
        for i in range(0, self._size_of_head, LANES):
            x = self._load(name, b.add(begin, long(i)), self._vector(self._number))
            if self._dtype == torch.float32:
                found.append(x)
            elif self._dtype == torch.bfloat16:
                found.append(self._low_halves(b.zext(x, self._words)))
            else:
                x = b.bitcast(x, self._vector(self._ir.HalfType()))
                found.append(b.fpext(x, self._floats))
        return found
