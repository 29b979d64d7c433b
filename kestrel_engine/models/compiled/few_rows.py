"""Products of few rows on a CPU at the speed of its memory, compiled by LLVM for the processor at hand.

Such a product reads each weight once, so its time is that of the read. torch's products of one row reach a third to a
half of the rate at which two cores read memory.

The forms of a weight [N, K] are ``bf16``, ``int8`` and ``int4``: `weight_only` says what they hold. With the last two,
a row of ``x`` is rounded to int8 in groups along K, each with its own scale, as llama.cpp's products do. Sums within a
group are whole numbers, so a row's result does not depend on the other rows. Such weights are in blocks of 16 rows: 4
bytes of each row, then the next 4 bytes of each. So memory is read in its order, a vector has the same columns of 16
rows, and the sums of a group are scaled together.

A processor with AMX multiplies tiles of bfloat16: 16 rows of W with all rows of x. So 8 rows take little longer than
one.
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
"""Rows of W in bfloat16 that a thread multiplies with several rows of x. It then reads x less often from its caches."""
_AHEAD = 3072
"""Bytes between what is multiplied and what begins to be read, of weights in blocks: twice as many for more than two
rows, which multiply while memory is read."""
_GROUPS = (128, 64)
"""Of ``x`` beside int8: the first that divides K. Beside int4, the weight's own groups are used."""


def form_of(weight: Tensor) -> Form | None:
    """Returns the form of a weight, or None if it is none of these, small, not contiguous, or the functions do not work
    here."""
    is_large = weight.device.type == "cpu" and weight.numel() >= SMALL
    return stored_form(weight) if is_large and weight.is_contiguous() and available() else None


def stored_form(weight: Tensor) -> Form | None:
    """Returns the form of a weight by its dtype and dimensions."""
    if weight.dtype == torch.bfloat16:
        return "bf16"
    if not is_in_blocks(weight):
        return None
    return "int8" if weight.dtype == torch.int8 else "int4"


def is_in_blocks(weight: Tensor) -> bool:
    """Whether a weight in 4 or 8 bits is in blocks of 16 rows."""
    return weight.dtype in (torch.int8, torch.uint8) and weight.dim() == 3 and weight.shape[1] == 1


def fits_in_blocks(weight: Tensor, scales: Tensor) -> bool:
    """Whether `product` takes each matrix of ``weight`` [..., N, K], in 4 or 8 bits, once it is in blocks."""
    n, columns = weight.shape[-2:]
    form: Form = "int8" if weight.dtype == torch.int8 else "int4"
    is_large = weight.device.type == "cpu" and n * columns >= SMALL and n % LANES == 0
    return is_large and available() and group_of(form, weight.flatten(0, -2), scales) is not None


def group_of(form: Form, weight: Tensor, scales: Tensor | None) -> int | None:
    """Returns the group of ``x`` for a weight, or None if the weight can't be multiplied here."""
    k = weight.shape[-1] * (2 if form == "int4" else 1)
    if len(weight) % (_AT_ONCE if form == "bf16" else LANES):
        return None
    if form == "bf16":
        return 32 if k % 32 == 0 else None
    if form == "int8":
        fast = _int8_width(host_code.features())
        return next((group for group in _GROUPS if fast and k % group == 0), None)
    assert scales is not None
    group = k // scales.shape[-2]
    fits = group % 64 == 0 and k % (2 * group) == 0 and scales.dtype == torch.bfloat16
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

    ``bias``: [N] in bfloat16, contiguous. ``group``: what `group_of` returned. `available` must have returned True.
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
        rounded = x.new_empty(compiled_rows, k, dtype=x.dtype if form == "bf16" else torch.int8)
        steps = y.new_empty(2, compiled_rows, k // group + 1)
        tiles = multiplies_tiles(form) and n % LANES == 0
        _compiled(form, compiled_rows, group, bias is not None, tiles)(
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


def multiplies_tiles(form: Form) -> bool:
    """Whether products with whole blocks of 16 rows of W use tiles (AMX)."""
    return form == "bf16" and host_code.has_tiles("bf16")


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
def _compiled(form: Form, rows: int, group: int, biased: bool, tiles: bool) -> Callable[..., None]:
    return host_code.compiled(Code(form, rows, group, biased, tiles))


def _int8_width(features: Mapping[str, bool]) -> int:
    """The bits of the vectors whose bytes the processor multiplies and adds in one instruction, or 0."""
    return 512 if features.get("avx512vnni") else 256 if features.get("avxvnni") else 0


class Code(host_code.Code):
    """Each thread computes its rows of W. ``rounded``: ``x`` in int8; with ``tiles``, pairs of its numbers, first the
    first ones of all rows.
    """

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
        tiles: bool,
        module: Any = None,
    ) -> None:
        super().__init__(f"{form}_{rows}_{group}", module)
        self._form, self._rows, self._group, self._biased = form, rows, group, biased
        self._tiles, features = tiles, host_code.features()
        # Fewer registers hold the sums of one row of W only.
        several = _AT_ONCE if rows > 1 and features.get("avx512f") else 1
        self._at_once = several if form == "bf16" and not tiles else LANES
        self._ahead = _AHEAD if rows <= 2 else 2 * _AHEAD
        self._has_bf16 = bool(features.get("avx512bf16"))
        self._has_int8 = _int8_width(features)

    def functions(self) -> tuple[Any, Any]:
        """Adds functions to the module that one thread calls: what prepares, and the product with the rows of W from
        the second argument to the third one, exclusive. Both numbers are multiples of 16."""
        prepare = self._begin("prepare")
        self._prepare()
        self._b.ret_void()
        multiply = self._begin("multiply", self._long, self._long)
        self._multiply(*multiply.args[1:])
        self._b.ret_void()
        return prepare, multiply

    @property
    def tile_columns(self) -> Mapping[int, int]:
        """Tile 0 has 16 rows of W, tile 1 pairs of numbers of x, and tile 2 the sums."""
        return {1: self._rows, 2: self._rows}

    def _prepare(self) -> None:
        if self._form != "bf16":
            self._round()
        elif self._tiles:
            self._turn_pairs()

    def _share(self) -> None:
        b, at_once = self._b, self._long(self._at_once)
        first, end = self._part(b.sdiv(self._size("n"), at_once))
        if self._tiles:
            self._begin_tiles(self.tile_columns)
        self._multiply(b.mul(first, at_once), b.mul(end, at_once))
        if self._tiles:
            self._end_tiles()

    def _multiply(self, first: Any, end: Any) -> None:
        """A part of ``y``: a row of W after the other, because that is how memory is read fastest."""
        multiply = self._bf16_rows if self._form == "bf16" else self._whole_rows
        if self._tiles:
            multiply = self._bf16_tiles
        with self._loop(first, end, self._at_once) as row:
            multiply(row)

    def _turn_pairs(self) -> None:
        b, long = self._b, self._long
        words = b.sdiv(self._size("k"), long(2))
        with self._loop(long(0), words, 1) as word:
            at = b.mul(word, long(self._rows))
            for r in range(self._rows):
                pair = self._load("x", b.add(b.mul(words, long(r)), word), self._word)
                b.store(pair, self._at("rounded", b.add(at, long(r)), self._word))

    def _bf16_tiles(self, row: Any) -> None:
        """16 rows of W, whose 32 columns are multiplied together."""
        b, long, k = self._b, self._long, self._size("k")
        with b.goto_entry_block():
            sums = b.alloca(self._word, LANES * self._rows)
            sums.align = 64
        self._clear_tile(2)
        line, short = b.mul(k, long(2)), long(4 * self._rows)
        with self._loop(long(0), k, 2 * LANES) as at:
            for i in range(LANES):
                self._fetch("weight", b.add(b.mul(b.add(row, long(LANES + i)), k), at), self._half)
            self._move_tile(
                "load", 0, self._at("weight", b.add(b.mul(row, k), at), self._half), line
            )
            pairs = b.mul(b.sdiv(at, long(2)), long(self._rows))
            self._move_tile("load", 1, self._at("rounded", pairs, self._word), short)
            self._multiply_tile("tdpbf16ps", 2, 0, 1)
        self._move_tile("store", 2, sums, short)
        with self._loop(long(0), long(LANES), 1) as i:
            column = b.add(row, i)
            bias = self._bfloat_at("bias", column) if self._biased else None
            for r in range(self._rows):
                place = self._at("y", b.add(b.mul(long(r), self._size("n")), column), self._float)
                before = b.select(self._adds(), b.load(place, typ=self._float), self._float(0.0))
                at = b.add(b.mul(i, long(self._rows)), long(r))
                y = b.load(b.gep(sums, [at], source_etype=self._float), typ=self._float)
                y = y if bias is None else b.fadd(y, bias)
                b.store(b.fadd(before, y), place)

    def _whole_rows(self, row: Any) -> None:
        """The products of a block of W."""
        b = self._b
        fill = {"int8": self._sum_int8, "int4": self._sum_int4}[self._form]
        totals = [self._variable(self._floats) for _ in range(self._rows)]
        fill(row, totals)
        for r, total in enumerate(totals):
            y = b.load(total, typ=self._floats)
            if self._form == "int8":
                # The weights were read as w + 128.
                part = b.fmul(self._of_group("sums", r, self._groups()), self._float(128.0))
                y = b.fmul(b.fsub(y, self._splat(part)), self._bfloats("scales", row))
            if self._biased:
                y = b.fadd(y, self._bfloats("bias", row))
            place = self._at("y", b.add(b.mul(self._long(r), self._size("n")), row), self._float)
            before = b.load(place, typ=self._floats, align=4)
            none = self._ir.Constant(self._floats, None)
            b.store(b.fadd(b.select(self._adds(), before, none), y), place, align=4)

    def _adds(self) -> Any:
        return self._b.icmp_signed("!=", self._size("adds"), self._long(0))

    def _bf16_rows(self, row: Any) -> None:
        b, long = self._b, self._long
        rows = [b.add(row, long(i)) for i in range(self._at_once)]
        totals = [[self._variable(self._floats) for _ in rows] for _ in range(self._rows)]
        self._sum_bf16(rows, totals)
        for r, of_x in enumerate(totals):
            for row, total in zip(rows, of_x, strict=True):
                place = self._at("y", b.add(b.mul(long(r), self._size("n")), row), self._float)
                before = b.select(self._adds(), b.load(place, typ=self._float), self._float(0.0))
                y = self._sum(b.load(total, typ=self._floats))
                y = b.fadd(y, self._bfloat_at("bias", row)) if self._biased else y
                b.store(b.fadd(before, y), place)

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
        ahead = self._b.mul(self._size("k"), self._long(self._at_once))
        self._fetch("weight", self._b.add(at, ahead), kind.element)
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

    def _sum_int8(self, row: Any, totals: list[Any]) -> None:
        b, long = self._b, self._long
        begin = b.mul(row, self._size("k"))
        flip = self._ir.Constant(self._vector(self._byte, 64), [-128] * 64)
        with self._loop(long(0), self._groups(), 1) as group:
            whole = [self._variable(self._words) for _ in totals]
            first = b.mul(group, long(self._group))
            with self._loop(first, b.add(first, long(self._group)), 64) as at:
                for i in range(0, 64, 4):
                    column = b.add(at, long(i))
                    w = self._next_weights(b.add(begin, b.mul(column, long(LANES))))
                    self._add_dots(whole, b.xor(w, flip), column)
            for r, (its, total) in enumerate(zip(whole, totals, strict=True)):
                step = self._splat(self._of_group("steps", r, group))
                numbers = b.sitofp(b.load(its, typ=self._words), self._floats)
                b.store(self._fma(numbers, step, b.load(total, typ=self._floats)), total)

    def _sum_int4(self, row: Any, totals: list[Any]) -> None:
        b, long, bytes_ = self._b, self._long, self._vector(self._byte, 64)
        low, four = (self._ir.Constant(bytes_, [number] * 64) for number in (15, 4))
        groups, half = self._groups(), b.sdiv(self._size("k"), long(2))
        begin, of_scales = b.mul(row, half), b.mul(row, groups)
        with self._loop(long(0), groups, 2) as group:
            whole = [[self._variable(self._words) for _ in totals] for _ in range(2)]
            first = b.mul(group, long(self._group))
            start = b.add(begin, b.mul(first, long(LANES // 2)))
            with self._loop(long(0), long(self._group), 64) as at:
                for i in range(0, 64, 4):
                    column = b.add(at, long(i))
                    w = self._next_weights(b.add(start, b.mul(column, long(LANES))))
                    column = b.add(first, column)
                    self._add_dots(whole[0], b.lshr(w, four), column)
                    column = b.add(column, long(self._group))
                    self._add_dots(whole[1], b.and_(w, low), column)
            for which, sums in enumerate(whole):
                at = b.add(group, long(which))
                place = b.add(of_scales, b.mul(at, long(LANES)))
                pairs = self._load("scales", place, self._words)
                scale, zero = self._low_halves(pairs), b.fneg(self._high_halves(pairs))
                for r, (its, total) in enumerate(zip(sums, totals, strict=True)):
                    step, of_x = (self._splat(self._of_group(n, r, at)) for n in ("steps", "sums"))
                    numbers = b.sitofp(b.load(its, typ=self._words), self._floats)
                    y = self._fma(numbers, step, b.fmul(zero, of_x))
                    b.store(self._fma(y, scale, b.load(total, typ=self._floats)), total)

    def _next_weights(self, at: Any) -> Any:
        """Reads 64 bytes of W, and begins to read what follows. LLVM moves no product across the latter: it would make
        long chains of sums, each of which waits for the one before."""
        self._fetch("weight", self._b.add(at, self._long(self._ahead)), self._byte)
        return self._load("weight", at, self._vector(self._byte, 64))

    def _add_dots(self, whole: list[Any], w: Any, column: Any) -> None:
        """Adds the products of four columns of 16 rows of W, unsigned bytes, with those of the rows of x."""
        b, k = self._b, self._size("k")
        for r, total in enumerate(whole):
            place = self._at("rounded", b.add(b.mul(self._long(r), k), column), self._byte)
            x = b.bitcast(self._splat(b.load(place, typ=self._word, align=1)), w.type)
            b.store(self._dot(b.load(total, typ=self._words), w, x), total)

    def _of_group(self, name: str, r: int, group: Any) -> Any:
        return self._load(name, self._b.add(self._row_of_groups(r), group), self._float)

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

    def _groups(self) -> Any:
        return self._b.sdiv(self._size("k"), self._long(self._group))

    def _row_of_groups(self, r: int) -> Any:
        """Where the groups of row ``r`` begin in ``steps`` and ``sums``."""
        return self._b.mul(self._long(r), self._b.add(self._groups(), self._long(1)))
