"""Products of many rows of bfloat16 with int8 and int4 weights on a CPU, in whole numbers: twice the rate of bfloat16.

A row of ``x`` is rounded to int8 over its whole range, torch multiplies (`torch._int_mm`, whose sums are exact), and
each sum is scaled by its row's step and its weight's scale. Some rows of an int4 weight at a time are rounded to int8,
each over its range, in steps of a sixteenth of those of its widest group. The rounding and the scaling are compiled by
LLVM for the processor at hand, as is the GELU between such products. A row's result does not depend on the other rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from . import few_rows, host_code
from .host_code import LANES

SUMS = 1 << 21
"""Sums that are scaled at a time. They stay in the processor's caches."""
MOST_COLUMNS = 1 << 17
"""Of a weight: a sum of more products of two bytes may exceed 32 bits."""

_Kind = Literal["round", "scale", "gelu", "int4", "int8"]


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether `product` multiplies ``x`` [..., K] with ``weight``: int8 [N, K], or in blocks as of `few_rows`."""
    fits = few_rows.is_in_blocks(weight) or (weight.dtype == torch.int8 and weight.dim() == 2)
    return (
        fits
        and weight.shape[0] % LANES == x.shape[-1] % LANES == 0
        and x.shape[-1] <= MOST_COLUMNS
        and _compiles(x)
        and bool(host_code.features().get("avx512vnni"))
    )


def product(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Returns ``x @ W.T + bias`` [..., N] in bfloat16 of what `takes` has accepted."""
    rows, n, k = x.numel() // x.shape[-1], len(weight), x.shape[-1]
    x = x.contiguous()
    rounded = torch.empty(rows, k, dtype=torch.int8)
    steps = torch.empty(rows, dtype=torch.float32)
    run = _compiled("round")
    run(x.data_ptr(), rounded.data_ptr(), steps.data_ptr(), 0, 0, rows, k, k)
    y = x.new_empty(*x.shape[:-1], n)
    scales = scales.bfloat16()
    bias = x.new_zeros(n) if bias is None else bias.bfloat16()
    columns = max(LANES, SUMS // rows // 64 * 64)
    for first in range(0, n, columns):
        some = slice(first, first + columns)
        its, own = weight[some], scales[some]
        if few_rows.is_in_blocks(weight):
            its, own = _unpacked(its, own, k)
        sums = torch._int_mm(rounded, its.t())
        pointers = (own.data_ptr(), bias[some].data_ptr())
        place = y.data_ptr() + first * y.element_size()
        run = _compiled("scale")
        run(sums.data_ptr(), place, steps.data_ptr(), *pointers, rows, sums.shape[1], n)
    return y


def _unpacked(weight: Tensor, scales: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns a weight in blocks as int8 [N, K], and its scales [N] in bfloat16."""
    n, is_int4 = len(weight), weight.dtype == torch.uint8
    y, steps = torch.empty(n, k, dtype=torch.int8), scales.new_empty(n) if is_int4 else scales
    pointers = (weight.data_ptr(), y.data_ptr(), steps.data_ptr(), scales.data_ptr())
    group = k // scales.shape[1] if is_int4 else k
    _compiled("int4" if is_int4 else "int8")(*pointers, 0, n // LANES, k, group)
    return y, steps


def gelu(x: Tensor) -> Tensor | None:
    """Returns the tanh approximation of GELU of ``x`` [..., K] in bfloat16, or None if torch's is to be used."""
    k = x.shape[-1]
    if k % LANES or not _compiles(x):
        return None
    x = x.contiguous()
    y = torch.empty_like(x)
    _compiled("gelu")(x.data_ptr(), y.data_ptr(), 0, 0, 0, x.numel() // k, k, k)
    return y


def _compiles(x: Tensor) -> bool:
    return (
        x.dtype == torch.bfloat16
        and x.device.type == "cpu"
        and x.numel() > 0
        and not torch.is_grad_enabled()
        and few_rows.available()
    )


@cache
def _compiled(kind: _Kind) -> Callable[..., None]:
    return host_code.compiled(_Code(kind))


class _Code(host_code.Code):
    """Each thread computes its rows, or blocks of 16. ``stride``: the numbers between two rows of ``y``, or those of a
    group."""

    arguments = "x", "y", "steps", "scales", "bias", "rows", "columns", "stride"

    def __init__(self, kind: _Kind) -> None:
        super().__init__(f"many_rows_{kind}")
        works = {"round": self._round, "scale": self._scale, "gelu": self._bend}
        self._work = (works | {"int4": self._unpack_int4, "int8": self._unpack_int8})[kind]

    def _share(self) -> None:
        first, end = self._part(self._size("rows"))
        with self._loop(first, end, 1) as row:
            self._work(row)

    def _round(self, row: Any) -> None:
        b, columns = self._b, self._size("columns")
        begin = b.mul(row, columns)
        end = b.add(begin, columns)
        one = (self._floats, self._floats)
        absolute, rint = (self._known(f"llvm.{name}.v16f32", *one) for name in ("fabs", "rint"))
        larger = self._known("llvm.maximum.v16f32", *one, self._floats)
        largest = self._known("llvm.vector.reduce.fmaximum.v16f32", self._float, self._floats)
        top = self._variable(self._floats)
        with self._loop(begin, end, LANES) as at:
            x = b.call(absolute, [self._bfloats("x", at)])
            b.store(b.call(larger, [b.load(top, typ=self._floats), x]), top)
        # Numbers that are no finite ones make the step, and so the whole row, no finite one.
        most = b.call(largest, [b.load(top, typ=self._floats)])
        small = b.fcmp_ordered("<", most, self._float(1e-30))
        step = b.select(small, self._float(0.0), b.fdiv(most, self._float(127.0)))
        b.store(step, self._at("steps", row, self._float))
        inverse = b.fdiv(self._float(127.0), b.select(small, self._float(1.0), most))
        finite = b.fcmp_ordered("<", most, self._float(math.inf))
        inverse = self._splat(b.select(finite, inverse, self._float(0.0)))
        with self._loop(begin, end, LANES) as at:
            x = b.fmul(self._bfloats("x", at), inverse)
            x = b.select(b.fcmp_ordered("ord", x, x), x, self._ir.Constant(self._floats, None))
            number = b.fptosi(b.call(rint, [x]), self._words)
            place = self._at("y", at, self._byte)
            b.store(b.trunc(number, self._vector(self._byte)), place, align=1)

    def _scale(self, row: Any) -> None:
        b, columns = self._b, self._size("columns")
        sums, out = b.mul(row, columns), b.mul(row, self._size("stride"))
        step = self._splat(self._load("steps", row, self._float))
        with self._loop(self._long(0), columns, LANES) as at:
            total = b.sitofp(self._load("x", b.add(sums, at), self._words), self._floats)
            factor = b.fmul(self._bfloats("scales", at), step)
            y = self._fma(total, factor, self._bfloats("bias", at))
            self._store_bfloats(y, b.add(out, at))

    def _bend(self, row: Any) -> None:
        b, columns = self._b, self._size("columns")
        begin = b.mul(row, columns)
        with self._loop(begin, b.add(begin, columns), LANES) as at:
            self._store_bfloats(self._gelu(self._bfloats("x", at)), at)

    def _unpack_int8(self, block: Any) -> None:
        b, columns = self._b, self._size("columns")
        start = b.mul(block, b.mul(columns, self._long(LANES)))
        with self._loop(self._long(0), columns, 64) as at:
            rows = self._rows(b.add(start, b.mul(at, self._long(LANES))))
            for i, row in enumerate(rows):
                place = b.add(b.add(start, b.mul(columns, self._long(i))), at)
                b.store(row, self._at("y", place, self._byte), align=1)

    def _unpack_int4(self, block: Any) -> None:
        """Each group of a row has a table of its 16 numbers in int8, from which its weights are looked up."""
        b, long, size, columns = self._b, self._long, self._size("stride"), self._size("columns")
        groups = b.sdiv(columns, size)
        begin, begin_scales = (b.mul(b.mul(block, long(LANES)), n) for n in (columns, groups))
        numbers = self._ir.Constant(self._floats, list(map(float, range(LANES))))
        bytes_, places = self._vector(self._byte, 64), list(range(LANES)) * 4
        places = self._ir.Constant(self._vector(self._word, 64), places)
        four, nibble = (self._ir.Constant(bytes_, [number] * 64) for number in (4, 15))
        low, high = (self._splat(self._float(number)) for number in (-127, 127))
        rint = self._known("llvm.rint.v16f32", self._floats, self._floats)
        look_up = self._known("llvm.x86.avx512.pshuf.b.512", *[bytes_] * 3)
        inverses = self._inverses(block, begin_scales, groups)
        with b.goto_entry_block():
            tables = b.alloca(bytes_, 2 * LANES)
        with self._loop(long(0), groups, 2) as group:
            with self._loop(long(0), long(2 * LANES), 1) as i:
                at = b.add(begin_scales, b.add(b.mul(group, long(LANES)), i))
                pair = self._splat(self._load("scales", at, self._word))
                scale, zero = self._low_halves(pair), self._high_halves(pair)
                inverse = b.extract_element(inverses, b.and_(i, long(LANES - 1)))
                y = b.fmul(b.fsub(numbers, zero), b.fmul(scale, self._splat(inverse)))
                y = b.select(b.fcmp_ordered(">", y, low), y, low)
                y = b.call(rint, [b.select(b.fcmp_ordered("<", y, high), y, high)])
                y = b.trunc(b.fptosi(y, self._words), self._vector(self._byte))
                table = b.gep(tables, [i], source_etype=bytes_)
                b.store(b.shuffle_vector(y, y, places), table)
            first = b.mul(group, size)
            start = b.add(b.sdiv(begin, long(2)), b.mul(first, long(LANES // 2)))
            with self._loop(long(0), size, 64) as at:
                rows = self._rows(b.add(start, b.mul(at, long(LANES))))
                for i, row in enumerate(rows):
                    place = b.add(b.add(begin, b.mul(columns, long(i))), b.add(first, at))
                    for which, found in enumerate((b.lshr(row, four), b.and_(row, nibble))):
                        table = b.gep(tables, [long(which * LANES + i)], source_etype=bytes_)
                        found = b.call(look_up, [b.load(table, typ=bytes_), found])
                        at_y = b.add(place, b.mul(size, long(which)))
                        b.store(found, self._at("y", at_y, self._byte), align=1)

    def _inverses(self, block: Any, begin: Any, groups: Any) -> Any:
        """Stores the steps of 16 rows, which reach the numbers farthest from zero. Returns one over each."""
        b, long = self._b, self._long
        absolute = self._known("llvm.fabs.v16f32", self._floats, self._floats)
        larger = self._known("llvm.maximum.v16f32", *[self._floats] * 3)
        top, most = self._variable(self._floats), self._splat(self._float(15.0))
        with self._loop(long(0), groups, 1) as group:
            at = b.add(begin, b.mul(group, long(LANES)))
            pairs = self._load("scales", at, self._words)
            scale, zero = self._low_halves(pairs), self._high_halves(pairs)
            reach = b.call(larger, [b.fsub(most, zero), b.call(absolute, [zero])])
            reach = b.call(absolute, [b.fmul(scale, reach)])
            b.store(b.call(larger, [b.load(top, typ=self._floats), reach]), top)
        steps = b.fdiv(b.load(top, typ=self._floats), self._splat(self._float(127.0)))
        steps = self._to_bfloat(steps)
        place = self._at("steps", b.mul(block, long(LANES)), self._half)
        b.store(steps, place, align=2)
        steps = self._low_halves(b.zext(steps, self._words))
        above = b.fcmp_ordered(">", steps, self._splat(self._float(1e-30)))
        none = self._ir.Constant(self._floats, None)
        return b.select(above, b.fdiv(self._splat(self._float(1.0)), steps), none)

    def _rows(self, start: Any) -> list[Any]:
        """64 bytes of each row of a block: turns 16 vectors, each of which has 4 bytes of each row."""
        found = []
        for i in range(LANES):
            place = self._at("x", self._b.add(start, self._long(64 * i)), self._byte)
            found.append(self._b.load(place, typ=self._words, align=1))
        words, doubles = (
            [[4 * i + n for i in range(4) for n in each] for each in pair]
            for pair in (([0, 16, 1, 17], [2, 18, 3, 19]), ([0, 1, 16, 17], [2, 3, 18, 19]))
        )
        quarters = [[8 * i + n + m for i in range(4) for n in range(4)] for m in (0, 4)]
        rows, fours = [self._ir.Constant(self._words, None)] * LANES, []
        for i in range(0, LANES, 4):
            (a, b), (c, d) = (self._both(found[j], found[j + 1], words) for j in (i, i + 2))
            fours.append([*self._both(a, c, doubles), *self._both(b, d, doubles)])
        for i, (w, x, y, z) in enumerate(zip(*fours, strict=True)):
            halves = self._both(w, x, quarters), self._both(y, z, quarters)
            for j, (low, high) in enumerate(zip(*halves, strict=True)):
                rows[4 * j + i], rows[4 * j + i + 8] = self._both(low, high, quarters)
        return [self._b.bitcast(row, self._vector(self._byte, 64)) for row in rows]

    def _both(self, a: Any, b: Any, places: Any) -> list[Any]:
        """Two vectors of words from ``places`` of both."""
        masks = (self._ir.Constant(self._words, each) for each in places)
        return [self._b.shuffle_vector(a, b, mask) for mask in masks]

    def _store_bfloats(self, x: Any, index: Any) -> None:
        self._b.store(self._to_bfloat(x), self._at("y", index, self._half), align=2)
