"""What a launch, and a call of one jitted function by another, need not do again."""

import dataclasses
from typing import Any


def check_no_overflows(interpreter: Any) -> None:
    """Every integer operation is repeated in 64 bits for an assertion that is dropped unless TRITON_DEBUG is set."""
    builder = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if getattr(options, "sanitize_overflow", False) and not getattr(options, "debug", True):
        builder.options = dataclasses.replace(options, sanitize_overflow=False)


def remember_numpy_types(interpreter: Any) -> None:
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


def patch_once(interpreter: Any) -> None:
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


def call_device_functions(interpreter: Any) -> None:
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


def make_handles_unchecked(interpreter: Any) -> None:
    """Each handle checks that its numbers fit its type; those who make handles have seen to that."""

    def make(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype = data, dtype
        self.attr = {} if attr is None else attr

    interpreter.TensorHandle.__init__ = make
