"""How a process of this package starts: a fresh interpreter with one module, its search path and no environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

_START = """
import importlib, sys, types
module, argument, folder, *sys.path[:] = sys.argv[1:]
package = types.ModuleType("kestrel_engine")
package.__path__ = [folder]
sys.modules["kestrel_engine"] = package
importlib.import_module(module).main(argument)
"""
"""The package's own __init__ would import the whole engine. The working directory has no effect."""

_KEPT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""Variables without which an installation may not find its libraries."""

_SET = {
    # OpenBLAS would start more threads, and a process with several threads can't be forked safely.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "VIPS_BLOCK_UNTRUSTED": "1",
}


def start(
    module: str,
    argument: str = "",
    *,
    stdin: int | IO[Any] = subprocess.DEVNULL,
    stdout: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Starts a process that calls ``main(argument)`` of a module. Raises OSError."""
    folder = str(Path(__file__).parents[1])
    return subprocess.Popen(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            _START,
            module,
            argument,
            folder,
            *filter(None, sys.path),
        ],
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        env=_SET | {name: os.environ[name] for name in _KEPT if name in os.environ},
    )
