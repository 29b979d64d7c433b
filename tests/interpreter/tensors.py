"""Tensors of common types, made and combined without the rules of promotion."""

import math
from typing import Any, NamedTuple

import numpy as np
import triton.language

PLAIN = {
    "fp32": (np.float32, -math.inf, math.inf),
    "int32": (np.int32, -(2**31), 2**31 - 1),
    "int64": (np.int64, -(2**63), 2**63 - 1),
    "uint32": (np.uint32, 0, 2**32 - 1),
    "int1": (np.bool_, 0, -1),  # No numbers.
}
KINDS = {name: np.dtype(kind[0]) for name, kind in PLAIN.items()}
SIGNED = frozenset(("fp32", "int32", "int64"))


class PlainTensors(NamedTuple):
    """Functions on tensors of common types. Each gives None where the operands need the interpreter's rules."""

    make: Any
    """(data, scalar type, is_block) to a tensor."""
    as_number: Any
    combine: Any
    move: Any


def plain_tensors(interpreter: Any) -> PlainTensors:
    """The result is that of the interpreter, which calls the same numpy functions after its rules."""
    core = triton.language.core
    tensor, constexpr, make_handle = core.tensor, core.constexpr, interpreter.TensorHandle
    new = tensor.__new__
    plain, kinds = PLAIN, KINDS
    promoted = {
        pair: common
        for one, other, common in (
            ("int32", "int64", "int64"),
            ("int32", "fp32", "fp32"),
            ("int64", "fp32", "fp32"),
        )
        for pair in ((one, other), (other, one))
    }
    blocks: dict[tuple[str, tuple[int, ...]], Any] = {}
    no_shape = core.tuple([]), constexpr(1)
    widths: dict[str, int] = {}

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

    return PlainTensors(make, as_number, combine, move)
