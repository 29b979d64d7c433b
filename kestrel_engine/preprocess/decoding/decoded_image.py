"""DecodedImage: the pixels of an image. The first rows can be used while later rows are still being decoded.

One thread decodes a JPEG. Meanwhile other threads can resize and hash the finished rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

Allocate: TypeAlias = Callable[[tuple[int, ...]], np.ndarray]
"""Allocates uint8 memory of a shape, with any contents."""


def new_bytes(shape: tuple[int, ...]) -> np.ndarray:
    """Allocates ordinary memory."""
    return np.empty(shape, np.uint8)


class DecodedImage:
    """``pixels``: [height, width, 3] uint8 sRGB, C-contiguous, upright. Do not write to them, and read only rows for
    which ``wait_for`` has returned. ``decoding``: writes the rows from top to bottom, and yields the number of finished
    rows; None if all rows are finished. ``identity``: bytes that determine the pixels, such as the encoded image; None
    if only the pixels do. Thread-safe, except that only one thread may call ``decode``."""

    def __init__(
        self,
        pixels: np.ndarray,
        decoding: Iterator[int] | None = None,
        identity: tuple[bytes, ...] | None = None,
    ) -> None:
        self.pixels, self.identity = pixels, identity
        self._decoding = decoding
        self._rows = 0 if decoding is not None else self.height
        self._error: BaseException | None = None
        self._waiting: list[tuple[int, threading.Event]] = []
        self._lock = threading.Lock()

    @property
    def width(self) -> int:
        return int(self.pixels.shape[1])

    @property
    def height(self) -> int:
        return int(self.pixels.shape[0])

    def decode(self) -> None:
        """Decodes all rows, unless that is done. Raises the errors of ``decoding``."""
        decoding, self._decoding = self._decoding, None
        if decoding is None:
            return
        try:
            for rows in decoding:
                self._tell(rows)
        except BaseException as error:
            self._error = error
            self._tell(self.height)
            raise

    def wait_for(self, rows: int) -> None:
        """Blocks until the first ``rows`` rows, at most ``height``, are finished. Raises the error of ``decode``, which
        another thread must have called."""
        with self._lock:
            arrived = None
            if self._rows < rows:
                arrived = threading.Event()
                self._waiting.append((rows, arrived))
        if arrived is not None:
            arrived.wait()
        if self._error is not None:
            raise self._error

    def _tell(self, rows: int) -> None:
        """Sets the number of finished rows, and wakes the threads that wait for at most this number."""
        with self._lock:
            self._rows = rows
            ready = [arrived for needed, arrived in self._waiting if needed <= rows]
            self._waiting = [waiter for waiter in self._waiting if waiter[0] > rows]
        for arrived in ready:
            arrived.set()
