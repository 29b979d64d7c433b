"""Members of triton.language that get the semantic at once, and quicker ones for tensors of common types."""

import inspect
from typing import Any

import numpy as np
import triton.language

from tests.interpreter.tensors import KINDS, SIGNED, PlainTensors


def quicken_members(interpreter: Any, plain: PlainTensors) -> None:
    """Loads, stores, conversions and a few more need none of the rules for common types."""
    core = triton.language.core
    tensor, constexpr = core.tensor, core.constexpr
    make, as_number, combine, kinds = plain.make, plain.as_number, plain.combine, KINDS
    convertible = {
        f"{kind}{bits}": np.dtype(f"{word}{bits}")
        for kind, word, sizes in (
            ("int", "int", (8, 16, 32, 64)),
            ("uint", "uint", (8, 16, 32)),
            ("fp", "float", (32, 64)),
        )
        for bits in sizes
    }
    ranges: dict[tuple[int, int], Any] = {}
    ones: dict[tuple[int, ...], Any] = {}
    zeros: dict[tuple[Any, tuple[int, ...]], Any] = {}
    checked: set[Any] = set()

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
                    result = combine(one, other, function, SIGNED, None)
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
    pass_semantic(interpreter, quick)


def pass_semantic(interpreter: Any, quick: dict[str, Any]) -> None:
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
