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

_Kind = Literal["round", "scale", "gelu", "unpack"]


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether `product` multiplies ``x`` [..., K] with ``weight``, in the form ``int8`` or ``int4`` of `few_rows`."""
    return (
        few_rows.stored_form(weight) in ("int8", "int4")
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
        if weight.dtype == torch.uint8:
            its, own = _unpacked(its, own)
        sums = torch._int_mm(rounded, its.t())
        pointers = (own.data_ptr(), bias[some].data_ptr())
        place = y.data_ptr() + first * y.element_size()
        run = _compiled("scale")
        run(sums.data_ptr(), place, steps.data_ptr(), *pointers, rows, sums.shape[1], n)
    return y


def _unpacked(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Returns an int4 weight in int8 [N, K], and its scales [N] in bfloat16."""
    n, k = len(weight), 2 * weight.shape[-1]
    y, steps = torch.empty(n, k, dtype=torch.int8), scales.new_empty(n)
    pointers = (weight.data_ptr(), y.data_ptr(), steps.data_ptr(), scales.data_ptr())
    _compiled("unpack")(*pointers, 0, n, k, k // scales.shape[1])
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
    """Each thread computes its rows. ``stride``: the numbers between two rows of ``y``, or those of a group."""

    arguments = "x", "y", "steps", "scales", "bias", "rows", "columns", "stride"

    def __init__(self, kind: _Kind) -> None:
        super().__init__(f"many_rows_{kind}")
        works = {"round": self._round, "scale": self._scale, "gelu": self._bend}
        self._work = (works | {"unpack": self._unpack})[kind]

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

    def _unpack(self, row: Any) -> None:
        """Each group has a table of its 16 numbers in int8, from which its weights are looked up."""
        b, long, size = self._b, self._long, self._size("stride")
        groups = b.sdiv(self._size("columns"), size)
        begin = b.mul(row, groups)
        one = (self._floats, self._floats)
        absolute, rint = (self._known(f"llvm.{name}.v16f32", *one) for name in ("fabs", "rint"))
        larger = self._known("llvm.maximum.v16f32", *one, self._floats)
        largest = self._known("llvm.vector.reduce.fmaximum.v16f32", self._float, self._floats)
        low, high, most = (self._splat(self._float(number)) for number in (-127, 127, 15))
        top = self._variable(self._floats)
        with self._loop(begin, b.add(begin, groups), LANES) as group:
            scale, zero = self._scales_of(self._load("scales", group, self._words))
            reach = b.call(larger, [b.fsub(most, zero), b.call(absolute, [zero])])
            reach = b.call(absolute, [b.fmul(scale, reach)])
            b.store(b.call(larger, [b.load(top, typ=self._floats), reach]), top)
        step = b.fdiv(b.call(largest, [b.load(top, typ=self._floats)]), self._float(127.0))
        narrow = self._to_bfloat(self._splat(step))
        b.store(b.extract_element(narrow, self._word(0)), self._at("steps", row, self._half))
        step = b.extract_element(self._low_halves(b.zext(narrow, self._words)), self._word(0))
        inverse = b.fdiv(self._float(1.0), step)
        inverse = b.select(b.fcmp_ordered(">", step, self._float(1e-30)), inverse, self._float(0.0))
        numbers = self._ir.Constant(self._floats, list(map(float, range(LANES))))
        bytes_, places = self._vector(self._byte, 64), list(range(LANES)) * 4
        places = self._ir.Constant(self._vector(self._word, 64), places)
        four, nibble = (self._ir.Constant(bytes_, [number] * 64) for number in (4, 15))
        look_up = self._known("llvm.x86.avx512.pshuf.b.512", *[bytes_] * 3)
        with self._loop(long(0), groups, 2) as group:
            tables = []
            for which in range(2):
                at = b.add(begin, b.add(group, long(which)))
                scale, zero = self._scales_of(self._splat(self._load("scales", at, self._word)))
                y = b.fmul(b.fsub(numbers, zero), b.fmul(scale, self._splat(inverse)))
                y = b.select(b.fcmp_ordered(">", y, low), y, low)
                y = b.call(rint, [b.select(b.fcmp_ordered("<", y, high), y, high)])
                y = b.trunc(b.fptosi(y, self._words), self._vector(self._byte))
                tables.append(b.shuffle_vector(y, y, places))
            start = b.mul(b.add(begin, group), size)
            with self._loop(long(0), size, 64) as at:
                pairs = self._load("x", b.add(b.sdiv(start, long(2)), at), bytes_)
                nibbles = b.lshr(pairs, four), b.and_(pairs, nibble)
                for which in range(2):
                    place = b.add(b.add(start, b.mul(size, long(which))), at)
                    found = b.call(look_up, [tables[which], nibbles[which]])
                    b.store(found, self._at("y", place, self._byte), align=1)

    def _scales_of(self, pairs: Any) -> tuple[Any, Any]:
        return self._low_halves(pairs), self._high_halves(pairs)

    def _bfloats(self, name: str, index: Any) -> Any:
        bits = self._load(name, index, self._vector(self._half))
        return self._low_halves(self._b.zext(bits, self._words))

    def _store_bfloats(self, x: Any, index: Any) -> None:
        self._b.store(self._to_bfloat(x), self._at("y", index, self._half), align=2)
