"""Divides what Triton's interpreter costs, by not doing again what it has done, and rounds to FP8 as a GPU does.

It works on names that Triton keeps to itself: where one is missing, that part of the interpreter stays as it is.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import numpy as np
import torch
import triton.language


def quicken(interpreter: Any) -> None:
    """``interpreter``: the module triton.runtime.interpreter."""
    _check_no_overflows(interpreter)
    _remember_numpy_types(interpreter)
    _patch_once(interpreter)
    _call_device_functions(interpreter)
    _make_handles_unchecked(interpreter)
    _index_memory(interpreter)
    _remember_shapes()
    _combine_at_once(interpreter)
    _round_to_fp8(interpreter)
    _erf_of_arrays(interpreter)


def _check_no_overflows(interpreter: Any) -> None:
    """Every integer operation is repeated in 64 bits for an assertion that is dropped unless TRITON_DEBUG is set."""
    builder = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if getattr(options, "sanitize_overflow", False) and not getattr(options, "debug", True):
        builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _remember_numpy_types(interpreter: Any) -> None:
    """Otherwise a table of twenty types is built for each lookup."""
    original = getattr(interpreter, "_get_np_dtype", None)
    if original is None:
        return
    known: dict[str, Any] = {}

    def of(tt_dtype: Any) -> Any:
        name = tt_dtype.scalar.name  # Of a block its elements' type; blocks have no hash.
        if name not in known:
            known[name] = original(tt_dtype)
        return known[name]

    interpreter._get_np_dtype = of


def _patch_once(interpreter: Any) -> None:
    """Each launch, and each call of a jitted function by another, replaces the members of triton.language and puts them
    back. Here they stay replaced: nothing is compiled in a process that interprets."""
    original = getattr(interpreter, "_patch_lang", None)
    scope_type = getattr(interpreter, "_LangPatchScope", None)
    if original is None or scope_type is None:
        return
    patched: dict[int, Any] = {}  # Holds the modules, so that no other gets the id of one.

    def patch(fn: Any) -> Any:
        if id(fn.__globals__) not in patched:
            patched[id(fn.__globals__)] = fn.__globals__
            original(fn)
        return scope_type()

    interpreter._patch_lang = patch


def _call_device_functions(interpreter: Any) -> None:
    """A call of a jitted function by another looks its rewritten source up, and no more."""
    function_type = getattr(interpreter, "InterpretedFunction", None)
    if not hasattr(function_type, "rewrite") or not hasattr(interpreter, "_patch_lang"):
        return

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        rewritten = self.__dict__.get("rewritten_once")
        if rewritten is None:
            interpreter._patch_lang(self.fn)
            rewritten = self.rewritten_once = self.rewrite()
        try:
            return rewritten(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    function_type.__call__ = call


def _make_handles_unchecked(interpreter: Any) -> None:
    """Each handle checks that its numbers fit its type; those who make handles have seen to that."""

    def make(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype = data, dtype
        self.attr = {} if attr is None else attr

    interpreter.TensorHandle.__init__ = make


FIRST_ADDRESS, LAST_ADDRESS = 4096, 1 << 47
FEW = 16
"""Up to this many addresses the interpreter's own loop takes less time than numpy."""


class _Memory:
    """The memory of this process as bytes, for numpy."""

    def __init__(self) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (LAST_ADDRESS - FIRST_ADDRESS,),
            "data": (FIRST_ADDRESS, False),
        }


def _index_memory(interpreter: Any) -> None:
    """The interpreter's own loop takes 75 ns for each address, numpy 5 ns."""
    module = getattr(interpreter, "_interpreter", None)
    if not hasattr(module, "load") or not hasattr(module, "store"):
        return
    plain_load, plain_store = module.load, module.store
    memory = np.asarray(_Memory())
    views: dict[Any, Any] = {}

    def view(dtype: Any) -> Any:
        if dtype not in views:
            views[dtype] = memory.view(dtype)
        return views[dtype]

    def places(pointers: Any, size: int) -> Any:
        """Indices in a view, or None where an address is not aligned."""
        if size > 1 and np.bitwise_or.reduce(pointers, axis=None) & np.uint64(size - 1):
            return None
        return (pointers.view(np.int64) - FIRST_ADDRESS) >> (size.bit_length() - 1)

    def load(pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        indices = places(pointers, dtype.itemsize) if pointers.size > FEW else None
        mask = np.asarray(mask)  # Tensor descriptors give a memoryview.
        if indices is None or mask.shape != indices.shape:
            return plain_load(pointers, mask, other, dtype)
        if mask.all():
            return view(dtype).take(indices)
        if not mask.any():
            return other.astype(dtype)
        some = indices.item(mask.argmax())
        return np.where(mask, view(dtype).take(np.where(mask, indices, some)), other)

    def store(pointers: Any, values: Any, mask: Any) -> None:
        indices = places(pointers, values.dtype.itemsize) if pointers.size > FEW else None
        mask = np.asarray(mask)
        if indices is None or not mask.shape == indices.shape == values.shape:
            plain_store(pointers, values, mask)
        elif mask.all():
            view(values.dtype)[indices] = values
        else:
            view(values.dtype)[indices[mask]] = values[mask]

    module.load, module.store = load, store


def _remember_shapes() -> None:
    """Each operation makes the type of its result anew, and wraps each size of its shape twice: more than half of all
    time, for a few dozen shapes. And most operands have equal shapes, which nothing needs to be made of."""
    core = triton.language.core
    semantic = getattr(triton.language.semantic, "TritonSemantic", None)
    if not hasattr(semantic, "broadcast_impl_value"):
        return
    block_init, broadcast = core.block_type.__init__, semantic.broadcast_impl_value
    blocks: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        if sizes not in blocks:
            block_init(self, element_ty, shape)
            blocks[sizes] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, words = blocks[sizes]
        self.name = f"<{words}, {element_ty}>"

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in tensors:
            wrapped = core.tuple([core.constexpr(size) for size in sizes])
            tensors[sizes] = wrapped, core.constexpr(math.prod(sizes))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensors[sizes]

    def make_alike(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        alike = left.is_block() == right.is_block() and (
            not left.is_block() or left.shape.values == right.shape.values
        )
        return (lhs, rhs) if alike else broadcast(self, lhs, rhs)

    def cast(self: Any, input: Any, dst_ty: Any, *rounding: Any, **kwargs: Any) -> Any:
        if input.type.scalar is dst_ty.scalar:
            return input
        return original_cast(self, input, dst_ty, *rounding, **kwargs)

    original_cast, semantic.cast = semantic.cast, cast
    core.block_type.__init__ = make_block
    core.tensor.__init__ = make_tensor
    semantic.broadcast_impl_value = make_alike


def _combine_at_once(interpreter: Any) -> None:
    """Operators, loads, stores and conversions of common types need none of the rules of promotion, and numpy
    broadcasts by itself. The result is that of the interpreter, which calls the same numpy functions after its rules.
    Where operands are of other kinds, the interpreter's own function is called."""
    core = triton.language.core
    tensor, constexpr, make_handle = core.tensor, core.constexpr, interpreter.TensorHandle
    semantic = interpreter.interpreter_semantic
    new = tensor.__new__
    plain = {
        "fp32": (np.float32, -math.inf, math.inf),
        "int32": (np.int32, -(2**31), 2**31 - 1),
        "int64": (np.int64, -(2**63), 2**63 - 1),
        "uint32": (np.uint32, 0, 2**32 - 1),
        "int1": (np.bool_, 0, -1),  # No numbers.
    }
    kinds = {name: np.dtype(kind[0]) for name, kind in plain.items()}
    promoted = {
        pair: common
        for one, other, common in (
            ("int32", "int64", "int64"),
            ("int32", "fp32", "fp32"),
            ("int64", "fp32", "fp32"),
        )
        for pair in ((one, other), (other, one))
    }
    convertible = {
        f"{kind}{bits}": np.dtype(f"{word}{bits}")
        for kind, word, sizes in (
            ("int", "int", (8, 16, 32, 64)),
            ("uint", "uint", (8, 16, 32)),
            ("fp", "float", (32, 64)),
        )
        for bits in sizes
    }
    blocks: dict[tuple[str, tuple[int, ...]], Any] = {}
    no_shape = core.tuple([]), constexpr(1)
    widths: dict[str, int] = {}
    ranges: dict[tuple[int, int], Any] = {}
    ones: dict[tuple[int, ...], Any] = {}
    zeros: dict[tuple[Any, tuple[int, ...]], Any] = {}
    checked: set[Any] = set()

    def make(data: Any, scalar: Any, is_block: bool) -> Any:
        made = new(tensor)
        made.handle = make_handle(data, scalar)
        made.dtype = scalar
        if not is_block:
            made.type = scalar
            made.shape, made.numel = no_shape
            return made
        key = scalar.name, data.shape
        if key not in blocks:
            shape = core.tuple([constexpr(size) for size in data.shape])
            size = constexpr(math.prod(data.shape))
            blocks[key] = core.block_type(scalar, list(data.shape)), shape, size
        made.type, made.shape, made.numel = blocks[key]
        return made

    def as_number(value: Any, name: str) -> Any:
        """``value`` as a numpy scalar of a plain type, or None."""
        number, least, most = plain[name]
        if type(value) is not int and not (type(value) is float and name == "fp32"):
            return None
        return number(value) if least <= value <= most else None

    def combine(left: Any, right: Any, function: Any, names: frozenset[str], makes: Any) -> Any:
        """None where the operands need the interpreter's rules."""
        left_type = left.type
        scalar = left_type.scalar
        name = scalar.name
        if name not in kinds:
            return None
        is_block = left_type is not scalar
        if type(right) is constexpr:
            right = right.value
        data = left.handle.data
        if data.dtype is not kinds[name]:
            return None
        if type(right) is tensor:
            other_scalar = right.type.scalar
            other = right.handle.data
            other_name = other_scalar.name
            if other.dtype is not kinds.get(other_name):
                return None
            is_block = is_block or right.type is not other_scalar
            if other_name != name:
                common = promoted.get((name, other_name))
                if common is None:
                    return None
                if common != name:
                    name, scalar = common, other_scalar
                    data = data.astype(kinds[name])
                else:
                    other = other.astype(kinds[name])
        else:
            other = as_number(right, name)
        if other is None or name not in names:
            return None
        return make(function(data, other), makes or scalar, is_block)

    def move(pointer: Any, offset: Any) -> Any:
        """The sum of a pointer and an integer, or None."""
        scalar = pointer.type.scalar
        if not scalar.is_ptr():
            return None
        if scalar.name not in widths:
            widths[scalar.name] = max(1, pointer.handle.get_element_ty().primitive_bitwidth // 8)
        width = widths[scalar.name]
        if type(offset) is constexpr:
            offset = offset.value
        is_block = pointer.type is not scalar
        if type(offset) is tensor:
            offset_scalar, data = offset.type.scalar, offset.handle.data
            name = offset_scalar.name
            if name not in ("int32", "int64") or data.dtype is not kinds[name]:
                return None
            is_block = is_block or offset.type is not offset_scalar
            data = data.view(np.uint64) if name == "int64" else data.astype(np.uint64)
            moved = data if width == 1 else np.uint64(width) * data
        elif type(offset) is int:
            moved = np.uint64(width * offset % 2**64)
        else:
            return None
        return make(pointer.handle.data + moved, scalar, is_block)

    def replace(name: str, function: Any, types: str, makes: Any = None) -> None:
        original, names = getattr(tensor, name), frozenset(types.split())

        def operate(self: Any, other: Any, _semantic: Any = None) -> Any:
            if _semantic is None:
                result = combine(self, other, function, names, makes)
                if result is None and name == "__add__":
                    result = move(self, other)
                if result is not None:
                    return result
            return original(self, other, _semantic=_semantic or semantic)

        setattr(tensor, name, operate)

    def index(self: Any, slices: Any, _semantic: Any = None) -> Any:
        """``x[:, None]``"""
        if (
            _semantic is None
            and type(slices) is tuple
            and self.type.is_block()
            and all(part is None or part == slice(None) for part in slices)
        ):
            return make(self.handle.data[slices], self.dtype, True)
        return original_index(self, slices, _semantic=_semantic or semantic)

    def negate(self: Any, _semantic: Any = None) -> Any:
        result = combine(self, 0, lambda data, zero: np.subtract(zero, data), signed, None)
        return original_negate(self, _semantic=_semantic or semantic) if result is None else result

    def to_tensor(x: Any, check_type: bool = True) -> Any:
        return x if type(x) is tensor else original_to_tensor(x, check_type)

    original_index, tensor.__getitem__ = tensor.__getitem__, index
    original_negate, tensor.__neg__ = tensor.__neg__, negate
    original_to_tensor, semantic.to_tensor = semantic.to_tensor, to_tensor
    signed = frozenset(("fp32", "int32", "int64"))
    numbers, integers = "fp32 int32 int64 uint32", "int32 int64"
    for name, function in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
        replace(f"__{name}__", function, numbers)
        flipped = (lambda a, b: np.subtract(b, a)) if name == "sub" else function
        replace(f"__r{name}__", flipped, numbers)
    replace("__truediv__", np.divide, "fp32")
    replace("__rtruediv__", lambda a, b: np.divide(b, a), "fp32")
    # C's division and remainder, as the interpreter computes them.
    replace("__floordiv__", lambda a, b: (a - np.fmod(a, b)) // b, integers)
    replace("__mod__", np.fmod, integers)
    for name, function in {
        "__lt__": np.less,
        "__le__": np.less_equal,
        "__gt__": np.greater,
        "__ge__": np.greater_equal,
        "__eq__": np.equal,
        "__ne__": np.not_equal,
    }.items():
        replace(name, function, numbers, core.int1)
    for name, function in (
        ("and", np.bitwise_and),
        ("or", np.bitwise_or),
        ("xor", np.bitwise_xor),
    ):
        replace(f"__{name}__", function, "int1 int32 int64 uint32")

    def plain_mask(mask: Any) -> bool:
        return mask is None or (type(mask) is tensor and mask.dtype.name == "int1")

    def all_true(shape: tuple[int, ...]) -> Any:
        if shape not in ones:
            ones[shape] = np.ones(shape, np.bool_)
        return ones[shape]

    def memory_type(pointer: Any, options: Any) -> Any:
        """The type of what ``pointer`` points to. None where it is uncommon, and for options not seen before: the
        interpreter checks them."""
        key = tuple(options.items())
        if key not in checked:
            checked.add(key)
            return None
        element = getattr(pointer.type.scalar, "element_ty", None)
        name = getattr(element, "name", "int1")
        return None if name == "int1" or getattr(element, "element_ty", None) else element

    def quick_load(usual: Any) -> Any:
        def load(pointer: Any, mask: Any = None, other: Any = None, *more: Any, **options: Any):
            def as_usual() -> Any:
                return usual(pointer, mask, other, *more, **options)

            element = None if more or not plain_mask(mask) else memory_type(pointer, options)
            if element is None or (mask is None and other is not None):
                return as_usual()
            addresses = pointer.handle.data
            is_block = pointer.type.is_block()
            if not is_block and mask is not None and mask.type.is_block():
                return as_usual()
            allowed = all_true(addresses.shape) if mask is None else mask.handle.data
            if allowed.shape != addresses.shape:
                addresses, allowed = np.broadcast_arrays(addresses, allowed)
            dtype = interpreter._get_np_dtype(element)
            if type(other) is constexpr:
                other = other.value
            if type(other) is tensor:
                instead = other.handle.data
                if other.dtype.name != element.name or instead.shape != addresses.shape:
                    return as_usual()
            else:
                if other is not None and other != 0:
                    return as_usual()
                key = dtype, addresses.shape
                if key not in zeros:
                    zeros[key] = np.zeros(addresses.shape, dtype)
                instead = zeros[key]
            data = interpreter._interpreter.load(addresses, allowed, instead, dtype)
            return make(data, element, is_block)

        return load

    def quick_store(usual: Any) -> Any:
        def store(pointer: Any, value: Any, mask: Any = None, *more: Any, **options: Any) -> Any:
            element = None if more or not plain_mask(mask) else memory_type(pointer, options)
            is_block = pointer.type.is_block()
            given = [each for each in (value, mask) if type(each) is tensor]
            if (
                element is None
                or type(value) is not tensor
                or value.dtype.name != element.name
                or (not is_block and any(each.type.is_block() for each in given))
            ):
                return usual(pointer, value, mask, *more, **options)
            addresses, data = pointer.handle.data, value.handle.data
            allowed = all_true(addresses.shape) if mask is None else mask.handle.data
            if data.shape != addresses.shape:
                data = np.broadcast_to(data, addresses.shape)
            if allowed.shape != addresses.shape:
                allowed = np.broadcast_to(allowed, addresses.shape)
            interpreter._interpreter.store(addresses, data, allowed)
            return None

        return store

    def quick_where(usual: Any) -> Any:
        def where(condition: Any, x: Any, y: Any) -> Any:
            sides = [side.value if type(side) is constexpr else side for side in (x, y)]
            types = [side.type for side in sides if type(side) is tensor]
            if type(condition) is not tensor or condition.dtype.name != "int1" or not types:
                return usual(condition, x, y)
            scalar = types[0].scalar
            if scalar.name not in kinds or any(each.scalar.name != scalar.name for each in types):
                return usual(condition, x, y)
            data = [
                side.handle.data if type(side) is tensor else as_number(side, scalar.name)
                for side in sides
            ]
            if any(each is None or each.dtype is not kinds[scalar.name] for each in data):
                return usual(condition, x, y)
            is_block = any(each.is_block() for each in (condition.type, *types))
            return make(np.where(condition.handle.data, *data), scalar, is_block)

        return where

    def quick_limit(function: Any) -> Any:
        def quick(usual: Any) -> Any:
            def limit(x: Any, y: Any, **options: Any) -> Any:
                result = None
                one, other = (x, y) if type(x) is tensor else (y, x)
                if type(one) is tensor and not options:
                    result = combine(one, other, function, signed, None)
                return usual(x, y, **options) if result is None else result

            return limit

        return quick

    def quick_arange(usual: Any) -> Any:
        def arange(start: Any, end: Any) -> Any:
            key = getattr(start, "value", start), getattr(end, "value", end)
            if key not in ranges:
                ranges[key] = usual(start, end)
            return ranges[key]

        return arange

    def quick_cast(usual: Any) -> Any:
        def cast(x: Any, dtype: Any, *how: Any, **options: Any) -> Any:
            target = dtype.value if type(dtype) is constexpr else dtype
            if type(x) is not tensor or how or options:
                return usual(x, dtype, *how, **options)
            source = x.dtype.name
            if source == target.name:
                return x
            pair = {source, target.name}
            if pair == {"fp16", "fp32"}:
                kind = np.dtype(np.float16 if target.name == "fp16" else np.float32)
            elif target.name in convertible and (source in convertible or source == "int1"):
                kind = convertible[target.name]
            else:
                return usual(x, dtype)
            return make(x.handle.data.astype(kind), target, x.type.is_block())

        return cast

    quick = {
        "load": quick_load,
        "store": quick_store,
        "where": quick_where,
        "minimum": quick_limit(np.minimum),
        "maximum": quick_limit(np.maximum),
        "arange": quick_arange,
        "cast": quick_cast,
        "to": quick_cast,
    }
    _pass_semantic(interpreter, quick)


def _pass_semantic(interpreter: Any, quick: dict[str, Any]) -> None:
    """Members of triton.language get the semantic, without a copy of their arguments at each call. ``quick``: for some
    names, a function that makes a quicker one of the usual."""
    if not hasattr(interpreter, "_patch_builtin"):
        return
    semantic, core = interpreter.interpreter_semantic, triton.language.core
    packages = (triton.language, core, core.tensor)
    found: dict[int, list[tuple[str, Any]]] = {}

    def passing(name: str, member: Any, package: Any) -> Any:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return quick[name](call) if name in quick and package in packages else call

    def patch(package: Any, builder: Any, scope: Any) -> None:
        if id(package) not in found:
            found[id(package)] = [
                (name, passing(name, member, package))
                for name, member in inspect.getmembers(package)
                if core.is_builtin(member)
            ]
        for name, member in found[id(package)]:
            scope.set_attr(package, name, member)

    interpreter._patch_builtin = patch


def _round_to_fp8(interpreter: Any) -> None:
    """The interpreter loses the carry of a fraction that rounds up to the next power of two: of 124 it makes 64. A GPU
    rounds to the nearest, ties to even, and makes the largest number of what is larger."""
    original = getattr(interpreter, "_convert_float", None)
    if original is None:
        return

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if str(target) != "fp8e4nv" or str(source) not in ("fp32", "fp16"):
            return original(data, source, target, rounding)
        floats = np.ascontiguousarray(data).view(
            np.float32 if str(source) == "fp32" else np.float16
        )
        limited = torch.from_numpy(floats.astype(np.float32)).clamp(-448, 448)
        return limited.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = convert


def _erf_of_arrays(interpreter: Any) -> None:
    """The interpreter calls the function of the math module for each number."""

    def erf(numbers: Any) -> Any:
        return torch.erf(torch.from_numpy(numbers.astype(np.float64))).numpy().astype(numbers.dtype)

    if hasattr(interpreter, "np_erf_fp32"):
        interpreter.np_erf_fp32 = erf
