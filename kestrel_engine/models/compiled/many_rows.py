"""Products of many rows of bfloat16 on a CPU with weights in bfloat16, int8 and int4.

LLVM compiles them for the processor at hand.

A thread takes 64 rows of W at a time. It brings them into the order of the processor's products, in memory that stays
in its second cache, and multiplies a few rows of ``x`` at a time with them. With int8 and int4, a row of ``x`` is
rounded to int8 over its whole range first, and sums are whole numbers: twice the rate of bfloat16. Rows of an int4
weight are rounded to int8, each over its range, in steps of a sixteenth of those of its widest group. A row's result
does not depend on the other rows.

A processor with AMX multiplies tiles of int8: 16 rows with 64 columns, for 16 rows of W. torch's product in bfloat16
uses AMX, too, so it is not replaced there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from . import few_rows, host_code
from .host_code import LANES, LINE

MOST_COLUMNS = 1 << 17
"""Of a weight: a sum of more products of two bytes may exceed 32 bits."""
_ROWS, _BLOCKS = 6, 4
"""Rows of ``x``, and blocks of 16 rows of W, whose sums are in registers together."""
_PANEL = _BLOCKS * LANES
_BETWEEN = 64
"""Bytes between rounded rows, so that several rows do not share a place in the first cache."""

_Form = Literal["bf16", "int8", "int8 in blocks", "int4"]


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether `product` multiplies ``x`` [..., K] with ``weight``: bfloat16 or int8 [N, K], or in blocks as of
    `few_rows`."""
    form, features = _form_of(weight), host_code.features()
    # torch's product in bfloat16 uses AMX.
    is_fast = not features.get("amx-bf16") and features.get("avx512bf16")
    return (
        form is not None
        and weight.is_contiguous()
        and weight.shape[0] % LANES == 0
        and x.shape[-1] % (2 if form == "bf16" else LANES) == 0
        and x.shape[-1] <= MOST_COLUMNS
        and _compiles(x)
        and bool(is_fast if form == "bf16" else features.get("avx512vnni"))
    )


def _form_of(weight: Tensor) -> _Form | None:
    if few_rows.is_in_blocks(weight):
        return "int8 in blocks" if weight.dtype == torch.int8 else "int4"
    if weight.dim() != 2:
        return None
    forms: dict[torch.dtype, _Form] = {torch.bfloat16: "bf16", torch.int8: "int8"}
    return forms.get(weight.dtype)


def product(x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    """Returns ``x @ W.T + bias`` [..., N] in bfloat16 of what `takes` has accepted."""
    form = _form_of(weight)
    assert form is not None, (weight.dtype, weight.shape)
    rows, n, k = x.numel() // x.shape[-1], len(weight), x.shape[-1]
    is_int, threads = form != "bf16", torch.get_num_threads()
    words = k // (4 if is_int else 2)
    scales = x.new_empty(0) if scales is None else scales.bfloat16()
    bias = x.new_zeros(n) if bias is None else bias.bfloat16().contiguous()
    y = x.new_empty(*x.shape[:-1], n)
    numbers = x = x.contiguous()
    if is_int:
        # Whole tiles are read. What a row has beyond its numbers is multiplied, too.
        size = -(-rows // LANES) * LANES, k + _BETWEEN
        numbers = (torch.zeros if words % LANES else torch.empty)(size, dtype=torch.int8)
    room = threads * -(-words // LANES) * LANES * _PANEL
    tensors = {
        "x": x,
        "numbers": numbers,
        "weight": weight,
        "scales": scales,
        "factors": scales.new_empty(n) if form == "int4" else scales,
        "bias": bias,
        "steps": torch.empty(rows if is_int else 0, dtype=torch.float32),
        "sums": torch.empty(rows if is_int else 0, dtype=torch.int32),
        "y": y,
        "own": torch.empty(room, dtype=torch.int32),
        "sync": torch.zeros(3, LINE, dtype=torch.int64),
    }
    pointers = [tensors[name].data_ptr() for name in _Code.tensors]
    stride = words + _BETWEEN // 4 if is_int else words
    groups = scales.shape[1] if form == "int4" else 1
    tiles = is_int and host_code.has_tiles("int8")
    _compiled(form, tiles)(*pointers, rows, n, words, stride, k // groups)
    return y


def gelu(x: Tensor) -> Tensor | None:
    """Returns the tanh approximation of GELU of ``x`` [..., K] in bfloat16, or None if torch's is to be used."""
    k = x.shape[-1]
    if k % LANES or not _compiles(x):
        return None
    x = x.contiguous()
    y, sync = torch.empty_like(x), torch.zeros(2, LINE, dtype=torch.int64)
    _compiled_gelu()(x.data_ptr(), y.data_ptr(), sync.data_ptr(), x.numel() // k, k)
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
def _compiled(form: _Form, tiles: bool) -> Callable[..., None]:
    return host_code.compiled(_Code(form, tiles))


@cache
def _compiled_gelu() -> Callable[..., None]:
    return host_code.compiled(_Gelu("gelu"))


class _Gelu(host_code.Code):
    """Each thread takes a row after the other."""

    arguments = "x", "y", "sync", "rows", "columns"

    def _share(self) -> None:
        b, columns = self._b, self._size("columns")
        with self._claims(self._long(1), self._size("rows")) as row:
            begin = b.mul(row, columns)
            with self._loop(begin, b.add(begin, columns), LANES) as at:
                y = self._to_bfloat(self._gelu(self._bfloats("x", at)))
                b.store(y, self._at("y", at, self._half), align=2)


class _Code(host_code.Code):
    """``numbers``: what is multiplied of ``x``, in rows of ``stride`` words of 32 bits, of which ``words`` count.
    ``sums``: minus 128 times the sum of a row, because weights are read as w + 128. ``factors``: the scales of rows of
    W. ``own``: ``words`` times 64 for each thread. ``group``: numbers that share a scale. ``tiles``: the processor
    multiplies tiles of 16 rows and 16 words (AMX).
    """

    tensors = (
        *("x", "numbers", "weight", "scales", "factors", "bias", "steps", "sums", "y"),
        *("own", "sync"),
    )
    arguments = (*tensors, "rows", "n", "words", "stride", "group")

    def __init__(self, form: _Form, tiles: bool) -> None:
        super().__init__(f"many_rows_{form}")
        self._is_int, self._tiles = form != "bf16", tiles
        in_blocks = {"int8 in blocks": self._copy_block, "int4": self._widen_block}
        self._pack = in_blocks.get(form, self._turn_block)

    def _share(self) -> None:
        b, long, rows = self._b, self._long, self._size("rows")
        self._turn = self._variable(long)
        if self._is_int:
            with self._claims(long(1), rows) as row:
                self._round(row)
            self._meet()
        last = b.sub(b.sdiv(self._size("n"), long(LANES)), long(1))
        words = b.and_(b.add(self._size("words"), long(LANES - 1)), long(-LANES))
        own = b.mul(self._of_team("thread_num"), b.mul(words, long(_PANEL)))
        if self._tiles:
            self._begin_tiles({})
            with b.goto_entry_block():
                self._sums = b.alloca(self._words, LANES * _BLOCKS)
                self._sums.align = 64
        with self._claims(long(2), b.sdiv(b.add(last, long(_BLOCKS)), long(_BLOCKS))) as panel:
            # What is beyond the end is computed as the last block or row again.
            blocks = [
                self._least(b.add(b.mul(panel, long(_BLOCKS)), long(i)), last)
                for i in range(_BLOCKS)
            ]
            for i, block in enumerate(blocks):
                self._pack(block, b.add(own, long(i * LANES)))
            if self._tiles:
                with self._loop(long(0), rows, LANES) as first:
                    self._multiply_tiles(first, blocks, own)
            else:
                with self._loop(long(0), rows, _ROWS) as first:
                    end = b.sub(rows, long(1))
                    some = [self._least(b.add(first, long(r)), end) for r in range(_ROWS)]
                    self._finish(some, blocks, self._multiply(some, own))
        if self._tiles:
            self._end_tiles()

    def _least(self, x: Any, y: Any) -> Any:
        return self._b.select(self._b.icmp_signed("<", x, y), x, y)

    def _round(self, row: Any) -> None:
        b, long = self._b, self._long
        columns = b.mul(self._size("words"), long(4))
        begin, out = b.mul(row, columns), b.mul(row, b.mul(self._size("stride"), long(4)))
        end = b.add(begin, columns)
        one = (self._floats, self._floats)
        absolute, rint = (self._known(f"llvm.{name}.v16f32", *one) for name in ("fabs", "rint"))
        larger = self._known("llvm.maximum.v16f32", *one, self._floats)
        largest = self._known("llvm.vector.reduce.fmaximum.v16f32", self._float, self._floats)
        top, whole = self._variable(self._floats), self._variable(self._words)
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
        with self._loop(long(0), columns, LANES) as at:
            x = b.fmul(self._bfloats("x", b.add(begin, at)), inverse)
            x = b.select(b.fcmp_ordered("ord", x, x), x, self._ir.Constant(self._floats, None))
            number = b.fptosi(b.call(rint, [x]), self._words)
            b.store(b.add(b.load(whole, typ=self._words), number), whole)
            place = self._at("numbers", b.add(out, at), self._byte)
            b.store(b.trunc(number, self._vector(self._byte)), place, align=1)
        add = self._known("llvm.vector.reduce.add.v16i32", self._word, self._words)
        total = b.call(add, [b.load(whole, typ=self._words)])
        b.store(b.mul(total, self._word(-128)), self._at("sums", row, self._word))

    def _multiply(self, rows: list[Any], own: Any) -> list[list[Any]]:
        """The sums of products of some ``rows`` with the blocks that begin at ``own``."""
        b, long = self._b, self._long
        sums, kind, name = self._floats, self._vector(host_code.bfloat(), 32), "bf16.dpbf16ps"
        if self._is_int:
            sums, kind, name = self._words, self._vector(self._byte, 64), ".vpdpbusd"
        dot = self._known(f"llvm.x86.avx512{name}.512", sums, sums, kind, kind)
        totals = [[self._variable(sums) for _ in range(_BLOCKS)] for _ in rows]
        if self._is_int:
            for row, of_row in zip(rows, totals, strict=True):
                for total in of_row:
                    b.store(self._splat(self._load("sums", row, self._word)), total)
        places = [b.mul(row, self._size("stride")) for row in rows]
        with self._loop(long(0), self._size("words"), 1) as word:
            at = b.add(own, b.mul(word, long(_PANEL)))
            vectors = [
                b.bitcast(self._load("own", b.add(at, long(i)), self._words), kind)
                for i in range(0, _PANEL, LANES)
            ]
            for place, of_row in zip(places, totals, strict=True):
                x = self._splat(self._load("numbers", b.add(place, word), self._word))
                x = b.bitcast(x, kind)
                for vector, total in zip(vectors, of_row, strict=True):
                    b.store(b.call(dot, [b.load(total, typ=sums), vector, x]), total)
        return [[b.load(total, typ=sums) for total in of_row] for of_row in totals]

    def _multiply_tiles(self, first: Any, blocks: list[Any], own: Any) -> None:
        """The products of 16 rows from ``first`` on with the blocks that begin at ``own``. Tile 0 has the rows, tiles 1
        to 3 have blocks in turn, and tiles 4 to 7 the sums of the blocks."""
        b, long = self._b, self._long
        of_sums = range(_BLOCKS, 2 * _BLOCKS)
        for tile in of_sums:
            self._clear_tile(tile)
        stride, line = b.mul(self._size("stride"), long(4)), long(4 * _PANEL)
        begin = b.mul(first, self._size("stride"))
        with self._loop(long(0), self._size("words"), LANES) as word:
            place = self._at("numbers", b.add(begin, word), self._word)
            self._move_tile("load", 0, place, stride)
            at = b.add(own, b.mul(word, long(_PANEL)))
            for i, tile in enumerate(of_sums):
                place = self._at("own", b.add(at, long(i * LANES)), self._word)
                self._move_tile("load", 1 + i % 3, place, line)
                self._multiply_tile("tdpbsud", tile, 0, 1 + i % 3)
        for i, tile in enumerate(of_sums):
            place = b.gep(self._sums, [long(i * LANES)], source_etype=self._word)
            self._move_tile("store", tile, place, line)
        left = self._least(b.sub(self._size("rows"), first), long(LANES))
        with self._loop(long(0), left, 1) as r:
            row = b.add(first, r)
            start, totals = self._splat(self._load("sums", row, self._word)), []
            for i in range(_BLOCKS):
                at = b.add(b.mul(r, long(_BLOCKS)), long(i))
                place = b.gep(self._sums, [at], source_etype=self._words)
                totals.append(b.add(b.load(place, typ=self._words, align=64), start))
            self._finish([row], blocks, [totals])

    def _finish(self, rows: list[Any], blocks: list[Any], totals: list[list[Any]]) -> None:
        b = self._b
        for row, of_row in zip(rows, totals, strict=True):
            out = b.mul(row, self._size("n"))
            step = self._splat(self._load("steps", row, self._float)) if self._is_int else None
            for block, total in zip(blocks, of_row, strict=True):
                column = b.mul(block, self._long(LANES))
                y, bias = total, self._bfloats("bias", column)
                if self._is_int:
                    factor = b.fmul(self._bfloats("factors", column), step)
                    y = self._fma(b.sitofp(total, self._floats), factor, bias)
                else:
                    y = b.fadd(total, bias)
                place = self._at("y", b.add(out, column), self._half)
                b.store(self._to_bfloat(y), place, align=2)

    def _turn_block(self, block: Any, own: Any) -> None:
        """A block of a weight in rows."""
        b, long, words = self._b, self._long, self._size("words")
        begin = b.mul(b.mul(block, long(LANES)), words)
        with self._loop(long(0), words, LANES) as word:
            left = b.sub(words, word)
            rows = [b.add(begin, b.add(b.mul(words, long(row)), word)) for row in range(LANES)]
            rows = [self._load_first(left, "weight", row, self._words) for row in rows]
            for i, vector in enumerate(self._transposed(rows)):
                vector = b.xor(vector, self._flip()) if self._is_int else vector
                self._keep(own, b.add(word, long(i)), vector)

    def _flip(self) -> Any:
        """Bytes w become w + 128."""
        return self._ir.Constant(self._words, [-0x7F7F7F80] * LANES)

    def _keep(self, own: Any, word: Any, vector: Any) -> None:
        place = self._at("own", self._b.add(own, self._b.mul(word, self._long(_PANEL))), self._word)
        self._b.store(vector, place, align=4)

    def _copy_block(self, block: Any, own: Any) -> None:
        b, long = self._b, self._long
        begin = b.mul(block, b.mul(self._size("words"), long(LANES)))
        with self._loop(long(0), self._size("words"), 1) as word:
            vector = self._load("weight", b.add(begin, b.mul(word, long(LANES))), self._words)
            self._keep(own, word, b.xor(vector, self._flip()))

    def _widen_block(self, block: Any, own: Any) -> None:
        """A block in 4 bits. Each group of a row has a table of its 16 numbers in int8. A vector has four numbers of
        each row, and those of four rows share a quarter of it, so four tables are read and one is taken."""
        b, long, size, words = self._b, self._long, self._size("group"), self._size("words")
        groups = b.sdiv(b.mul(words, long(4)), size)
        begin = b.mul(block, b.mul(words, long(LANES // 2)))
        begin_scales = b.mul(block, b.mul(groups, long(LANES)))
        bytes_ = self._vector(self._byte, 64)
        four, nibble = (self._ir.Constant(bytes_, [number] * 64) for number in (4, 15))
        look_up = self._known("llvm.x86.avx512.pshuf.b.512", *[bytes_] * 3)
        inverses = self._inverses(block, begin_scales, groups)
        with b.goto_entry_block():
            tables = b.ptrtoint(b.alloca(bytes_, 8), long)
        truth = self._vector(self._ir.IntType(1), 64)
        masks = [self._ir.Constant(truth, [i // 4 % 4 == j for i in range(64)]) for j in range(4)]
        half = b.sdiv(size, long(4))
        with self._loop(long(0), groups, 2) as group:
            self._fill(tables, b.add(begin_scales, b.mul(group, long(LANES))), inverses)
            first = b.sdiv(b.mul(group, size), long(4))
            start = b.add(begin, b.mul(first, long(LANES // 2)))
            with self._loop(long(0), half, 1) as at:
                w = self._load("weight", b.add(start, b.mul(at, long(LANES))), self._words)
                w = b.bitcast(w, bytes_)
                for which, places in enumerate((b.lshr(w, four), b.and_(w, nibble))):
                    found = self._ir.Constant(bytes_, None)
                    for j, mask in enumerate(masks):
                        table = self._place(tables, long(256 * which + 64 * j), self._byte)
                        table = b.load(table, typ=bytes_, align=64)
                        found = b.select(mask, b.call(look_up, [table, places]), found)
                    word = b.add(b.add(first, at), b.mul(half, long(which)))
                    self._keep(own, word, b.bitcast(found, self._words))

    def _fill(self, tables: Any, at: Any, inverses: Any) -> None:
        """Stores w + 128 for the 16 numbers of each row in two groups, whose scales begin at ``at``."""
        b, long = self._b, self._long
        numbers = self._ir.Constant(self._floats, list(map(float, range(LANES))))
        low, high = (self._splat(self._float(number)) for number in (-127, 127))
        rint = self._known("llvm.rint.v16f32", self._floats, self._floats)
        with self._loop(long(0), long(2 * LANES), 1) as i:
            pair = self._splat(self._load("scales", b.add(at, i), self._word))
            scale, zero = self._low_halves(pair), self._high_halves(pair)
            inverse = self._splat(b.extract_element(inverses, b.and_(i, long(LANES - 1))))
            y = b.fmul(b.fsub(numbers, zero), b.fmul(scale, inverse))
            y = b.select(b.fcmp_ordered(">", y, low), y, low)
            y = b.call(rint, [b.select(b.fcmp_ordered("<", y, high), y, high)])
            y = b.add(b.fptosi(y, self._words), self._ir.Constant(self._words, [128] * LANES))
            # Row 4 a + b of a group is in quarter a of its table b.
            quarter, table = b.and_(b.lshr(i, long(2)), long(3)), b.and_(i, long(3))
            table = b.add(table, b.mul(b.lshr(i, long(4)), long(4)))
            place = b.mul(b.add(b.mul(table, long(4)), quarter), long(LANES))
            place = self._place(tables, place, self._byte)
            b.store(b.trunc(y, self._vector(self._byte)), place, align=16)

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
        place = self._at("factors", b.mul(block, long(LANES)), self._half)
        b.store(steps, place, align=2)
        steps = self._low_halves(b.zext(steps, self._words))
        above = b.fcmp_ordered(">", steps, self._splat(self._float(1e-30)))
        none = self._ir.Constant(self._floats, None)
        return b.select(above, b.fdiv(self._splat(self._float(1.0)), steps), none)
