"""Copies between host and device: arrays to the device in one copy from pinned memory, results back to pinned memory.

Rings of buffers hold more buffers than there can be steps in flight, so a copy never reads an overwritten buffer. On a
CPU device, memory is not pinned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..streams import record

RING = 32
"""Number of host buffers in a ring. Each pass of the steps in flight uses one; none should wait."""
IMAGE_RING = 16
"""Number of host buffers for images. Each image uses one."""
_ALIGN = 16


class _PinnedRing:
    """Host buffers that grow on demand. A buffer is reused only after the copy out of it is done."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._device = device
        self._buffers = [_host_bytes(0, device)] * size
        self._copied: list[torch.cuda.Event | None] = [None] * size
        self._next = 0

    def next_buffer(self, size: int) -> Tensor:
        """Returns a buffer [size] uint8. The caller fills it and passes it to `copy`."""
        self._next = (self._next + 1) % len(self._buffers)
        _wait_for(self._copied[self._next])
        if self._buffers[self._next].numel() < size:
            self._buffers[self._next] = _host_bytes(size + size // 2, self._device)
        return self._buffers[self._next][:size]

    def copy(self, host: Tensor) -> Tensor:
        """Returns a copy of the last buffer of `next_buffer` on the device."""
        if self._device.type != "cuda":
            return host.clone()
        on_device = host.to(self._device, non_blocking=True)
        self._note_copy()
        return on_device

    def copy_to(self, host: Tensor, target: Tensor) -> None:
        """Enqueues the copy of the last buffer of `next_buffer` to ``target``, on the device."""
        target.copy_(host, non_blocking=True)
        self._note_copy()

    def _note_copy(self) -> None:
        event = self._copied[self._next] or torch.cuda.Event()
        record(event, self._device)
        self._copied[self._next] = event


class Uploader:
    """Copies the arrays of one pass to the device in a single copy."""

    def __init__(self, device: torch.device) -> None:
        self._ring = _PinnedRing(device, RING)

    def __call__(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """Returns the arrays as tensors on the device, with the same shapes and dtypes."""
        offsets, size = {}, 0
        for name, array in arrays.items():
            offsets[name] = size
            size += -(-array.nbytes // _ALIGN) * _ALIGN
        host = self._ring.next_buffer(size)
        flat = host.numpy()
        for name, array in arrays.items():
            end = offsets[name] + array.nbytes
            flat[offsets[name] : end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        on_device = self._ring.copy(host)
        return {
            name: on_device[offsets[name] : offsets[name] + array.nbytes]
            .view(_torch_dtype(array.dtype))
            .view(array.shape)
            for name, array in arrays.items()
        }


class ImageUploader:
    """Copies the crops or pixels of images, uint8, to the device, through pinned buffers. An image's own memory is not
    pinned, because to pin 1.5 MB takes longer than to copy them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring = _PinnedRing(device, IMAGE_RING)

    def __call__(self, array: np.ndarray, target: Tensor) -> None:
        """Enqueues the copy of the C-contiguous ``array`` to ``target``, which has as many bytes in any shape."""
        # torch warns of arrays that cannot be written.
        source, target = array.reshape(-1), target.view(-1)
        if self._device.type != "cuda":
            np.copyto(target.numpy(), source)
        else:
            host = self._ring.next_buffer(source.nbytes)
            np.copyto(host.numpy(), source)
            self._ring.copy_to(host, target)


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a RowBuffers: its ``dtype``, and ``tail``, its dimensions after the row dimension. ``rows``: its
    number of rows; None for that of the RowBuffers."""

    dtype: type[np.generic]
    tail: tuple[int, ...] = ()
    rows: int | None = None

    def shape(self, max_rows: int) -> tuple[int, ...]:
        return (max_rows if self.rows is None else self.rows, *self.tail)


class RowBuffers:
    """Fixed arrays of ``max_rows`` rows on the device, for captured graphs, which one copy from the host fills.

    The arrays follow one another, the widest dtype first, so that each array is aligned.
    """

    def __init__(self, fields: Mapping[str, Field], max_rows: int, device: torch.device) -> None:
        self._layout: dict[str, tuple[Field, int, int]] = {}
        size = 0
        for name, each in sorted(
            fields.items(), key=lambda item: -np.dtype(item[1].dtype).itemsize
        ):
            nbytes = math.prod(each.shape(max_rows)) * np.dtype(each.dtype).itemsize
            self._layout[name] = (each, size, nbytes)
            size += -(-nbytes // _ALIGN) * _ALIGN
        self._device_bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        self.device = {
            name: self._device_bytes[begin : begin + nbytes]
            .view(_torch_dtype(np.dtype(each.dtype)))
            .view(each.shape(max_rows))
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
            name: flat[begin : begin + nbytes].view(each.dtype).reshape(each.shape(max_rows))
            for name, (each, begin, nbytes) in self._layout.items()
        }

    def host(self) -> dict[str, np.ndarray]:
        """Returns the next set of host arrays, which hold old values. The caller fills them and calls `send`."""
        self._next = (self._next + 1) % RING
        _wait_for(self._copied[self._next])
        return self._ring[self._next][1]

    def send(self) -> None:
        """Enqueues the copy of the last set that `host` returned."""
        self._device_bytes.copy_(self._ring[self._next][0], non_blocking=True)
        if self._device_bytes.is_cuda:
            event = self._copied[self._next] or torch.cuda.Event()
            record(event, self._device_bytes.device)
            self._copied[self._next] = event


class Results:
    """Copies [rows, width] int32 to the host, each time into pinned memory that is not reused until `release`."""

    def __init__(self, max_rows: int, width: int, device: torch.device) -> None:
        self._shape, self._device = (max_rows, width), device
        self._free: list[Tensor] = []

    def fetch(self, rows: Tensor) -> Tensor:
        """Enqueues the copy of ``rows``. The result is valid once the stream has executed the copy."""
        if not self._free:
            size = self._shape[0] * self._shape[1] * 4
            self._free.append(_host_bytes(size, self._device).view(torch.int32).view(self._shape))
        host = self._free.pop()[: len(rows)]
        host.copy_(rows, non_blocking=True)
        return host

    def release(self, host: Tensor) -> None:
        """Returns the memory of a result of `fetch` to the pool."""
        self._free.append(host.as_strided(self._shape, (self._shape[1], 1)))


def _wait_for(event: torch.cuda.Event | None) -> None:
    """Waits for ``event``. It queries the event first, because waiting releases the GIL, and getting it back is
    slow."""
    if event is not None and not event.query():
        event.synchronize()


def _host_bytes(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _torch_dtype(dtype: np.dtype[np.generic]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
