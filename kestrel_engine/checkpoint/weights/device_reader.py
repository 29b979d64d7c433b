"""Stored tensors straight onto a device, at the speed of the disk: several threads read ahead of whoever takes them.

Each thread reads a piece of a file into a page-locked buffer of its own and copies it on a stream of its own, while the
others read. Mapped files would be read by page faults of one thread. Owns files, threads and buffers while it is open;
knows no canonical names.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from ...errors import CheckpointError
from ..files import StoredTensor, is_pickle, load_pickle

READERS = 8
"""Threads. A disk's queue wants several requests; more than these have nothing left to hide."""
PIECE_BYTES = 16 * 1024 * 1024
AHEAD_BYTES = 256 * 1024 * 1024
"""What may lie on the device unasked for, beside the tensor that is asked for next."""

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

_Fill = Callable[[torch.Tensor, int], None]
"""Fills a CPU buffer of bytes with a tensor's bytes from an offset on."""


@dataclass(frozen=True, slots=True)
class _Arriving:
    """A tensor whose pieces are being read."""

    stored: StoredTensor
    data: torch.Tensor
    pieces: tuple[Future[None], ...]


class DeviceReader:
    """A context manager that gives a function from StoredTensor to device tensor. ``wanted``: all that will be asked
    for, in that order; a tensor may come several times and is read each time. Raises CheckpointError naming file and
    tensor."""

    def __init__(self, wanted: Sequence[StoredTensor], device: torch.device) -> None:
        self._wanted = deque(wanted)
        self._device = device
        self._arriving: deque[_Arriving] = deque()
        self._ahead_bytes = 0
        self._own = threading.local()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="kestrel-weights")
        self._descriptors: dict[Path, int] = {}
        self._places: dict[Path, dict[str, tuple[int, int]]] = {}
        self._pickles: dict[Path, dict[str, torch.Tensor]] = {}

    def __enter__(self) -> Callable[[StoredTensor], torch.Tensor]:
        return self._take

    def __exit__(self, *exc: object) -> None:
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._arriving.clear()
        self._pickles.clear()
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def _take(self, stored: StoredTensor) -> torch.Tensor:
        self._read_ahead()
        arriving = self._arriving.popleft()
        assert arriving.stored == stored, f"asked for {stored.name}, {arriving.stored.name} is next"
        for piece in arriving.pieces:
            piece.result()
        self._ahead_bytes -= arriving.data.nbytes
        self._read_ahead()
        return arriving.data.view(TORCH_DTYPES[stored.dtype]).view(stored.shape)

    def _read_ahead(self) -> None:
        while self._wanted and (not self._arriving or self._ahead_bytes < AHEAD_BYTES):
            arriving = self._begin(self._wanted.popleft())
            self._ahead_bytes += arriving.data.nbytes
            self._arriving.append(arriving)

    def _begin(self, stored: StoredTensor) -> _Arriving:
        if stored.dtype not in TORCH_DTYPES:
            raise CheckpointError(f"{stored.file}: {stored.name} is of type {stored.dtype}")
        size = prod(stored.shape) * TORCH_DTYPES[stored.dtype].itemsize
        fill = self._pickled(stored) if is_pickle(stored.file) else self._plain(stored, size)
        data = torch.empty(size, dtype=torch.uint8, device=self._device)
        allocated = None
        if data.is_cuda:
            # The memory may have been another tensor's, whose kernels are still to run.
            allocated = torch.cuda.Event()  # type: ignore[no-untyped-call]
            allocated.record(torch.cuda.current_stream(self._device))
        pieces = tuple(
            self._readers.submit(
                self._piece, fill, data[start : start + PIECE_BYTES], start, allocated
            )
            for start in range(0, size, PIECE_BYTES)
        )
        return _Arriving(stored, data, pieces)

    def _piece(
        self, fill: _Fill, target: torch.Tensor, start: int, allocated: torch.cuda.Event | None
    ) -> None:
        """On a reader's thread."""
        if allocated is None:
            fill(target, start)
            return
        if not hasattr(self._own, "buffer"):
            self._own.buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
            self._own.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        buffer, stream = self._own.buffer[: len(target)], self._own.stream
        fill(buffer, start)
        stream.wait_event(allocated)
        with torch.cuda.stream(stream):
            target.copy_(buffer, non_blocking=True)
        # The buffer is filled anew next; the others read meanwhile.
        stream.synchronize()

    def _plain(self, stored: StoredTensor, size: int) -> _Fill:
        """From a place in a .safetensors file."""
        file = stored.file
        if file not in self._descriptors:
            self._descriptors[file] = os.open(file, os.O_RDONLY)
            self._places[file] = data_places(file)
        descriptor = self._descriptors[file]
        begin, end = self._places[file][stored.name]
        if end - begin != size:
            raise CheckpointError(f"{file}: {stored.name} holds {end - begin} bytes, not {size}")

        def fill(buffer: torch.Tensor, start: int) -> None:
            view = buffer.numpy().data
            done = 0
            while done < len(view):
                try:
                    got = os.preadv(descriptor, [view[done:]], begin + start + done)
                except OSError as error:
                    raise CheckpointError(
                        f"{file}: {stored.name} can't be read ({error})"
                    ) from error
                if got == 0:
                    raise CheckpointError(f"{file}: broken or truncated ({stored.name})")
                done += got

        return fill

    def _pickled(self, stored: StoredTensor) -> _Fill:
        """From a mapped .pt file, whose pages the copying thread faults in."""
        if stored.file not in self._pickles:
            self._pickles[stored.file] = load_pickle(stored.file)
        tensor = self._pickles[stored.file][stored.name].contiguous()
        flat = tensor.view(-1).view(torch.uint8)

        def fill(buffer: torch.Tensor, start: int) -> None:
            buffer.copy_(flat[start : start + len(buffer)])

        return fill


def data_places(file: Path) -> dict[str, tuple[int, int]]:
    """Name -> first byte and end of its data in a .safetensors file. Raises CheckpointError for a broken header."""
    try:
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
        return {
            name: (8 + length + entry["data_offsets"][0], 8 + length + entry["data_offsets"][1])
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError, MemoryError) as error:
        raise CheckpointError(f"{file}: broken or truncated ({error})") from error
