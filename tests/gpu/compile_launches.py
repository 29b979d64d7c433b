"""Compiles recorded launches for a GPU that this machine need not have: ``compile_launches.py CAPABILITY < LAUNCHES``.

LAUNCHES is a JSON list of [module, kernel, arguments, keywords]. A tensor is {"dtype": NAME}, a type of Triton {"type":
NAME}, and a TensorDescriptor also has "descriptor": shape, strides, block. Prints a line of JSON for
each: the kernel's name and the error, which is null if it compiled. A process of its own runs it, because the tests'
process interprets kernels.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor


class StandIn(CudaDriver):
    """Names the target, and can launch nothing."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def argument(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "type" in value:
        return triton.language.dtype(value["type"])
    dtype = getattr(torch, value["dtype"])
    if "descriptor" in value:
        shape, strides, block = value["descriptor"]
        return TensorDescriptor(torch.empty(shape, dtype=dtype), shape, strides, block)
    return dtype


def main(capability: int) -> None:
    driver.set_active(StandIn(capability))
    for module, name, arguments, keywords in json.load(sys.stdin):
        kernel = getattr(importlib.import_module(module), name)
        error = None
        try:
            kernel.warmup(
                *map(argument, arguments),
                grid=(1,),
                **{key: argument(value) for key, value in keywords.items()},
            )
        except Exception:
            error = traceback.format_exc()
        print(json.dumps([name, error]), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
