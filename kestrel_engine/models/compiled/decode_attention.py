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
"""Numbers of a line of slots or scores beyond the longest sequence: slots of the next block are read early."""


def available(pool: Tensor) -> bool:
    """Whether `DecodeAttention` takes ``pool`` [layers, num_slots, heads, head_dim]."""
    return (
        pool.device.type == "cpu"
        and pool.dtype in (torch.bfloat16, torch.float16)
        and pool.shape[-1] % LANES == 0
        and few_rows.available()
    )


class DecodeAttention:
    """`Attention` of one forward pass with one token of each sequence, which attends to all positions of its sequence.

    ``key_pool``, ``value_pool``: pools that are `available`. ``slots``: for each sequence, the slots of its positions,
    [positions] int64, in order. The last slot is the token's.
    """

    def __init__(self, key_pool: Tensor, value_pool: Tensor, slots: list[Tensor]) -> None:
        self.keys, self.values = key_pool, value_pool
        self.newest = torch.stack([each[-1] for each in slots])
        self.lengths = torch.tensor([len(each) for each in slots])
        padded = torch.nn.utils.rnn.pad_sequence(slots, batch_first=True)
        self.slots = torch.nn.functional.pad(padded, (0, MORE))

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
        run = _compiled(q.dtype == torch.bfloat16, size)
        run(*(tensor.data_ptr() for tensor in pointers), rows, heads, longest)
        return out.to(q.dtype)


@cache
def _compiled(bfloat: bool, size: int) -> Callable[..., None]:
    return host_code.compiled(Code(bfloat, size))


class Code(host_code.Code):
    """Each thread computes its heads."""

    arguments = (
        *("q", "keys", "values", "slots", "lengths", "scores", "out"),  # pointers
        *("rows", "heads", "longest"),
    )

    def __init__(self, bfloat: bool, size: int, module: Any = None) -> None:
        super().__init__(f"attention_{bfloat}_{size}", module)
        self._bfloat, self._size_of_head = bfloat, size

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
        b, long = self._b, self._long
        self._first, self._count = first, b.trunc(b.sub(end, first), self._word)
        heads, rows = self._size("heads"), self._size("rows")
        for work in (self._score, self._add_values):
            with (
                self._loop(long(0), self._size("longest"), LANES) as at,
                self._loop(long(0), rows, 1) as row,
            ):
                length = self._load("lengths", row, long)
                block_end = b.add(at, long(LANES))
                block_end = b.select(b.icmp_signed("<", length, block_end), length, block_end)
                with self._loop(first, end, 1) as head:
                    work(row, b.add(b.mul(row, heads), head), head, at, block_end)
            if work == self._score:
                with self._loop(long(0), rows, 1) as row, self._loop(first, end, 1) as head:
                    self._softmax(row, b.add(b.mul(row, heads), head))

    def _score(self, row: Any, line: Any, head: Any, at: Any, end: Any) -> None:
        """Products of a query with the keys of a block of positions. ``line``: the row's head."""
        b = self._b
        scores = self._line_of(line)
        lowest = self._ir.Constant(self._floats, [-math.inf] * LANES)
        b.store(lowest, self._at("scores", b.add(scores, at), self._float), align=4)
        scale = self._splat(self._float(self._size_of_head**-0.5))
        q = [b.fmul(x, scale) for x in self._head("q", line)]
        with self._loop(at, end, 1) as position:
            total = self._ir.Constant(self._floats, None)
            for x, k in zip(q, self._at_position("keys", row, head, position), strict=True):
                total = self._fma(x, k, total)
            place = self._at("scores", b.add(scores, position), self._float)
            b.store(self._sum(total), place)

    def _softmax(self, row: Any, line: Any) -> None:
        b, long = self._b, self._long
        begin = self._line_of(line)
        end = b.add(begin, self._load("lengths", row, long))
        largest = self._known("llvm.vector.reduce.fmax.v16f32", self._float, self._floats)
        top, total = self._variable(self._floats), self._variable(self._floats)
        b.store(self._load("scores", begin, self._floats), top)
        with self._loop(begin, end, LANES) as at:
            x, most = self._load("scores", at, self._floats), b.load(top, typ=self._floats)
            b.store(b.select(b.fcmp_ordered(">", x, most), x, most), top)
        most = self._splat(b.call(largest, [b.load(top, typ=self._floats)]))
        with self._loop(begin, end, LANES) as at:
            x = self._exp(b.fsub(self._load("scores", at, self._floats), most))
            b.store(x, self._at("scores", at, self._float), align=4)
            b.store(b.fadd(b.load(total, typ=self._floats), x), total)
        inverse = b.fdiv(self._float(1.0), self._sum(b.load(total, typ=self._floats)))
        with self._loop(begin, end, LANES) as at:
            x = b.fmul(self._load("scores", at, self._floats), self._splat(inverse))
            b.store(x, self._at("scores", at, self._float), align=4)

    def _add_values(self, row: Any, line: Any, head: Any, at: Any, end: Any) -> None:
        b = self._b
        scores = self._line_of(line)
        count = self._size_of_head // LANES
        places = [
            self._at(
                "out",
                b.add(b.mul(line, self._long(self._size_of_head)), self._long(i * LANES)),
                self._float,
            )
            for i in range(count)
        ]
        totals = [self._variable(self._floats) for _ in range(count)]
        for total, place in zip(totals, places, strict=True):
            b.store(b.load(place, typ=self._floats, align=4), total)
        with self._loop(at, end, 1) as position:
            weight = self._splat(self._load("scores", b.add(scores, position), self._float))
            for total, v in zip(
                totals, self._at_position("values", row, head, position), strict=True
            ):
                b.store(self._fma(weight, v, b.load(total, typ=self._floats)), total)
        for total, place in zip(totals, places, strict=True):
            b.store(b.load(total, typ=self._floats), place, align=4)

    def _line_of(self, line: Any) -> Any:
        """Where the scores of a row's head begin, or the slots of a row. There are more than positions, because whole
        vectors of scores are read, and slots before their turn."""
        return self._b.mul(line, self._b.add(self._size("longest"), self._long(MORE)))

    def _at_position(self, name: str, row: Any, head: Any, position: Any) -> list[Any]:
        """The key or the value at a position. Begins to read those of the next block, in their order in memory: the
        heads of this thread at a position, then at the next one."""
        b, long, line = self._b, self._long, self._line_of(row)
        within = b.and_(position, long(LANES - 1))
        done = b.add(b.mul(b.sub(head, self._first), long(LANES)), within)
        done = b.trunc(done, self._word)
        ahead, its = (
            b.zext(n, long) for n in (b.udiv(done, self._count), b.urem(done, self._count))
        )
        block = b.add(line, b.add(b.sub(position, within), long(LANES)))
        now, later = (
            b.add(b.mul(self._load("slots", place, long), self._size("heads")), each)
            for place, each in (
                (b.add(line, position), head),
                (b.add(block, ahead), b.add(self._first, its)),
            )
        )
        for i in range(0, self._size_of_head, 32):
            number = b.add(b.mul(later, long(self._size_of_head)), long(i))
            self._fetch(name, number, self._half)
        return self._head(name, now)

    def _head(self, name: str, line: Any) -> list[Any]:
        """The numbers of a head, as floats."""
        b, long, found = self._b, self._long, []
        begin = b.mul(line, long(self._size_of_head))
        for i in range(0, self._size_of_head, LANES):
            x = self._load(name, b.add(begin, long(i)), self._vector(self._half))
            if self._bfloat:
                found.append(self._low_halves(b.zext(x, self._words)))
            else:
                x = b.bitcast(x, self._vector(self._ir.HalfType()))
                found.append(b.fpext(x, self._floats))
        return found
