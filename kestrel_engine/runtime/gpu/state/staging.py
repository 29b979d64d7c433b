"""Between host and device: arrays up in one copy from pinned memory, results down into pinned memory.

Buffers go round in rings longer than the number of steps that can be out, so nothing is overwritten that a copy still
reads. On a CPU device there is no pinning and copies are plain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

RING = 32
"""Sets of host buffers: several passes of each step that may be out use one, and none may wait for a step before."""
IMAGE_RING = 16
"""The same for images that don't lie in pinned memory: each uses one."""
_ALIGN = 16


class _PinnedRing:
    """Host buffers that grow as needed; one is handed out again only when the copy out of it is done."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._device = device
        self._buffers = [_host_bytes(0, device)] * size
        self._copied: list[torch.cuda.Event | None] = [None] * size
        self._next = 0

    def take(self, size: int) -> Tensor:
        """[size] uint8, to be filled and given to copy()."""
        self._next = (self._next + 1) % len(self._buffers)
        _wait_for(self._copied[self._next])
        if self._buffers[self._next].numel() < size:
            self._buffers[self._next] = _host_bytes(size + size // 2, self._device)
        return self._buffers[self._next][:size]

    def copy(self, host: Tensor) -> Tensor:
        """What take() gave last, on the device."""
        if self._device.type != "cuda":
            return host.clone()
        there = host.to(self._device, non_blocking=True)
        event = self._copied[self._next] or torch.cuda.Event()
        event.record()
        self._copied[self._next] = event
        return there


class Uploader:
    """Brings the arrays of one pass to the device in a single copy."""

    def __init__(self, device: torch.device) -> None:
        self._ring = _PinnedRing(device, RING)

    def __call__(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """The arrays as device tensors of the same shapes and dtypes."""
        places, size = {}, 0
        for name, array in arrays.items():
            places[name] = size
            size += -(-array.nbytes // _ALIGN) * _ALIGN
        host = self._ring.take(size)
        flat = host.numpy()
        for name, array in arrays.items():
            end = places[name] + array.nbytes
            flat[places[name] : end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        there = self._ring.copy(host)
        return {
            name: there[places[name] : places[name] + array.nbytes]
            .view(_torch_dtype(array.dtype))
            .view(array.shape)
            for name, array in arrays.items()
        }


def pinned_bytes(shape: tuple[int, ...]) -> np.ndarray:
    """uint8 memory that a device copies from without the host: what `ImageUploader` likes its arrays in."""
    array: np.ndarray = torch.empty(shape, dtype=torch.uint8, pin_memory=True).numpy()
    return array


class ImageUploader:
    """Images' crops or pixels, uint8: straight to the device where they lie in pinned memory (`pinned_bytes`), else
    through some, for they are megabytes. The caller keeps them until the device has got there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring = _PinnedRing(device, IMAGE_RING)

    def __call__(self, array: np.ndarray, there: Tensor) -> None:
        """Enqueues the copy of ``array``, C-contiguous, to ``there``, as many bytes in any shape."""
        source, there = torch.from_numpy(array).view(-1), there.view(-1)
        if self._device.type != "cuda" or source.is_pinned():
            there.copy_(source, non_blocking=True)
        else:
            host = self._ring.take(source.nbytes)
            np.copyto(host.numpy(), source.numpy())
            there.copy_(self._ring.copy(host))


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a RowBuffers: ``dtype`` and what follows the row dimension."""

    dtype: type[np.generic]
    tail: tuple[int, ...] = ()


class RowBuffers:
    """Fixed arrays of ``max_rows`` rows on the device, filled from the host in one copy: a captured graph reads them.

    Fields lie end to end, widest type first, so that each is aligned.
    """

    def __init__(self, fields: Mapping[str, Field], max_rows: int, device: torch.device) -> None:
        self._layout: dict[str, tuple[Field, int, int]] = {}
        size = 0
        for name, each in sorted(
            fields.items(), key=lambda item: -np.dtype(item[1].dtype).itemsize
        ):
            nbytes = (
                max_rows * int(np.prod(each.tail, dtype=np.int64)) * np.dtype(each.dtype).itemsize
            )
            self._layout[name] = (each, size, nbytes)
            size += -(-nbytes // _ALIGN) * _ALIGN
        self._device_bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        self.device = {
            name: self._device_bytes[begin : begin + nbytes]
            .view(_torch_dtype(np.dtype(each.dtype)))
            .view(max_rows, *each.tail)
            for name, (each, begin, nbytes) in self._layout.items()
        }
        self._ring = [self._host_set(size, max_rows, device) for _ in range(RING)]
        self._copied: list[torch.cuda.Event | None] = [None] * RING
        self._next = 0

    def _host_set(
        self, size: int, max_rows: int, device: torch.device
    ) -> tuple[Tensor, dict[str, np.ndarray]]:
        host = _host_bytes(size, device)
        flat = host.numpy()
        return host, {
            name: flat[begin : begin + nbytes].view(each.dtype).reshape(max_rows, *each.tail)
            for name, (each, begin, nbytes) in self._layout.items()
        }

    def host(self) -> dict[str, np.ndarray]:
        """The next set of host arrays, to be filled (they hold old values) and sent."""
        self._next = (self._next + 1) % RING
        _wait_for(self._copied[self._next])
        return self._ring[self._next][1]

    def send(self) -> None:
        """Copies the set that host() gave last."""
        self._device_bytes.copy_(self._ring[self._next][0], non_blocking=True)
        if self._device_bytes.is_cuda:
            event = self._copied[self._next] or torch.cuda.Event()
            event.record()
            self._copied[self._next] = event


class Results:
    """Brings [rows, width] int32 back, each time into pinned memory that nobody else has until it is released."""

    def __init__(self, max_rows: int, width: int, device: torch.device) -> None:
        self._shape, self._device = (max_rows, width), device
        self._free: list[Tensor] = []

    def fetch(self, rows: Tensor) -> Tensor:
        """Enqueues the copy; the result is good once the stream has got there."""
        if not self._free:
            size = self._shape[0] * self._shape[1] * 4
            self._free.append(_host_bytes(size, self._device).view(torch.int32).view(self._shape))
        host = self._free.pop()[: len(rows)]
        host.copy_(rows, non_blocking=True)
        return host

    def release(self, host: Tensor) -> None:
        """Takes back what fetch() gave, once it was read."""
        self._free.append(host.as_strided(self._shape, (self._shape[1], 1)))


def _wait_for(event: torch.cuda.Event | None) -> None:
    """Asks first: to wait is to give the interpreter up, which takes long to get back."""
    if event is not None and not event.query():
        event.synchronize()


def _host_bytes(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _torch_dtype(dtype: np.dtype[np.generic]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
