"""Functions that LLVM compiles for the processor at hand. They run on torch's own threads.

They are written in LLVM's intermediate language through llvmlite, which brings the compiler along: a user needs none.
The threads start by `GOMP_parallel` of the OpenMP library that torch has loaded.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

LANES = 16
"""Numbers of 32 bits in a vector."""
LINE = 8
"""Numbers of 64 bits in a line of a cache."""
_ARCH_PRCTL, _TILE_DATA = 158, (0x1023, 18)
"""The system call, and its request for the registers of tiles: ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA."""
_SPINS = 1000
"""The looks of a waiting thread, some 30 microseconds, before it offers its core to others between the looks."""


@cache
def supported() -> bool:
    """Whether functions can run here: an x86-64 processor with AVX2 and F16C, llvmlite and torch's threads.

    F16C converts float16. A virtual machine may hide it, and LLVM would then call a function that is not there.

    Raises ImportError without llvmlite.
    """
    if platform.machine() not in ("x86_64", "AMD64") or openmp() is None:
        return False
    return all(features().get(name) for name in ("avx2", "f16c"))


@cache
def features() -> Mapping[str, bool]:
    """What the processor has, by LLVM's names."""
    from llvmlite import binding

    return dict(binding.get_host_cpu_features())


def has_tiles(kind: Literal["int8", "bf16"]) -> bool:
    """Whether this process may multiply tiles of such numbers (AMX)."""
    return bool(features().get("amx-tile") and features().get(f"amx-{kind}")) and _permits_tiles()


@cache
def _permits_tiles() -> bool:
    """Linux must be asked."""
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, *_TILE_DATA) == 0)


@cache
def openmp() -> str | None:
    """The path of the OpenMP library that this process has loaded with torch, if it has GNU's interface."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    loaded = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "/" in line}
    paths = [
        path for path in sorted(loaded) if "gomp" in Path(path).name or "omp5" in Path(path).name
    ]
    return next((path for path in paths if hasattr(ctypes.CDLL(path), "GOMP_parallel")), None)


def compiled(code: Code) -> Callable[..., None]:
    """Returns a function of ``code.arguments``, all whole numbers. Takes some 0.1 s."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    path = openmp()
    assert path is not None
    library = ctypes.CDLL(path)
    names = "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "sched_yield"
    for name in names:
        binding.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    flags = binding.get_host_cpu_features().flatten()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=flags, opt=3, jit=True
    )
    module = binding.parse_assembly(str(code.module()))
    module.verify()
    options = binding.create_pipeline_tuning_options(speed_level=3)
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    engine = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.get_function_address("run"))
    structure = ctypes.c_int64 * (len(code.arguments) + 1)

    def run(*arguments: int, _owner: Any = engine) -> None:
        function(structure(*arguments, _threads()))

    return run


_team = threading.local()
"""``process``: the id of the process in which this thread has first had others compute with it."""


def _threads() -> int:
    """The number of threads for a function: torch's, or 1 in a fork of a process in which this thread has had others.
    OpenMP's library would wait for them there, and a fork does not have them."""
    threads = torch.get_num_threads()
    if threads == 1:
        return 1
    process = os.getpid()
    if not hasattr(_team, "process"):
        _team.process = process
    return threads if _team.process == process else 1


@cache
def bfloat() -> Any:
    """llvmlite knows no bfloat16."""
    from llvmlite import ir

    class BFloat(ir.Type):  # type: ignore[misc]
        def _to_string(self) -> str:
            return "bfloat"

    return BFloat()


class Code:
    """The functions of one module: ``run`` prepares and starts the threads, each of which computes its share. They take
    a structure of whole numbers of 64 bits: pointers and sizes by the names ``arguments``, then the number of threads.
    """

    arguments: tuple[str, ...]

    def __init__(self, name: str, module: Any = None) -> None:
        """``module``: the one of another `Code`, which uses functions of this one."""
        from llvmlite import ir

        self._ir = ir
        self._byte, self._half = ir.IntType(8), ir.IntType(16)
        self._word, self._long = ir.IntType(32), ir.IntType(64)
        self._float, self._pointer, self._none = ir.FloatType(), ir.PointerType(), ir.VoidType()
        self._floats, self._words = self._vector(self._float), self._vector(self._word)
        self._module = module or ir.Module(name)
        self._b: Any = None
        self._turn: Any = None
        """How many arrivals a function has waited for: a variable, once the function calls `_meet`."""

    def module(self) -> Any:
        share = self._begin("share")
        self._share()
        self._b.ret_void()
        self._begin("run")
        self._prepare()
        threads = self._b.trunc(self._size(None), self._word)
        start = self._known(
            "GOMP_parallel", self._none, self._pointer, self._pointer, self._word, self._word
        )
        self._b.call(start, [share, self._b.function.args[0], threads, self._word(0)])
        self._b.ret_void()
        return self._module

    def _prepare(self) -> None:
        """Builds what runs before the threads: nothing, unless a subclass does."""

    def _share(self) -> None:
        """Builds what a thread runs, in each subclass."""

    def _part(self, count: Any) -> tuple[Any, Any]:
        """The first of ``count`` things that are this thread's, and one past the last."""
        b, long = self._b, self._long
        thread, threads = self._of_team("thread_num"), self._of_team("num_threads")
        first = b.sdiv(b.mul(count, thread), threads)
        return first, b.sdiv(b.mul(count, b.add(thread, long(1))), threads)

    def _of_team(self, what: str) -> Any:
        found = self._b.call(self._known(f"omp_get_{what}", self._word), [])
        return self._b.sext(found, self._long)

    def _begin(self, name: str, *more: Any) -> Any:
        """Begins a function of a structure and of ``more`` arguments."""
        kind = self._ir.FunctionType(self._none, (self._pointer, *more))
        function = self._ir.Function(self._module, kind, name)
        function.args[0].add_attribute("noalias")
        self._b = self._ir.IRBuilder(function.append_basic_block())
        return function

    @contextmanager
    def _loop(self, start: Any, end: Any, step: int) -> Iterator[Any]:
        """``for i in range(start, end, step)``: the context's value is ``i``, and its code builds the body."""
        b = self._b
        test, body, after = (b.function.append_basic_block() for _ in range(3))
        counter = self._variable(self._long)
        b.store(start, counter)
        b.branch(test)
        b.position_at_end(test)
        i = b.load(counter, typ=self._long)
        b.cbranch(b.icmp_signed("<", i, end), body, after)
        b.position_at_end(body)
        yield i
        b.store(b.add(i, self._long(step)), counter)
        b.branch(test)
        b.position_at_end(after)

    def _variable(self, kind: Any) -> Any:
        """A variable that is zero from here on."""
        with self._b.goto_entry_block():
            place = self._b.alloca(kind)
        self._b.store(self._ir.Constant(kind, None if kind is not self._long else 0), place)
        return place

    def _size(self, name: str | None) -> Any:
        """An argument, or the number of threads."""
        last = len(self.arguments)
        index = self._long(last if name is None else self.arguments.index(name))
        place = self._b.gep(self._b.function.args[0], [index], source_etype=self._long)
        return self._b.load(place, typ=self._long)

    def _at(self, name: str, index: Any, kind: Any) -> Any:
        return self._place(self._size(name), index, kind)

    def _place(self, start: Any, index: Any, kind: Any) -> Any:
        """Where element ``index`` is. ``start``: where element 0 is, as a number."""
        return self._b.gep(self._b.inttoptr(start, self._pointer), [index], source_etype=kind)

    def _load(self, name: str, index: Any, kind: Any, align: int = 0) -> Any:
        """Reads ``kind``, a number or a vector, from element ``index``."""
        element = getattr(kind, "element", kind)
        size = 4 if element is self._float else element.width // 8
        return self._b.load(self._at(name, index, element), typ=kind, align=align or size)

    def _load_first(self, count: Any, name: str, index: Any, kind: Any) -> Any:
        """Reads ``count`` numbers of 16 or 32 bits from element ``index`` to a vector, whose others are 0."""
        b, bits = self._b, kind.element.width
        truth = self._vector(self._ir.IntType(1))
        load = self._known(
            f"llvm.masked.load.v16i{bits}.p0", kind, self._pointer, self._word, truth, kind
        )
        lanes = self._ir.Constant(self._words, list(range(LANES)))
        mask = b.icmp_signed("<", lanes, self._splat(b.trunc(count, self._word)))
        place = self._at(name, index, kind.element)
        return b.call(load, [place, self._word(2), mask, self._ir.Constant(kind, None)])

    def _transposed(self, rows: list[Any]) -> list[Any]:
        """Of 16 vectors of words, the vector of the first ones, then that of the second ones, and so on."""
        halves = [[i // 2 + first + LANES * (i % 2) for i in range(LANES)] for first in (0, 8)]
        masks = [self._ir.Constant(self._words, places) for places in halves]
        for _ in range(LANES.bit_length() - 1):
            pairs = zip(rows[: LANES // 2], rows[LANES // 2 :], strict=True)
            rows = [self._b.shuffle_vector(x, y, mask) for x, y in pairs for mask in masks]
        return rows

    def _fetch(self, name: str, index: Any, kind: Any) -> None:
        """Begins to read the 64 bytes around element ``index`` to the second cache."""
        fetch = self._known("llvm.prefetch.p0", self._none, self._pointer, *[self._word] * 3)
        hints = (self._word(number) for number in (0, 2, 1))
        self._b.call(fetch, [self._at(name, index, kind), *hints])

    def _begin_tiles(self, columns: Mapping[int, int]) -> None:
        """Sets up eight tiles of 16 rows. ``columns``: the words of a row, of the tiles that have not 16."""
        b, long = self._b, self._long
        sizes = [4 * columns.get(tile, LANES) for tile in range(8)]
        of_lines = [n for size in sizes for n in (size, 0)]
        numbers = bytes([1, *[0] * 15, *of_lines, *[0] * 16, *[LANES] * 8, *[0] * 8])
        with b.goto_entry_block():
            shape = b.alloca(long, 8)
        for i in range(8):
            eight = long(int.from_bytes(numbers[8 * i : 8 * i + 8], "little"))
            b.store(eight, b.gep(shape, [long(i)], source_etype=long))
        b.call(self._known("llvm.x86.ldtilecfg", self._none, self._pointer), [shape])

    def _end_tiles(self) -> None:
        self._b.call(self._known("llvm.x86.tilerelease", self._none), [])

    def _clear_tile(self, tile: int) -> None:
        zero = self._known("llvm.x86.tilezero", self._none, self._byte)
        self._b.call(zero, [self._byte(tile)])

    def _move_tile(self, name: Literal["load", "store"], tile: int, place: Any, line: Any) -> None:
        """``line``: the bytes from a row to the next one in memory."""
        kinds = self._byte, self._pointer, self._long
        move = self._known(f"llvm.x86.tile{name}d64", self._none, *kinds)
        self._b.call(move, [self._byte(tile), place, line])

    def _multiply_tile(self, name: str, total: int, rows: int, columns: int) -> None:
        dot = self._known(f"llvm.x86.{name}", self._none, *[self._byte] * 3)
        self._b.call(dot, [self._byte(tile) for tile in (total, rows, columns)])

    def _vector(self, kind: Any, count: int = LANES) -> Any:
        return self._ir.VectorType(kind, count)

    def _splat(self, number: Any) -> Any:
        """16 times a float or a word."""
        none = self._ir.Constant(self._vector(number.type), self._ir.Undefined)
        first = self._b.insert_element(none, number, self._word(0))
        return self._b.shuffle_vector(first, none, self._ir.Constant(self._words, [0] * LANES))

    def _sum(self, vector: Any) -> Any:
        """The sum of 16 floats."""
        add = self._known("llvm.vector.reduce.fadd.v16f32", self._float, self._float, self._floats)
        return self._b.call(add, [self._float(-0.0), vector], fastmath=("reassoc",))

    def _exp(self, x: Any) -> Any:
        """The exponentials of 16 floats of at most 0."""
        x = self._b.fmul(x, self._splat(self._float(math.log2(math.e))))
        return self._power_of_two(x, 6)

    def _power_of_two(self, x: Any, powers: int) -> Any:
        """Two to the power of 16 floats of at most 0, by a polynomial of degree ``powers``."""
        b, least = self._b, self._splat(self._float(-126.0))
        x = b.select(b.fcmp_ordered("<", x, least), least, x)
        whole = b.call(self._known("llvm.rint.v16f32", self._floats, self._floats), [x])
        x = b.fsub(x, whole)
        factors = [math.log(2) ** power / math.factorial(power) for power in range(powers + 1)]
        y, *rest = (self._splat(self._float(factor)) for factor in reversed(factors))
        for factor in rest:
            y = self._fma(y, x, factor)
        bias, places = (self._ir.Constant(self._words, [n] * LANES) for n in (127, 23))
        power = b.shl(b.add(b.fptosi(whole, self._words), bias), places)
        return b.fmul(y, b.bitcast(power, self._floats))

    def _gelu(self, x: Any) -> Any:
        """The tanh approximation: ``x`` times the logistic function of twice the argument of tanh."""
        b = self._b
        factors = [2 * math.sqrt(2 / math.pi) * factor for factor in (0.044715, 1)]
        cubic, linear = (self._splat(self._float(factor)) for factor in factors)
        t = b.fmul(x, self._fma(b.fmul(x, x), cubic, linear))
        one = self._splat(self._float(1.0))
        is_negative = b.fcmp_ordered("<", t, self._ir.Constant(self._floats, None))
        power = self._exp(b.select(is_negative, t, b.fneg(t)))
        share = b.fdiv(b.select(is_negative, power, one), b.fadd(one, power))
        return b.fmul(x, share)

    def _to_bfloat(self, x: Any) -> Any:
        """The 16 bits of the nearest bfloat16 numbers."""
        b, words = self._b, self._words
        if features().get("avx512bf16"):
            return b.bitcast(b.fptrunc(x, self._vector(bfloat())), self._vector(self._half))
        bits = b.bitcast(x, words)
        half, one, places, nan = (
            self._ir.Constant(words, [n] * LANES) for n in (0x7FFF, 1, 16, 0x7FC0)
        )
        odd = b.and_(b.lshr(bits, places), one)
        near = b.lshr(b.add(bits, b.add(half, odd)), places)
        near = b.select(b.fcmp_unordered("uno", x, x), nan, near)
        return b.trunc(near, self._vector(self._half))

    def _bfloats(self, name: str, index: Any) -> Any:
        """16 numbers in bfloat16 from element ``index``, as floats."""
        bits = self._load(name, index, self._vector(self._half))
        return self._low_halves(self._b.zext(bits, self._words))

    def _low_halves(self, words: Any) -> Any:
        """The bfloat16 numbers with even places, as floats."""
        shift = self._ir.Constant(self._words, [16] * LANES)
        return self._b.bitcast(self._b.shl(words, shift), self._floats)

    def _high_halves(self, words: Any) -> Any:
        mask = self._ir.Constant(self._words, [-65536] * LANES)
        return self._b.bitcast(self._b.and_(words, mask), self._floats)

    def _fma(self, a: Any, b: Any, c: Any) -> Any:
        return self._b.call(self._known("llvm.fma.v16f32", *[self._floats] * 4), [a, b, c])

    def _known(self, name: str, result: Any, *arguments: Any) -> Any:
        """A function of LLVM or of the OpenMP library."""
        found = self._module.globals.get(name)
        return found or self._ir.Function(
            self._module, self._ir.FunctionType(result, arguments), name
        )

    @contextmanager
    def _claims(self, line: Any, count: Any) -> Iterator[Any]:
        """The numbers below ``count`` that no other thread has taken, one after the other. ``line``: the line of the
        argument ``sync`` that counts them, which is zero before."""
        b, long = self._b, self._long
        taken = self._at("sync", b.mul(line, long(LINE)), long)
        test, body, after = (b.function.append_basic_block() for _ in range(3))
        b.branch(test)
        b.position_at_end(test)
        part = b.atomic_rmw("add", taken, long(1), "monotonic")
        b.cbranch(b.icmp_signed("<", part, count), body, after)
        b.position_at_end(body)
        yield part
        b.branch(test)
        b.position_at_end(after)

    def _meet(self) -> None:
        """Waits until all threads are here. Line 0 of the argument ``sync`` counts them."""
        b, long = self._b, self._long
        turn = b.add(b.load(self._turn, typ=long), self._of_team("num_threads"))
        b.store(turn, self._turn)
        arrived, looks = self._at("sync", long(0), long), self._variable(long)
        b.atomic_rmw("add", arrived, long(1), "acq_rel")
        test, wait, after = (b.function.append_basic_block() for _ in range(3))
        b.branch(test)
        b.position_at_end(test)
        found = b.load_atomic(arrived, "acquire", 8, typ=long)
        b.cbranch(b.icmp_signed("<", found, turn), wait, after)
        b.position_at_end(wait)
        so_far = b.load(looks, typ=long)
        b.store(b.add(so_far, long(1)), looks)
        with b.if_else(b.icmp_signed("<", so_far, long(_SPINS))) as (soon, late):
            with soon:
                b.call(self._known("llvm.x86.sse2.pause", self._none), [])
            with late:
                b.call(self._known("sched_yield", self._word), [])
        b.branch(test)
        b.position_at_end(after)
