"""Divides what Triton's interpreter costs, by not doing again what it has done, and rounds to FP8 as a GPU does.

It works on names that Triton keeps to itself: where one is missing, that part of the interpreter stays as it is.
"""

from __future__ import annotations

import dataclasses
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

    core.block_type.__init__ = make_block
    core.tensor.__init__ = make_tensor
    semantic.broadcast_impl_value = make_alike


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
