"""Reads stored tensors onto a device at the speed of the disk. Several threads read ahead of the consumer.

Each thread reads a piece of a file into its own page-locked buffer and copies the piece to the device on its own
stream, while the other threads read. (A memory-mapped file would be read by the page faults of a single thread.) An
open reader owns its files, threads and buffers.
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
"""Number of reader threads. A disk needs several requests in its queue; more threads than these gain nothing."""
PIECE_BYTES = 16 * 1024 * 1024
AHEAD_BYTES = 256 * 1024 * 1024
"""Bytes of tensors on the device that may be read ahead, beside the tensor that is requested next."""

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U8": torch.uint8,
}

_Fill = Callable[[torch.Tensor, int], None]
"""Fills a CPU buffer of uint8 with a tensor's bytes, starting at an offset."""


@dataclass(frozen=True, slots=True)
class _Arriving:
    """A tensor whose pieces are being read."""

    stored: StoredTensor
    data: torch.Tensor
    pieces: tuple[Future[None], ...]


class DeviceReader:
    """A context manager that returns a function from StoredTensor to a tensor on ``device``.

    ``wanted``: all tensors that will be requested, in this order. A tensor that occurs several times is read each time.
    Raises CheckpointError, which names the file and the tensor.
    """

    def __init__(self, wanted: Sequence[StoredTensor], device: torch.device) -> None:
        self._wanted = deque(wanted)
        self._device = device
        self._arriving: deque[_Arriving] = deque()
        self._ahead_bytes = 0
        self._thread_state = threading.local()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="kestrel-weights")
        self._descriptors: dict[Path, int] = {}
        self._data_ranges: dict[Path, dict[str, tuple[int, int]]] = {}
        self._pickles: dict[Path, dict[str, torch.Tensor]] = {}

    def __enter__(self) -> Callable[[StoredTensor], torch.Tensor]:
        return self._read

    def __exit__(self, *exc: object) -> None:
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._arriving.clear()
        self._pickles.clear()
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def _read(self, stored: StoredTensor) -> torch.Tensor:
        self._read_ahead()
        arriving = self._arriving.popleft()
        assert arriving.stored == stored, f"{stored.name} requested, {arriving.stored.name} is next"
        for piece in arriving.pieces:
            piece.result()
        self._ahead_bytes -= arriving.data.nbytes
        self._read_ahead()
        return arriving.data.view(TORCH_DTYPES[stored.dtype]).view(stored.shape)

    def _read_ahead(self) -> None:
        while self._wanted and (not self._arriving or self._ahead_bytes < AHEAD_BYTES):
            arriving = self._start_read(self._wanted.popleft())
            self._ahead_bytes += arriving.data.nbytes
            self._arriving.append(arriving)

    def _start_read(self, stored: StoredTensor) -> _Arriving:
        if stored.dtype not in TORCH_DTYPES:
            raise CheckpointError(
                f"{stored.file}: {stored.name} has the unsupported type {stored.dtype}"
            )
        size = prod(stored.shape) * TORCH_DTYPES[stored.dtype].itemsize
        from_pickle = is_pickle(stored.file)
        fill = self._fill_pickled(stored) if from_pickle else self._fill_plain(stored, size)
        data = torch.empty(size, dtype=torch.uint8, device=self._device)
        allocated = None
        if data.is_cuda:
            # Kernels that use the previous tensor at this address may still have to run.
            allocated = torch.cuda.Event()  # type: ignore[no-untyped-call]
            allocated.record(torch.cuda.current_stream(self._device))
        pieces = tuple(
            self._readers.submit(
                self._read_piece, fill, data[start : start + PIECE_BYTES], start, allocated
            )
            for start in range(0, size, PIECE_BYTES)
        )
        return _Arriving(stored, data, pieces)

    def _read_piece(
        self, fill: _Fill, target: torch.Tensor, start: int, allocated: torch.cuda.Event | None
    ) -> None:
        """Reads one piece. Runs on a reader thread."""
        if allocated is None:
            fill(target, start)
            return
        own = self._thread_state
        if not hasattr(own, "buffer"):
            own.buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
            own.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        buffer, stream = own.buffer[: len(target)], own.stream
        fill(buffer, start)
        stream.wait_event(allocated)
        with torch.cuda.stream(stream):
            target.copy_(buffer, non_blocking=True)
        # The next piece reuses the buffer. Other threads read while this one waits.
        stream.synchronize()

    def _fill_plain(self, stored: StoredTensor, size: int) -> _Fill:
        """Returns a function that reads a tensor from a .safetensors file. Raises CheckpointError."""
        file = stored.file
        if file not in self._descriptors:
            self._descriptors[file] = os.open(file, os.O_RDONLY)
            self._data_ranges[file] = data_ranges(file)
        descriptor = self._descriptors[file]
        begin, end = self._data_ranges[file][stored.name]
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
                    raise CheckpointError(f"{file}: damaged or truncated ({stored.name})")
                done += got

        return fill

    def _fill_pickled(self, stored: StoredTensor) -> _Fill:
        """Returns a function that copies a tensor from a memory-mapped .pt file. Raises CheckpointError."""
        if stored.file not in self._pickles:
            self._pickles[stored.file] = load_pickle(stored.file)
        tensor = self._pickles[stored.file][stored.name].contiguous()
        flat = tensor.view(-1).view(torch.uint8)

        def fill(buffer: torch.Tensor, start: int) -> None:
            buffer.copy_(flat[start : start + len(buffer)])

        return fill


def data_ranges(file: Path) -> dict[str, tuple[int, int]]:
    """Returns the byte range [begin, end) of each tensor's data in a .safetensors file, by name.

    Raises CheckpointError for a damaged header.
    """
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
        raise CheckpointError(f"{file}: damaged or truncated ({error})") from error
