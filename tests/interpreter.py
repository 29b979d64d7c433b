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
    _patch_once_a_launch(interpreter)
    _remember_shapes()
    _combine_at_once(interpreter)
    _pass_semantic(interpreter)
    _round_to_fp8(interpreter)


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


def _patch_once_a_launch(interpreter: Any) -> None:
    """Each call of one jitted function by another replaces the members of triton.language anew, after a walk over all
    of them; once a launch is enough for all functions of a module."""
    original = getattr(interpreter, "_patch_lang", None)
    scope_type = getattr(interpreter, "_LangPatchScope", None)
    if original is None or scope_type is None:
        return
    patched: set[int] = set()

    def patch(fn: Any) -> Any:
        module = id(fn.__globals__)
        if module in patched:
            return scope_type()
        scope = original(fn)
        patched.add(module)
        restore = scope.restore

        def restore_all() -> None:
            # Called for a launch's own scope only, at its end.
            patched.clear()
            restore()

        scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch


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
    """Operators on operands of one common element type need none of the rules of promotion, and numpy broadcasts by
    itself. The result is that of the interpreter, which calls the same numpy functions after its rules."""
    core = triton.language.core
    tensor, constexpr, make_handle = core.tensor, core.constexpr, interpreter.TensorHandle
    semantic = interpreter.interpreter_semantic
    plain = {
        "fp32": (np.float32, -math.inf, math.inf),
        "int32": (np.int32, -(2**31), 2**31 - 1),
        "int64": (np.int64, -(2**63), 2**63 - 1),
        "int1": (np.bool_, 0, -1),  # No numbers.
    }
    kinds = {name: np.dtype(kind[0]) for name, kind in plain.items()}
    blocks: dict[tuple[str, tuple[int, ...]], Any] = {}

    def block(scalar: Any, shape: tuple[int, ...]) -> Any:
        if (scalar.name, shape) not in blocks:
            blocks[scalar.name, shape] = core.block_type(scalar, list(shape))
        return blocks[scalar.name, shape]

    def combine(left: Any, right: Any, function: Any, names: frozenset[str], makes: Any) -> Any:
        """None where the operands need the interpreter's rules."""
        left_type = left.type
        scalar = left_type.scalar
        name = scalar.name
        if name not in names:
            return None
        is_block = left_type is not scalar
        if type(right) is constexpr:
            right = right.value
        data = left.handle.data
        if type(right) is tensor:
            other_scalar = right.type.scalar
            other = right.handle.data
            if other_scalar.name != name or other.dtype is not kinds[name]:
                return None
            is_block = is_block or right.type is not other_scalar
        else:
            number, least, most = plain[name]
            if type(right) is not int and not (type(right) is float and name == "fp32"):
                return None
            if not least <= right <= most:
                return None
            other = number(right)
        if data.dtype is not kinds[name]:
            return None
        result = function(data, other)
        made = makes or scalar
        return tensor(make_handle(result, scalar), block(made, result.shape) if is_block else made)

    def move(pointer: Any, offset: Any) -> Any:
        scalar = pointer.type.scalar
        if not scalar.is_ptr() or type(offset) is not tensor:
            return None
        offset_scalar, data = offset.type.scalar, offset.handle.data
        if (
            offset_scalar.name not in ("int32", "int64")
            or data.dtype is not kinds[offset_scalar.name]
        ):
            return None
        handle = interpreter.interpreter_builder.create_addptr(pointer.handle, offset.handle)
        is_block = pointer.type is not scalar or offset.type is not offset_scalar
        return tensor(handle, block(scalar, handle.data.shape) if is_block else scalar)

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
            data = self.handle.data[slices]
            return tensor(
                make_handle(data, self.handle.dtype.scalar), block(self.dtype, data.shape)
            )
        return original_index(self, slices, _semantic=_semantic or semantic)

    original_index = tensor.__getitem__
    tensor.__getitem__ = index
    for name, function in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
        replace(f"__{name}__", function, "fp32 int32 int64")
        flipped = (lambda a, b: np.subtract(b, a)) if name == "sub" else function
        replace(f"__r{name}__", flipped, "fp32 int32 int64")
    replace("__truediv__", np.divide, "fp32")
    for name, function in {
        "__lt__": np.less,
        "__le__": np.less_equal,
        "__gt__": np.greater,
        "__ge__": np.greater_equal,
        "__eq__": np.equal,
        "__ne__": np.not_equal,
    }.items():
        replace(name, function, "fp32 int32 int64", core.int1)
    replace("__and__", np.bitwise_and, "int1 int32 int64")
    replace("__or__", np.bitwise_or, "int1 int32 int64")


def _pass_semantic(interpreter: Any) -> None:
    """Each launch replaces some hundred functions, which it finds anew, and each call of one copies its arguments."""
    if not hasattr(interpreter, "_patch_builtin"):
        return
    semantic, core = interpreter.interpreter_semantic, triton.language.core
    found: dict[int, list[tuple[str, Any]]] = {}

    def passing(member: Any) -> Any:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return call

    def patch(package: Any, builder: Any, scope: Any) -> None:
        if id(package) not in found:
            found[id(package)] = [
                (name, passing(member))
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
