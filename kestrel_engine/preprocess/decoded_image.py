"""DecodedImage: an image's pixels, of which the first rows may be used while the others are still being decoded.

Decoding a JPEG is one thread's work; others can resize what is there already, and hash it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np


class DecodedImage:
    """``pixels``: [height, width, 3] uint8 sRGB, C-contiguous, upright; not to be written to, and to be read only where
    ``wait_for`` has returned. ``decoding``: writes them from top to bottom, and reports each time how many rows are
    there; None if all are. Thread-safe, but ``decode`` belongs to one thread."""

    def __init__(self, pixels: np.ndarray, decoding: Iterator[int] | None = None) -> None:
        self.pixels = pixels
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
        """Decodes all rows if that wasn't done yet. Raises what ``decoding`` raises."""
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
        """Blocks until the first ``rows`` rows, at most ``height``, are there. Another thread must have called
        ``decode``; raises the error of that call."""
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
        """Wakes only the threads that wait for at most ``rows``."""
        with self._lock:
            self._rows = rows
            ready = [arrived for needed, arrived in self._waiting if needed <= rows]
            self._waiting = [waiter for waiter in self._waiting if waiter[0] > rows]
        for arrived in ready:
            arrived.set()
