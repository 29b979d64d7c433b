"""Makes Triton's interpreter quicker, part by part."""

from typing import Any

from tests.interpreter import launches, memory, numbers, shapes
from tests.interpreter.members import quicken_members
from tests.interpreter.operators import quicken_operators
from tests.interpreter.tensors import plain_tensors


def quicken(interpreter: Any) -> None:
    """``interpreter``: the module triton.runtime.interpreter."""
    launches.check_no_overflows(interpreter)
    launches.remember_numpy_types(interpreter)
    launches.patch_once(interpreter)
    launches.call_device_functions(interpreter)
    launches.make_handles_unchecked(interpreter)
    memory.index_memory(interpreter)
    shapes.remember_shapes()
    plain = plain_tensors(interpreter)
    quicken_operators(interpreter, plain)
    quicken_members(interpreter, plain)
    numbers.round_to_fp8(interpreter)
    numbers.erf_of_arrays(interpreter)
