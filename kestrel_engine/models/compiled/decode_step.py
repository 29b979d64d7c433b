"""All dense blocks of the text decoder for one token of each of few sequences on a CPU, in one compiled function.

By torch, such a pass is some 400 calls, many of which wake threads. Here the threads start once and meet three times a
block. In between, each takes small parts of the work until none is left: a thread without a core delays the others by
one part.

Residuals and sums are float32. What products and attention read is rounded as `few_rows` and `decode_attention` say. A
row's result does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layers import LAYER_NORM_EPS, Linear, Mlp
from . import decode_attention, few_rows, host_code
from .host_code import LANES, LINE

if TYPE_CHECKING:
    from ..rope import Rotation
    from ..text import TextBlock

_FIRST_PART, _SECOND_PART = 32, 16
"""Rows of W that a thread takes at a time: of qkv and fc1, and of proj and fc2."""
_PARTS = "weight", "scales", "bias"
_OF_BLOCK = (
    *("norm_weight", "norm_bias"),
    *(f"{name}_{part}" for name in ("qkv", "fc1", "proj", "fc2") for part in _PARTS),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes for which the function is compiled. ``rows``: a power of two. ``half``: the rotated pairs of a head."""

    form: few_rows.Form
    group: int
    dim: int
    inner: int
    heads: int
    half: int
    rows: int = 1

    @property
    def head(self) -> int:
        return self.dim // self.heads


class DecodeStep:
    """The pass through ``blocks``, which `shape_of` takes."""

    def __init__(self, blocks: Sequence[TextBlock], shape: Shape) -> None:
        self._shape, self._num_blocks = shape, len(blocks)
        self._blocks = torch.tensor([_pointers(block) for block in blocks])

    def takes(self, x: Tensor) -> bool:
        """Whether the pass is computed here for ``x`` [rows, dim]."""
        fits = len(x) <= few_rows.MOST_ROWS and x.dtype == torch.bfloat16
        return fits and not torch.is_grad_enabled()

    def __call__(
        self, x: Tensor, rotation: Rotation, attention: decode_attention.DecodeAttention
    ) -> Tensor:
        """Returns the residual stream [rows, dim] after the last block. Stores keys and values."""
        rows = len(x)
        shape = self._shape_for(rows)
        stream = x.new_zeros(shape.rows, shape.dim, dtype=torch.float32)
        stream[:rows] = x
        tensors = {
            "blocks": self._blocks,
            "x": stream,
            "cos": rotation.cos.contiguous(),
            "sin": rotation.sin.contiguous(),
            "keys": attention.keys,
            "values": attention.values,
            "newest": attention.newest,
            "slots": attention.slots,
            "lengths": attention.lengths,
            "sync": torch.zeros(1 + 2 * self._num_blocks, LINE, dtype=torch.int64),
            "q": x.new_empty(shape.rows, shape.dim),
            "scores": stream.new_empty(
                rows, shape.heads, attention.longest + decode_attention.MORE
            ),
            "out": torch.zeros_like(stream),
            "qkv": stream.new_empty(shape.rows, 3 * shape.dim),
            "hidden": stream.new_empty(shape.rows, shape.inner),
            "own": torch.empty(torch.get_num_threads(), _Own(shape).size, dtype=torch.uint8),
        }
        pointers = [tensors[name].data_ptr() for name in _Code.tensors]
        sizes = self._num_blocks, attention.keys[0].nbytes, rows, shape.heads, attention.longest
        _compiled(shape)(*pointers, *sizes)
        return stream[:rows].to(x.dtype)

    def compile(self, most_rows: int) -> None:
        """Compiles the pass for up to ``most_rows`` rows, so that no later call waits for that."""
        for rows in range(1, min(most_rows, few_rows.MOST_ROWS) + 1):
            _compiled(self._shape_for(rows))

    def _shape_for(self, rows: int) -> Shape:
        return replace(self._shape, rows=1 << (rows - 1).bit_length())


def shape_of(blocks: Sequence[TextBlock], rotary_dim: int) -> Shape | None:
    """Returns the shape of all ``blocks``, or None if they differ or the pass can't be computed here."""
    shapes = {_shape_of(block, rotary_dim // 2) for block in blocks}
    return shapes.pop() if len(shapes) == 1 else None


def _shape_of(block: TextBlock, half: int) -> Shape | None:
    if block.tau is not None or not isinstance(block.mlp, Mlp):
        return None
    linears, kinds = _linears(block), set()
    narrow = [block.ln.weight, block.ln.bias]
    for linear in linears:
        form, bias = few_rows.form_of(linear.weight), linear.bias
        if form is None or bias is None:
            return None
        narrow += [bias] if linear.scale is None else [bias, linear.scale]
        kinds.add((form, few_rows.group_of(form, linear.weight, linear.scale)))
    # The function reads these by their addresses.
    if any(each.dtype != torch.bfloat16 or not each.is_contiguous() for each in narrow):
        return None
    form, group = kinds.pop()
    qkv, fc1, proj, _ = (len(linear.weight) for linear in linears)
    head = proj // block.n_heads
    parts_fit = qkv == 3 * proj and proj % _FIRST_PART == fc1 % _FIRST_PART == 0
    if kinds or group is None or not parts_fit or head % LANES or half % LANES:
        return None
    return Shape(form, group, proj, fc1, block.n_heads, half)


def _linears(block: TextBlock) -> tuple[Linear, Linear, Linear, Linear]:
    assert isinstance(block.mlp, Mlp)
    return block.qkv, block.mlp.fc1, block.proj, block.mlp.fc2


def _pointers(block: TextBlock) -> list[int]:
    tensors = [block.ln.weight, block.ln.bias]
    parts = ((each.weight, each.scale, each.bias) for each in _linears(block))
    return [0 if t is None else t.data_ptr() for t in (*tensors, *chain.from_iterable(parts))]


class _Own:
    """What one thread writes for itself: where it begins, and its ``size`` in bytes."""

    def __init__(self, shape: Shape) -> None:
        self.size = 0
        self.normal = self._take(4 * shape.rows * shape.dim)
        self.narrow, self.wide = self._rows(shape, shape.dim), self._rows(shape, shape.inner)

    def _take(self, size: int) -> int:
        begin, self.size = self.size, self.size + -(-size // 64) * 64
        return begin

    def _rows(self, shape: Shape, k: int) -> tuple[int, int, int, int]:
        """What a product reads of rows of ``k`` numbers: these, the same by columns, and the steps and the sums of
        groups."""
        numbers, groups = 2 * shape.rows * k, 4 * shape.rows * (k // shape.group + 1)
        first = self._take(numbers), self._take(numbers)
        return *first, self._take(groups), self._take(groups)


@cache
def _compiled(shape: Shape) -> Callable[..., None]:
    return host_code.compiled(_Code(shape))


class _Code(host_code.Code):
    """Each thread goes through all blocks."""

    tensors = (
        *("blocks", "x", "cos", "sin", "keys", "values", "newest", "slots", "lengths", "sync"),
        *("q", "scores", "out", "qkv", "hidden", "own"),
    )
    arguments = (*tensors, "num_blocks", "pool", "rows", "heads", "longest")

    def __init__(self, shape: Shape) -> None:
        super().__init__("decode_step")
        self._shape, self._own = shape, _Own(shape)
        self._tiles = few_rows.multiplies_tiles(shape.form)
        product = few_rows.Code(
            shape.form, shape.rows, shape.group, True, self._tiles, self._module
        )
        self._tile_columns = product.tile_columns
        self._prepare_rows, self._multiply = product.functions()
        self._attend = decode_attention.Code(torch.bfloat16, shape.head, self._module).function()

    def _share(self) -> None:
        b, long, dim, inner = self._b, self._long, self._shape.dim, self._shape.inner
        self._turn = self._variable(long)
        own = b.mul(self._of_team("thread_num"), long(self._own.size))
        self._begin_own = own = b.add(self._size("own"), own)
        x, out, hidden = (self._size(name) for name in ("x", "out", "hidden"))
        if self._tiles:
            self._begin_tiles(self._tile_columns)
        with self._loop(long(0), self._size("num_blocks"), 1) as block:
            self._of_block = b.mul(block, long(len(_OF_BLOCK)))
            normal = b.add(own, long(self._own.normal))
            self._normalise(normal)
            qkv = self._linear("qkv", normal, self._size("qkv"), 3 * dim, dim)
            fc1 = self._linear("fc1", normal, hidden, inner, dim)
            self._prepare_input(qkv, normal, dim)
            self._multiply_first(block, qkv, fc1)
            self._meet()
            self._attend_heads(block)
            self._meet()
            proj = self._linear("proj", out, x, dim, dim, adds=True)
            fc2 = self._linear("fc2", hidden, x, dim, inner, adds=True)
            self._prepare_input(proj, out, dim)
            self._prepare_input(fc2, hidden, inner)
            with self._claims(self._line(block, 1), long(dim // _SECOND_PART)) as part:
                first = b.mul(part, long(_SECOND_PART))
                for linear in (proj, fc2):
                    b.call(self._multiply, [linear, first, b.add(first, long(_SECOND_PART))])
            self._meet()
        if self._tiles:
            self._end_tiles()

    def _multiply_first(self, block: Any, qkv: Any, fc1: Any) -> None:
        b, long, shape = self._b, self._long, self._shape
        of_qkv = 3 * shape.dim // _FIRST_PART
        parts = long(of_qkv + shape.inner // _FIRST_PART)
        with self._claims(self._line(block, 0), parts) as part:
            is_qkv = b.icmp_signed("<", part, long(of_qkv))
            its = b.select(is_qkv, part, b.sub(part, long(of_qkv)))
            first = b.mul(its, long(_FIRST_PART))
            end = b.add(first, long(_FIRST_PART))
            b.call(self._multiply, [b.select(is_qkv, qkv, fc1), first, end])
            with b.if_then(b.not_(is_qkv)), self._loop(long(0), long(shape.rows), 1) as row:
                begin = b.mul(row, long(shape.inner))
                with self._loop(b.add(begin, first), b.add(begin, end), LANES) as at:
                    y = self._gelu(self._load("hidden", at, self._floats))
                    self._store(y, "hidden", at)

    def _linear(self, name: str, rows: Any, y: Any, n: int, k: int, *, adds: bool = False) -> Any:
        """The arguments of a product with ``rows`` of ``k`` floats. See `few_rows.Code`."""
        # proj and fc2 are prepared together.
        place = self._own.wide if name == "fc2" else self._own.narrow
        numbers, turned, steps, sums = (
            self._b.add(self._begin_own, self._long(at)) for at in place
        )
        weight = {part: self._number_of_block(f"{name}_{part}") for part in _PARTS}
        x, rounded = (numbers, turned) if self._shape.form == "bf16" else (rows, numbers)
        given = {"x": x, "rounded": rounded, "steps": steps, "sums": sums, "y": y}
        sizes = {"n": self._long(n), "k": self._long(k), "adds": self._long(int(adds))}
        return self._structure(few_rows.Code.arguments, weight | given | sizes)

    def _structure(self, names: Sequence[str], values: Mapping[str, Any]) -> Any:
        b = self._b
        with b.goto_entry_block():
            found = b.bitcast(b.alloca(self._long, len(names)), self._pointer)
        for i, name in enumerate(names):
            b.store(values[name], b.gep(found, [self._long(i)], source_etype=self._long))
        return found

    def _number_of_block(self, name: str) -> Any:
        place = self._b.add(self._of_block, self._long(_OF_BLOCK.index(name)))
        return self._load("blocks", place, self._long)

    def _prepare_input(self, linear: Any, rows: Any, k: int) -> None:
        """Rounds ``rows`` for the product ``linear``."""
        b, long = self._b, self._long
        if self._shape.form != "bf16":
            b.call(self._prepare_rows, [linear])
            return
        place = few_rows.Code.arguments.index("x")
        x = b.load(b.gep(linear, [long(place)], source_etype=long), typ=long)
        with self._loop(long(0), long(self._shape.rows * k), LANES) as at:
            numbers = b.load(self._place(rows, at, self._float), typ=self._floats, align=4)
            b.store(self._to_bfloat(numbers), self._place(x, at, self._half), align=2)
        if self._tiles:
            b.call(self._prepare_rows, [linear])

    def _normalise(self, normal: Any) -> None:
        """LayerNorm of all rows."""
        b, long, dim = self._b, self._long, self._shape.dim
        weight, bias = (self._number_of_block(f"norm_{part}") for part in ("weight", "bias"))
        share = self._float(1 / dim)
        with self._loop(long(0), long(self._shape.rows), 1) as row:
            begin = b.mul(row, long(dim))
            end = b.add(begin, long(dim))
            total, squares = self._variable(self._floats), self._variable(self._floats)
            with self._loop(begin, end, LANES) as at:
                x = self._load("x", at, self._floats)
                b.store(b.fadd(b.load(total, typ=self._floats), x), total)
            mean = self._splat(b.fmul(self._sum(b.load(total, typ=self._floats)), share))
            with self._loop(begin, end, LANES) as at:
                x = b.fsub(self._load("x", at, self._floats), mean)
                b.store(self._fma(x, x, b.load(squares, typ=self._floats)), squares)
            variance = b.fmul(self._sum(b.load(squares, typ=self._floats)), share)
            root = self._known("llvm.sqrt.f32", self._float, self._float)
            spread = b.call(root, [b.fadd(variance, self._float(LAYER_NORM_EPS))])
            inverse = self._splat(b.fdiv(self._float(1.0), spread))
            with self._loop(long(0), long(dim), LANES) as at:
                place = b.add(begin, at)
                x = b.fmul(b.fsub(self._load("x", place, self._floats), mean), inverse)
                factor, term = (self._bfloats_at(each, at) for each in (weight, bias))
                y = self._fma(x, factor, term)
                b.store(y, self._place(normal, place, self._float), align=4)

    def _attend_heads(self, block: Any) -> None:
        """Turns queries and keys, stores keys and values, and attends, for this thread's heads."""
        b, long, shape = self._b, self._long, self._shape
        first, end = self._part(long(shape.heads))
        before = b.mul(block, self._size("pool"))
        pools = {name: b.add(self._size(name), before) for name in ("keys", "values")}
        none = self._ir.Constant(self._floats, None)
        with self._loop(long(0), self._size("rows"), 1) as row:
            newest = b.mul(self._load("newest", row, long), long(shape.dim))
            begin = b.mul(row, long(3 * shape.dim))
            with self._loop(first, end, 1) as head:
                of_head = b.mul(head, long(shape.head))
                line = b.add(b.mul(row, long(shape.dim)), of_head)
                begins = [b.add(begin, b.add(of_head, long(i * shape.dim))) for i in range(3)]
                q, k, v = (
                    [
                        self._load("qkv", b.add(at, long(i)), self._floats)
                        for i in range(0, shape.head, LANES)
                    ]
                    for at in begins
                )
                stored = b.add(newest, of_head)
                for vectors, pool, at in (
                    (self._turned(q, row), self._size("q"), line),
                    (self._turned(k, row), pools["keys"], stored),
                    (v, pools["values"], stored),
                ):
                    for i, vector in enumerate(vectors):
                        place = self._place(pool, b.add(at, long(i * LANES)), self._half)
                        b.store(self._to_bfloat(vector), place, align=2)
                for i in range(0, shape.head, LANES):
                    self._store(none, "out", b.add(line, long(i)))
        names = decode_attention.Code.arguments
        own = {name: self._size(name) for name in names if name not in pools}
        b.call(self._attend, [self._structure(names, own | pools), first, end])

    def _turned(self, vectors: list[Any], row: Any) -> list[Any]:
        """The numbers of a head after the rotation (`rope.Rotation`)."""
        b, half = self._b, self._shape.half
        count, found = half // LANES, list(vectors)
        for i in range(count):
            at = b.add(b.mul(row, self._long(half)), self._long(i * LANES))
            cos, sin = (self._load(name, at, self._floats) for name in ("cos", "sin"))
            x, y = vectors[i], vectors[count + i]
            found[i] = b.fsub(b.fmul(x, cos), b.fmul(y, sin))
            found[count + i] = self._fma(x, sin, b.fmul(y, cos))
        return found

    def _bfloats_at(self, start: Any, index: Any) -> Any:
        """16 bfloat16 numbers, as floats."""
        b, kind = self._b, self._vector(self._half)
        bits = b.load(self._place(start, index, self._half), typ=kind, align=2)
        return self._low_halves(b.zext(bits, self._words))

    def _store(self, vector: Any, name: str, index: Any) -> None:
        self._b.store(vector, self._at(name, index, self._float), align=4)

    def _line(self, block: Any, which: int) -> Any:
        """The line of ``sync`` for the first or the second claims of a block."""
        return self._b.add(self._b.mul(block, self._long(2)), self._long(1 + which))
