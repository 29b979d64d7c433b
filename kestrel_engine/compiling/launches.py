"""compiled_launches: turns the launches of Triton's kernels into compilations for a card that need not be here.

Triton compiles a kernel for the types of its arguments, its constants, integers that are 1 or multiples of 16, and
pointers that are aligned. All of this comes from the launch itself. So what a launch on the card looks for in Triton's
cache is what lies there.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import build, driver
from triton.runtime.jit import JITFunction

logger = logging.getLogger(__name__)

_DRIVER_FUNCTION = re.compile(r"\bcu[A-Z]\w*")


class _Driver(nvidia.CudaDriver):
    """Names the target, and can launch nothing."""

    def __init__(self, capability: tuple[int, int]) -> None:
        major, minor = capability
        self._target = GPUTarget("cuda", 10 * major + minor, 32)
        self.utils = _AnyModule()

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _AnyModule:
    """Stands in for a C module that links to CUDA's driver, and so can't be loaded without one."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


@contextmanager
def compiled_launches(capability: tuple[int, int]) -> Iterator[None]:
    """Inside the context, launches compile, as many at a time as there are processors. At its end all are compiled.
    Triton must not interpret its kernels. Raises what the compiler raised."""
    compiling: list[Future[None]] = []
    run, compile_one, parse = JITFunction.run, JITFunction._do_compile, JITFunction.parse
    parsing = threading.Lock()

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        run(self, *args, grid=grid, warmup=True, **kwargs)

    def submit(self: Any, key: Any, *args: Any) -> object:
        # Later launches of this kind find an entry, and don't compile it again.
        self.device_caches[0][0][key] = pending = object()
        compiling.append(pool.submit(finish, self, key, *args))
        return pending

    def parse_alone(self: Any) -> Any:
        # In Python 3.11, ast.parse may fail if a finalizer runs meanwhile and another thread parses (python/cpython
        # issue 106905).
        with parsing:
            return parse(self)

    def finish(self: Any, key: Any, *args: Any) -> None:
        kernel = compile_one(self, key, *args)
        if launchers:
            nvidia.CudaLauncher(kernel.src, kernel.metadata)

    with ExitStack() as stack:
        stack.enter_context(patch.object(driver, "_active", _Driver(capability)))
        launchers = stack.enter_context(_c_modules())
        pool = ThreadPoolExecutor(os.cpu_count() or 1, "kestrel-compile")
        stack.callback(pool.shutdown, cancel_futures=True)
        stack.enter_context(patch.object(JITFunction, "parse", parse_alone))
        stack.enter_context(patch.object(JITFunction, "run", launch))
        stack.enter_context(patch.object(JITFunction, "_do_compile", submit))
        yield
        for each in compiling:
            each.result()


@contextmanager
def _c_modules() -> Iterator[bool]:
    """Inside the context, Triton compiles its C modules, which launches need, but doesn't load them: they link to
    CUDA's driver. Yields whether there is a C compiler; without one a server needs it at its first start.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        logger.warning("no C compiler: the modules that launch kernels are compiled by the server")
        yield False
        return
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        name = nvidia.libraries[0]
        library = [compiler, "-shared", f"-Wl,-soname,{name}", "-o", str(Path(folder, name))]
        subprocess.run([*library, "-x", "c", "-"], input=_empty_functions(), text=True, check=True)
        loaded = patch.object(build, "_load_module_from_path", lambda name, path: _AnyModule())
        stack.enter_context(loaded)
        found = [nvidia.libdevice_dir, folder]
        stack.enter_context(patch.object(nvidia, "library_dirs", lambda: found))
        nvidia.CudaUtils()
        del nvidia.CudaUtils.instance
        yield True


def _empty_functions() -> str:
    """Returns C code that defines all functions of CUDA's driver that Triton's modules may call. Some linkers
    (Ubuntu's, by default) leave out a library that defines nothing that is called."""
    folder = Path(nvidia.__file__).parent
    sources = (folder / "driver.py").read_text() + (folder / "driver.c").read_text()
    return "\n".join(
        f"void {name}(void) {{}}" for name in sorted(set(_DRIVER_FUNCTION.findall(sources)))
    )
