"""settle_keys: makes the keys of kernels in Triton's cache independent of which kernels a process launches first.

The key of a kernel has the constants that its source reads. Triton (3.6, 3.7) adds those of a function that the kernel
calls only if that function had its key before, because another kernel calls it too. So two processes that launch the
same kernels in another order would look for different files.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from triton.runtime.jit import JITFunction


@functools.cache
def settle_keys() -> None:
    """Computes the keys of all kernels of this package, always in the same order. Call it before the first launch."""
    package = importlib.import_module(__package__ or "")
    names = [each.name for each in pkgutil.walk_packages(package.__path__, f"{__package__}.")]
    for name in sorted(names):
        functions = vars(importlib.import_module(name))
        for _, function in sorted(functions.items()):
            # Interpreted functions have no keys.
            if isinstance(function, JITFunction):
                _ = function.cache_key
