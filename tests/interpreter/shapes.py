"""Shapes and types of results, remembered."""

import math
from typing import Any

import triton.language


def remember_shapes() -> None:
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
