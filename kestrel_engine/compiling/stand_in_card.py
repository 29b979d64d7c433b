"""StandInCard: lets the code of a GPU run on a machine without one, for the sake of the kernels that it launches.

Tensors on the device are torch's FakeTensors: they have shapes, strides, types and addresses, but no memory. What torch
would compute on the device is left out; copies to the host leave there what was there. Streams, events and graphs do
nothing. Tensors on the host are real.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.utils._python_dispatch import TorchDispatchMode

from .cards import Card

_ATEN = torch.ops.aten
_META, _DEVICE = torch.device("meta"), torch.device("cuda:0")
_COPIES = ("aten::_to_copy", "aten::to")
_ADDRESS_BITS = 9
"""Addresses of different tensors differ by multiples of 512 bytes at least, as those of torch's allocator do."""


@contextmanager
def stand_in(card: Card) -> Iterator[None]:
    """Inside the context, and in this thread, torch has one CUDA device, which is ``card`` and computes nothing."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        for target, name, value in _replacements(card):
            stack.enter_context(patch.object(target, name, value, create=True))
        stack.enter_context(_Dispatch(fake))
        yield


class _Dispatch(TorchDispatchMode):
    """Sends operators on device tensors to ``fake``, and leaves out those that only write."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self._fake = fake

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if not _concerns_device(args, kwargs):
            return func(*args, **kwargs)
        written = _written(func)
        if written is not None:
            return written(args, kwargs)
        if _is_plain(func) and not _has_host_tensor((*args, *kwargs.values())):
            return self._computed(func, args, kwargs)
        with self._fake:
            if func._schema.name in _COPIES and not isinstance(args[0], FakeTensor):
                source, dtype = args[0], kwargs.get("dtype") or args[0].dtype
                return torch.empty_strided(
                    source.shape, source.stride(), dtype=dtype, device="cuda:0"
                )
            return func(*args, **kwargs)

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What FakeTensorMode does for an operator whose tensors are all on the device, in a tenth of the time."""
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _META}
        with in_kernel_invocation_manager(self._fake):
            found = func(*args, **kwargs)
        if isinstance(found, (list, tuple)):
            return type(found)(map(self._on_device, found))
        return self._on_device(found)

    def _on_device(self, found: Any) -> Any:
        return FakeTensor(self._fake, found, _DEVICE) if isinstance(found, torch.Tensor) else found


def _concerns_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is not None:
        # A factory, or a copy to another device.
        return torch.device(device).type == "cuda"
    return any(_is_on_device(value) for value in (*args, *kwargs.values()))


def _is_on_device(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_is_on_device, value))
    return isinstance(value, FakeTensor)


def _has_host_tensor(values: Iterable[Any]) -> bool:
    return any(
        _has_host_tensor(value)
        if isinstance(value, (list, tuple))
        else isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
        for value in values
    )


@functools.cache
def _is_plain(func: Any) -> bool:
    """Whether an operator's results are on the device of its tensors, or on the device that ``device`` names."""
    return func.namespace == "aten" and func._schema.name not in _COPIES


_Written = Callable[[tuple[Any, ...], dict[str, Any]], Any]


@functools.cache
def _written(func: Any) -> _Written | None:
    """For an operator that returns what it writes to, a function that takes this from its arguments; else None."""
    arguments = func._schema.arguments
    places = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    if not places:
        return None
    by_name = [a.name for a in places if a.kwarg_only]
    if not by_name:
        return lambda args, kwargs: args[0]
    return lambda args, kwargs: (
        kwargs[by_name[0]] if len(by_name) == 1 else tuple(kwargs[name] for name in by_name)
    )


def _attended(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of attention, with the memory layout of the queries, as torch's kernels return it."""
    rows, heads, length, _ = query.shape
    return query.new_empty((rows, length, heads, value.shape[-1])).transpose(1, 2)


class _Nothing:
    """A stream, an event or a graph that does nothing. What is enqueued has been done at once."""

    device = torch.device("cuda:0")
    device_index = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *exc_info: object) -> None: ...
    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: None

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: object) -> float:
        return 0.0


class _Generator(torch.Generator):
    """A generator on the host, whatever device is asked for."""

    def __new__(cls, device: Any = None) -> Any:
        return super().__new__(cls)


def _part(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """``tensor[index]``. Torch's own code for it switches to the tensor's device, which is not there."""
    keys = list(index) if isinstance(index, tuple) else [index]
    if any(key is Ellipsis for key in keys):
        place = next(i for i, key in enumerate(keys) if key is Ellipsis)
        count = sum(key is not None and key is not Ellipsis for key in keys)
        keys[place : place + 1] = [slice(None)] * (tensor.dim() - count)
    indices: list[torch.Tensor | None] = []
    for key in keys:
        dim = len(indices)
        if key is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(key, slice):
            tensor = _ATEN.slice.Tensor(tensor, dim, key.start, key.stop, key.step or 1)
        elif isinstance(key, torch.Tensor | list):
            indices.append(torch.as_tensor(key))
            continue
        else:
            tensor = tensor.select(dim, int(key))
            continue
        indices.append(None)
    if any(each is not None for each in indices):
        found: torch.Tensor = _ATEN.index.Tensor(tensor, indices)
        return found
    return tensor


def _address(tensor: torch.Tensor) -> int:
    begin = tensor.untyped_storage()._cdata << _ADDRESS_BITS
    return int(begin + tensor.storage_offset() * tensor.element_size())


def _replacements(card: Card) -> list[tuple[Any, str, Any]]:
    """Replaces torch's functions about CUDA."""
    properties = SimpleNamespace(
        name=card.name,
        major=card.compute_capability[0],
        minor=card.compute_capability[1],
        multi_processor_count=card.num_sms,
        shared_memory_per_block=card.shared_memory_per_block,
        shared_memory_per_block_optin=card.shared_memory_per_block,
        total_memory=card.memory,
    )
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": card.name,
        "get_device_properties": properties,
        "get_device_capability": card.compute_capability,
        "mem_get_info": (card.memory, card.memory),
        "_lazy_init": None,
        "synchronize": None,
        "empty_cache": None,
        "graph_pool_handle": None,
        "current_stream": _Nothing(),
        "stream": _Nothing(),
        "set_stream": None,
    }
    made = dict.fromkeys(("Stream", "Event", "CUDAGraph"), _Nothing)
    return [
        *((torch.cuda, name, _always(value)) for name, value in answers.items()),
        *((torch.cuda, name, value) for name, value in made.items()),
        (torch, "Generator", _Generator),
        (torch.Tensor, "pin_memory", lambda self: self),
        (torch.nn.functional, "scaled_dot_product_attention", _attended),
        (fake_tensor, "init_gpu_context", _always(None)),
        (FakeTensor, "data_ptr", _address),
        (FakeTensor, "__getitem__", _part),
        (FakeTensor, "__setitem__", _always(None)),
        (FakeTensor, "__float__", _always(1.0)),
        (FakeTensor, "copy_", lambda self, *args, **kwargs: self),
    ]


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value
