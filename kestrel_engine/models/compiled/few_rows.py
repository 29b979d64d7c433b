"""Products of few rows on a CPU at the speed of its memory, compiled by LLVM for the processor at hand.

Such a product reads each weight once, so its time is that of the read. torch's products of one row reach a third to a
half of the rate at which two cores read memory.

The forms of a weight [N, K] are ``bf16``, ``int8`` and ``int4``: `weight_only` says what they hold. With the last two,
a row of ``x`` is rounded to int8 in groups along K, each with its own scale, as llama.cpp's products do. Sums within a
group are whole numbers, so a row's result does not depend on the other rows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from . import host_code
from .host_code import LANES

_log = logging.getLogger(__name__)

Form = Literal["bf16", "int8", "int4"]

MOST_ROWS = 8
"""The rows of one call. With more rows in bfloat16, torch is faster."""
SMALL = 1 << 18
"""Bytes or numbers of a weight below which torch's product costs no more time."""
_AT_ONCE = 4
"""Rows of W that a thread multiplies with several rows of x, which it then reads less often from its caches."""
_GROUPS = (128, 64)
"""Of ``x`` beside int8: the first that divides K. Beside int4, the weight's own groups are used."""


def form_of(weight: Tensor) -> Form | None:
    """Returns the form of a weight, or None if it is none of these, small, or the functions do not work here."""
    is_large = weight.device.type == "cpu" and weight.numel() >= SMALL
    return stored_form(weight) if is_large and available() else None


def stored_form(weight: Tensor) -> Form | None:
    """Returns the form of a weight by its dtype and dimensions."""
    if weight.dtype == torch.bfloat16:
        return "bf16"
    if weight.dtype == torch.int8:
        return "int8"
    is_int4 = weight.dtype == torch.uint8 and weight.dim() == 3 and weight.shape[1] == 1
    return "int4" if is_int4 else None


def group_of(form: Form, weight: Tensor, scales: Tensor | None) -> int | None:
    """Returns the group of ``x`` for a weight, or None if the weight can't be multiplied here."""
    k = weight.shape[-1] * (2 if form == "int4" else 1)
    if len(weight) % _AT_ONCE:
        return None
    if form == "bf16":
        return 32 if k % 32 == 0 else None
    if form == "int8":
        fast = _int8_width(host_code.features())
        return next((group for group in _GROUPS if fast and k % group == 0), None)
    assert scales is not None
    group = k // scales.shape[-2]
    fits = group % 64 == 0 and k % (LANES * group) == 0 and scales.dtype == torch.bfloat16
    return group if fits else None


def product(
    form: Form,
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    group: int,
    bias: Tensor | None = None,
) -> Tensor:
    """Returns ``x @ W.T + bias`` [rows, N] in float32, for at most 16 rows of ``x`` [rows, K] in bfloat16.

    ``bias``: [N] in bfloat16. ``group``: what `group_of` returned. `available` must have returned True.
    """
    rows, k, n = len(x), x.shape[-1], len(weight)
    y = x.new_empty(rows, n, dtype=torch.float32)
    x = (x if form == "bf16" else x.float()).contiguous()
    for first in range(0, rows, MOST_ROWS):
        some = x[first : first + MOST_ROWS]
        compiled_rows = 1 << (len(some) - 1).bit_length()
        if compiled_rows > len(some):
            some = torch.cat([some, some.new_zeros(compiled_rows - len(some), k)])
        out = y[first : first + MOST_ROWS]
        into = out if len(out) == compiled_rows else y.new_empty(compiled_rows, n)
        rounded = x.new_empty(compiled_rows, k, dtype=torch.int8)
        steps = y.new_empty(2, compiled_rows, k // group + 1)
        _compiled(form, compiled_rows, group, bias is not None)(
            weight.data_ptr(),
            0 if scales is None else scales.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            some.data_ptr(),
            rounded.data_ptr(),
            steps[0].data_ptr(),
            steps[1].data_ptr(),
            into.data_ptr(),
            n,
            k,
            0,
        )
        if into is not out:
            out.copy_(into[: len(out)])
    return y


@cache
def available() -> bool:
    """Whether the functions work here: `host_code` supports the processor, and a small product is right."""
    try:
        if not host_code.supported():
            return False
        # No random numbers: what a seed gives must not depend on this.
        values = torch.linspace(-1, 1, 9 * 64).sin().view(9, 64).bfloat16()
        x, weight = values[:1], values[1:]
        y = product("bf16", x, weight, None, 32)
    except (ImportError, OSError, RuntimeError) as error:
        _log.info("products of few rows are torch's: %s", error)
        return False
    return torch.allclose(y, x.float() @ weight.float().T, rtol=1e-3, atol=1e-3)


@cache
def _compiled(form: Form, rows: int, group: int, biased: bool) -> Callable[..., None]:
    return host_code.compiled(Code(form, rows, group, biased, host_code.features()))


def _int8_width(features: Mapping[str, bool]) -> int:
    """The bits of the vectors whose bytes the processor multiplies and adds in one instruction, or 0."""
    return 512 if features.get("avx512vnni") else 256 if features.get("avxvnni") else 0


class Code(host_code.Code):
    """Each thread computes its rows of W."""

    arguments = (
        *("weight", "scales", "bias", "x", "rounded", "steps", "sums", "y"),  # pointers
        *("n", "k", "adds"),
    )

    def __init__(
        self,
        form: Form,
        rows: int,
        group: int,
        biased: bool,
        features: Mapping[str, bool],
        module: Any = None,
    ) -> None:
        super().__init__(f"{form}_{rows}_{group}", module)
        self._form, self._rows, self._group, self._biased = form, rows, group, biased
        # Fewer registers hold the sums of one row of W only.
        self._at_once = _AT_ONCE if rows > 1 and features.get("avx512f") else 1
        self._has_bf16 = bool(features.get("avx512bf16"))
        self._has_int8 = _int8_width(features)

    def functions(self) -> tuple[Any, Any]:
        """Adds functions to the module that one thread calls: what prepares, and the product with the rows of W from
        the second argument to the third one, exclusive. Both numbers are multiples of 4."""
        prepare = self._begin("prepare")
        self._prepare()
        self._b.ret_void()
        multiply = self._begin("multiply", self._long, self._long)
        self._multiply(*multiply.args[1:])
        self._b.ret_void()
        return prepare, multiply

    def _prepare(self) -> None:
        if self._form != "bf16":
            self._round()

    def _share(self) -> None:
        b, at_once = self._b, self._long(self._at_once)
        first, end = self._part(b.sdiv(self._size("n"), at_once))
        self._multiply(b.mul(first, at_once), b.mul(end, at_once))

    def _multiply(self, first: Any, end: Any) -> None:
        """A part of ``y``: a row of W after the other, because that is how memory is read fastest."""
        b, long = self._b, self._long
        n, adds = self._size("n"), b.icmp_signed("!=", self._size("adds"), long(0))
        fill = {"bf16": self._sum_bf16, "int8": self._sum_int8, "int4": self._sum_int4}[self._form]
        with self._loop(first, end, self._at_once) as row:
            rows = [b.add(row, long(i)) for i in range(self._at_once)]
            totals = [[self._variable(self._floats) for _ in rows] for _ in range(self._rows)]
            fill(rows, totals)
            for r, of_x in enumerate(totals):
                for row, total in zip(rows, of_x, strict=True):
                    place = self._at("y", b.add(b.mul(long(r), n), row), self._float)
                    before = b.select(adds, b.load(place, typ=self._float), self._float(0.0))
                    b.store(b.fadd(before, self._result(total, row, r)), place)

    def _result(self, total: Any, row: Any, r: int) -> Any:
        b = self._b
        y = self._sum(b.load(total, typ=self._floats))
        if self._form == "int8":
            # The weights were read as w + 128.
            place = b.add(self._row_of_groups(r), self._groups())
            y = b.fsub(y, b.fmul(self._load("sums", place, self._float), self._float(128.0)))
            y = b.fmul(y, self._bfloat_at("scales", row))
        return y if not self._biased else b.fadd(y, self._bfloat_at("bias", row))

    def _bfloat_at(self, name: str, index: Any) -> Any:
        """A number in bfloat16, as a float."""
        b = self._b
        bits = b.shl(b.zext(self._load(name, index, self._half), self._word), self._word(16))
        return b.bitcast(bits, self._float)

    def _sum_bf16(self, rows: list[Any], totals: list[list[Any]]) -> None:
        b, halves = self._b, self._vector(self._half, 32)
        k = self._size("k")
        with self._loop(self._long(0), k, 32) as at:
            ws = [self._weights(b.add(b.mul(row, k), at), halves) for row in rows]
            for r, of_x in enumerate(totals):
                x = self._load("x", b.add(b.mul(self._long(r), k), at), halves)
                for w, total in zip(ws, of_x, strict=True):
                    b.store(self._products_of_bf16(b.load(total, typ=self._floats), w, x), total)

    def _weights(self, at: Any, kind: Any) -> Any:
        """Reads 64 bytes of W, and begins to read the same bytes of the rows that follow."""
        b = self._b
        ahead = b.mul(self._size("k"), self._long(self._at_once))
        if self._form == "int4":
            ahead = b.sdiv(ahead, self._long(2))
        self._fetch("weight", b.add(at, ahead), kind.element)
        return self._load("weight", at, kind)

    def _products_of_bf16(self, total: Any, w: Any, x: Any) -> Any:
        b = self._b
        if self._has_bf16:
            pairs = self._vector(host_code.bfloat(), 32)
            kinds = (self._floats, self._floats, pairs, pairs)
            dot = self._known("llvm.x86.avx512bf16.dpbf16ps.512", *kinds)
            return b.call(dot, [total, b.bitcast(w, pairs), b.bitcast(x, pairs)])
        w, x = b.bitcast(w, self._words), b.bitcast(x, self._words)
        total = self._fma(self._low_halves(w), self._low_halves(x), total)
        return self._fma(self._high_halves(w), self._high_halves(x), total)

    def _sum_int8(self, rows: list[Any], totals: list[list[Any]]) -> None:
        b, long, bytes_ = self._b, self._long, self._vector(self._byte, 64)
        k = self._size("k")
        flip = self._ir.Constant(bytes_, [-128] * 64)
        with self._loop(long(0), self._groups(), 1) as group:
            first = b.mul(group, long(self._group))
            ws = [
                [
                    b.xor(self._weights(b.add(begin, long(i)), bytes_), flip)
                    for i in range(0, self._group, 64)
                ]
                for begin in (b.add(b.mul(row, k), first) for row in rows)
            ]
            for r, of_x in enumerate(totals):
                step = self._load("steps", b.add(self._row_of_groups(r), group), self._float)
                for its, total in zip(ws, of_x, strict=True):
                    self._add(total, self._dot_of_group(its, group, r), step)

    def _sum_int4(self, rows: list[Any], totals: list[list[Any]]) -> None:
        b, long, bytes_ = self._b, self._long, self._vector(self._byte, 64)
        low, four = (self._ir.Constant(bytes_, [number] * 64) for number in (15, 4))
        groups, half = self._groups(), b.sdiv(self._size("k"), long(2))
        with self._loop(long(0), groups, 2) as group:
            packed, scales = [], []
            for row in rows:
                first = b.add(b.mul(row, half), b.mul(group, long(self._group // 2)))
                packed.append(
                    [
                        self._weights(b.add(first, long(i)), bytes_)
                        for i in range(0, self._group, 64)
                    ]
                )
                place = b.add(b.mul(row, groups), group)
                scales.append(self._load("scales", place, self._vector(self._word, 2)))
            for which in range(2):
                its = b.add(group, long(which))
                ws = [[b.and_(p, low) if which else b.lshr(p, four) for p in ps] for ps in packed]
                of_ws = [
                    b.bitcast(
                        b.shl(b.extract_element(pair, self._word(which)), self._word(16)),
                        self._float,
                    )
                    for pair in scales
                ]
                for r, of_x in enumerate(totals):
                    step = self._load("steps", b.add(self._row_of_groups(r), its), self._float)
                    for w, scale, total in zip(ws, of_ws, of_x, strict=True):
                        self._add(total, self._dot_of_group(w, its, r), b.fmul(scale, step))
        # Minus the zero points' part, for 16 groups at a time.
        with self._loop(long(0), groups, LANES) as group:
            for i, row in enumerate(rows):
                pairs = self._load("scales", b.add(b.mul(row, groups), group), self._words)
                offset = b.fneg(b.fmul(self._low_halves(pairs), self._high_halves(pairs)))
                for r, of_x in enumerate(totals):
                    x = self._load("sums", b.add(self._row_of_groups(r), group), self._floats)
                    b.store(self._fma(offset, x, b.load(of_x[i], typ=self._floats)), of_x[i])

    def _dot_of_group(self, ws: list[Any], group: Any, r: int) -> Any:
        """Returns 16 whole numbers, whose sum is the product of a group of row ``r`` with ``ws``, unsigned bytes."""
        b, long = self._b, self._long
        total = self._ir.Constant(self._words, None)
        first = b.add(b.mul(long(r), self._size("k")), b.mul(group, long(self._group)))
        for i, w in enumerate(ws):
            x = self._load("rounded", b.add(first, long(64 * i)), w.type)
            total = self._dot(total, w, x)
        return total

    def _round(self) -> None:
        """Rounds each group of x to int8: ``steps`` are the scales, ``sums`` the scaled sums, the row's sum last."""
        b, long, ir = self._b, self._long, self._ir
        k, groups = self._size("k"), self._groups()
        one = (self._floats, self._floats)
        absolute, rint = (
            self._known("llvm.fabs.v16f32", *one),
            self._known("llvm.rint.v16f32", *one),
        )
        larger = self._known("llvm.maximum.v16f32", *one, self._floats)
        largest = self._known("llvm.vector.reduce.fmaximum.v16f32", self._float, self._floats)
        add = self._known("llvm.vector.reduce.add.v16i32", self._word, self._words)
        for r in range(self._rows):
            of_row = self._variable(self._float)
            with self._loop(long(0), groups, 1) as group:
                first = b.add(b.mul(long(r), k), b.mul(group, long(self._group)))
                top, whole = self._variable(self._floats), self._variable(self._words)
                with self._loop(first, b.add(first, long(self._group)), LANES) as at:
                    x = b.call(absolute, [self._load("x", at, self._floats, 4)])
                    b.store(b.call(larger, [b.load(top, typ=self._floats), x]), top)
                most = b.call(largest, [b.load(top, typ=self._floats)])
                # Numbers that are no finite ones make the step, and so the whole row, no finite one.
                small = b.fcmp_ordered("<", most, self._float(1e-30))
                step = b.select(small, self._float(0.0), b.fdiv(most, self._float(127.0)))
                finite = b.fcmp_ordered("<", most, self._float(math.inf))
                inverse = b.fdiv(self._float(127.0), b.select(small, self._float(1.0), most))
                inverse = self._splat(b.select(finite, inverse, self._float(0.0)))
                with self._loop(first, b.add(first, long(self._group)), LANES) as at:
                    x = b.fmul(self._load("x", at, self._floats, 4), inverse)
                    x = b.select(b.fcmp_ordered("ord", x, x), x, ir.Constant(self._floats, None))
                    number = b.fptosi(b.call(rint, [x]), self._words)
                    b.store(b.add(b.load(whole, typ=self._words), number), whole)
                    b.store(
                        b.trunc(number, self._vector(self._byte)),
                        self._at("rounded", at, self._byte),
                        align=1,
                    )
                place = b.add(self._row_of_groups(r), group)
                b.store(step, self._at("steps", place, self._float))
                scaled = b.fmul(
                    step, b.sitofp(b.call(add, [b.load(whole, typ=self._words)]), self._float)
                )
                b.store(scaled, self._at("sums", place, self._float))
                b.store(b.fadd(b.load(of_row, typ=self._float), scaled), of_row)
            b.store(
                b.load(of_row, typ=self._float),
                self._at("sums", b.add(self._row_of_groups(r), groups), self._float),
            )

    def _dot(self, total: Any, w: Any, x: Any) -> Any:
        """Adds to each of 16 whole numbers four products of ``w``, 64 unsigned bytes, and ``x``, 64 signed ones."""
        b = self._b
        if self._has_int8 == 512:
            return b.call(self._dot_of(512), [total, w, x])
        parts = []
        for half in range(2):
            part, w_half, x_half = (self._half_of(vector, half) for vector in (total, w, x))
            if self._has_int8:
                parts.append(b.call(self._dot_of(256), [part, w_half, x_half]))
                continue
            # No sum of two products of a byte below 16 exceeds 16 bits.
            shorts, words = self._vector(self._half, 16), part.type
            pairs = self._known("llvm.x86.avx2.pmadd.ub.sw", shorts, w_half.type, x_half.type)
            fours = self._known("llvm.x86.avx2.pmadd.wd", words, shorts, shorts)
            ones = self._ir.Constant(shorts, [1] * 16)
            sums = b.call(fours, [b.call(pairs, [w_half, x_half]), ones])
            parts.append(b.add(part, sums))
        return b.shuffle_vector(*parts, self._ir.Constant(self._words, list(range(LANES))))

    def _dot_of(self, bits: int) -> Any:
        words, bytes_ = self._vector(self._word, bits // 32), self._vector(self._byte, bits // 8)
        return self._known(f"llvm.x86.avx512.vpdpbusd.{bits}", words, words, bytes_, bytes_)

    def _half_of(self, vector: Any, half: int) -> Any:
        count = vector.type.count // 2
        places = self._ir.Constant(
            self._vector(self._word, count), [half * count + i for i in range(count)]
        )
        return self._b.shuffle_vector(
            vector, self._ir.Constant(vector.type, self._ir.Undefined), places
        )

    def _add(self, total: Any, whole: Any, scale: Any) -> None:
        """Adds ``whole`` * ``scale`` to the floats of ``total``."""
        b = self._b
        numbers = b.sitofp(whole, self._floats)
        b.store(self._fma(numbers, self._splat(scale), b.load(total, typ=self._floats)), total)

    def _groups(self) -> Any:
        return self._b.sdiv(self._size("k"), self._long(self._group))

    def _row_of_groups(self, r: int) -> Any:
        """Where the groups of row ``r`` begin in ``steps`` and ``sums``."""
        return self._b.mul(self._long(r), self._b.add(self._groups(), self._long(1)))
