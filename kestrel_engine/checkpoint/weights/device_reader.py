"""Reads stored tensors onto a device at the speed of the disk. Several threads read ahead of the consumer.

Each thread reads a piece of a file into its own page-locked buffer and copies it to the device on its own stream. (A
memory-mapped file would be read by the page faults of a single thread.) An open reader owns files, threads and buffers.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from ...errors import CheckpointError
from ..files import DTYPES, StoredTensor, is_pickle, load_pickle
from ..safetensors_header import Header, read_header

READERS = 8
"""Number of reader threads. A disk needs several requests in its queue; more threads than these gain nothing."""
PIECE_BYTES = 16 * 1024 * 1024
AHEAD_BYTES = 256 * 1024 * 1024
"""Bytes of tensors on the device that may be read ahead, beside the tensor that is requested next."""
CPU_AHEAD_BYTES = 32 * 1024 * 1024
"""The same for a CPU, whose memory is that of the reader."""

_Fill = Callable[[torch.Tensor, int], None]
"""Fills a CPU buffer of uint8 with a tensor's bytes, starting at an offset."""


@dataclass(frozen=True, slots=True)
class _Arriving:
    """A tensor whose pieces are being read."""

    stored: StoredTensor
    data: torch.Tensor
    pieces: tuple[Future[None], ...]


class DeviceReader:
    """A context manager that returns a function from StoredTensor to a tensor on ``device``. ``wanted``: all tensors
    that will be requested, in this order. Raises CheckpointError, which names the file and the tensor.
    """

    def __init__(self, wanted: Sequence[StoredTensor], device: torch.device) -> None:
        self._wanted = deque(wanted)
        self._device = device
        self.arriving: deque[_Arriving] = deque()
        self._ahead_bytes = 0
        self._most_ahead = AHEAD_BYTES if device.type != "cpu" else CPU_AHEAD_BYTES
        self._thread_state = threading.local()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="kestrel-weights")
        self._stack = ExitStack()
        self._files: dict[Path, tuple[BinaryIO, Header]] = {}
        self._pickles: dict[Path, dict[str, torch.Tensor]] = {}

    def __enter__(self) -> Callable[[StoredTensor], torch.Tensor]:
        return self._read

    def __exit__(self, *exc: object) -> None:
        self._readers.shutdown(wait=True, cancel_futures=True)
        self.arriving.clear()
        self._pickles.clear()
        self._stack.close()

    def _read(self, stored: StoredTensor) -> torch.Tensor:
        self._read_ahead()
        arriving = self.arriving.popleft()
        assert arriving.stored == stored, f"{stored.name} requested, {arriving.stored.name} is next"
        for piece in arriving.pieces:
            piece.result()
        self._ahead_bytes -= arriving.data.nbytes
        self._read_ahead()
        return arriving.data.view(stored.torch_dtype).view(stored.shape)

    def _read_ahead(self) -> None:
        while self._wanted and (not self.arriving or self._ahead_bytes < self._most_ahead):
            arriving = self._start_read(self._wanted.popleft())
            self._ahead_bytes += arriving.data.nbytes
            self.arriving.append(arriving)

    def _start_read(self, stored: StoredTensor) -> _Arriving:
        if stored.dtype not in DTYPES:
            raise CheckpointError(
                f"{stored.file}: {stored.name} has the unsupported type {stored.dtype}"
            )
        size = stored.num_bytes
        from_pickle = is_pickle(stored.file)
        fill = self._fill_pickled(stored) if from_pickle else self._fill_plain(stored)
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
        """Runs on a reader thread."""
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

    def _fill_plain(self, stored: StoredTensor) -> _Fill:
        """Returns a function that reads a tensor from a .safetensors file. Raises CheckpointError."""
        file = stored.file
        if file not in self._files:
            opened = self._stack.enter_context(file.open("rb"))
            self._files[file] = opened, read_header(file, opened)
        descriptor, header = self._files[file][0].fileno(), self._files[file][1]
        begin = header.begin(stored)

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
