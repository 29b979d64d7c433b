"""Products of many rows of bfloat16 with int8 weights on a CPU, in whole numbers: twice the rate of bfloat16.

A row of ``x`` is rounded to int8 over its whole range, torch multiplies (`torch._int_mm`, whose sums are exact), and
each sum is scaled by its row's step and its weight's scale. The rounding and the scaling are compiled by LLVM for the
processor at hand, as is the GELU between such products. A row's result does not depend on the other rows.
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

_Kind = Literal["round", "scale", "gelu"]


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether `product` multiplies ``x`` [..., K] with ``weight`` [N, K]."""
    return (
        weight.dtype == torch.int8
        and weight.dim() == 2
        and weight.shape[0] % LANES == weight.shape[1] % LANES == 0
        and weight.shape[1] <= MOST_COLUMNS
        and _compiles(x)
        and bool(host_code.features().get("avx512vnni"))
    )


def product(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Returns ``x @ W.T + bias`` [..., N] in bfloat16 of what `takes` has accepted."""
    rows, n, k = x.numel() // x.shape[-1], *weight.shape
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
        sums = torch._int_mm(rounded, weight[some].t())
        own = (scales[some].data_ptr(), bias[some].data_ptr())
        place = y.data_ptr() + first * y.element_size()
        run = _compiled("scale")
        run(sums.data_ptr(), place, steps.data_ptr(), *own, rows, sums.shape[1], n)
    return y


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
    """Each thread computes its rows. ``stride``: the numbers between two rows of ``y``."""

    arguments = "x", "y", "steps", "scales", "bias", "rows", "columns", "stride"

    def __init__(self, kind: _Kind) -> None:
        super().__init__(f"many_rows_{kind}")
        self._work = {"round": self._round, "scale": self._scale, "gelu": self._bend}[kind]

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

    def _bfloats(self, name: str, index: Any) -> Any:
        bits = self._load(name, index, self._vector(self._half))
        return self._low_halves(self._b.zext(bits, self._words))

    def _store_bfloats(self, x: Any, index: Any) -> None:
        self._b.store(self._to_bfloat(x), self._at("y", index, self._half), align=2)
