"""Operators of tensors of common types."""

from typing import Any

import numpy as np
import triton.language

from tests.interpreter.tensors import SIGNED, PlainTensors


def quicken_operators(interpreter: Any, plain: PlainTensors) -> None:
    """Numpy broadcasts by itself. Where operands are of uncommon kinds, the interpreter's own function is called."""
    core, tensor = triton.language.core, triton.language.core.tensor
    semantic = interpreter.interpreter_semantic
    make, combine, move = plain.make, plain.combine, plain.move

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
        result = combine(self, 0, lambda data, zero: np.subtract(zero, data), SIGNED, None)
        return original_negate(self, _semantic=_semantic or semantic) if result is None else result

    def to_tensor(x: Any, check_type: bool = True) -> Any:
        return x if type(x) is tensor else original_to_tensor(x, check_type)

    original_index, tensor.__getitem__ = tensor.__getitem__, index
    original_negate, tensor.__neg__ = tensor.__neg__, negate
    original_to_tensor, semantic.to_tensor = semantic.to_tensor, to_tensor
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
    for name, function in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
        replace(f"__{name}__", function, "int1 int32 int64 uint32")
