"""Interpreted kernels load and store only what their arguments cover, where tests ask for it with the fixture
`checked_addresses`. A GPU stops at some other addresses, and takes foreign numbers from the rest.

It works on names that Triton keeps to itself: where one is missing, nothing is checked.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from kestrel_engine.kernels.adapters import slabs
from kestrel_engine.runtime.gpu.adapters import pass_slabs

Extent = tuple[int, int]
"""The first address, and the one behind the last."""


def check_addresses(interpreter: Any, test: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """``interpreter``: the module triton.runtime.interpreter. ``test``: the module of the test."""
    executor = getattr(interpreter, "GridExecutor", None)
    module = getattr(interpreter, "_interpreter", None)
    if not hasattr(executor, "_init_args_hst") or not hasattr(module, "load"):
        return
    begin, plain_load, plain_store = executor._init_args_hst, module.load, module.store
    launch = _Launch("", ())
    # Of slabs, kernels have only distances. Nothing frees one while it is known.
    known: dict[int, torch.Tensor] = {}
    plain_distance = slabs.distance

    def distance(slab: torch.Tensor, anchor: torch.Tensor) -> int:
        known[slab.data_ptr()] = slab
        return plain_distance(slab, anchor)

    def init(self: Any, args: Any, kwargs: Any) -> Any:
        nonlocal launch
        found = begin(self, args, kwargs)
        given = [*found[0], *found[1].values(), *known.values()]
        launch = _Launch(self.fn.__name__, (extent for each in given for extent in _extents(each)))
        return found

    def load(pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        launch.check("reads", pointers, mask, dtype.itemsize)
        return plain_load(pointers, mask, other, dtype)

    def store(pointers: Any, values: Any, mask: Any) -> Any:
        launch.check("writes", pointers, mask, values.dtype.itemsize)
        return plain_store(pointers, values, mask)

    patch.setattr(executor, "_init_args_hst", init)
    patch.setattr(module, "load", load)
    patch.setattr(module, "store", store)
    for user in (slabs, pass_slabs, test):
        if hasattr(user, "distance"):
            patch.setattr(user, "distance", distance)


class _Launch:
    """The addresses that a launch of ``kernel`` may access."""

    def __init__(self, kernel: str, extents: Iterable[Extent]) -> None:
        self._kernel = kernel
        self._firsts: list[int] = []
        self._ends: list[int] = []
        for first, end in sorted(extents):
            if self._ends and first <= self._ends[-1]:
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._firsts.append(first)
                self._ends.append(end)

    def check(self, what: str, pointers: Any, mask: Any, size: int) -> None:
        """Raises AssertionError if the kernel ``what`` beyond its arguments. ``size``: the bytes at each pointer."""
        # Most loads are within one tensor, even the part that is masked off.
        index = bisect_right(self._firsts, int(pointers.min())) - 1
        if index >= 0 and int(pointers.max()) + size <= self._ends[index]:
            return
        mask = np.asarray(mask)
        used = np.broadcast_to(pointers, mask.shape)[mask]
        indices = np.searchsorted(np.array(self._firsts, dtype=np.uint64), used, side="right") - 1
        ends = np.array(
            [*self._ends, 0], dtype=np.uint64
        )  # What is before all others has the end 0.
        outside = used + np.uint64(size) > ends[indices]
        assert not outside.any(), (
            f"{self._kernel} {what} {outside.sum()} of {used.size} numbers beyond its arguments"
        )


def _extents(given: Any) -> Iterator[Extent]:
    """The memory from the first to the last element of a tensor, whatever its strides."""
    if isinstance(given, tuple):
        for each in given:
            yield from _extents(each)
        return
    tensor = getattr(given, "base", given)  # Of a descriptor.
    if isinstance(tensor, torch.Tensor) and tensor.numel():
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in sizes)
        first = tensor.data_ptr()
        yield first, first + (last + 1) * tensor.element_size()
