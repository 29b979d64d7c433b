"""LogWriter: log lines to a file descriptor, by a thread of its own. Owns what waits to be written, and what was lost.

Nobody who logs waits for the reader of a pipe or for a disk: lines wait here instead, up to a bound; beyond it they are
dropped and counted, and so are those that can't be written. How many is told as soon as something can be written again.

The standard library's QueueListener bounds neither bytes nor its own end, which waits for what can't be written. The
lines go to the descriptor itself: a thread that hangs in ``sys.stderr`` has its lock, and an interpreter that ends
meanwhile aborts.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import traceback
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

FLUSH_S = 1.5
"""How long a process that ends waits for its last lines to be written."""
_TOGETHER_S = 0.005
"""What comes within so many seconds is written together: woken for each line, the thread would ask for the interpreter
as often as calls end."""
_TOO_MANY = "nobody read them fast enough"


class LogWriter(logging.Handler):
    """Any thread may log. ``fd`` is the caller's, and open until ``close``; ``most_bytes`` may wait."""

    def __init__(self, fd: int, most_bytes: int) -> None:
        super().__init__()
        self._fd, self._most_bytes = fd, most_bytes
        # Reentrant: the garbage collector may run a destructor that logs, anywhere.
        self._lock = threading.RLock()
        self._lines: list[bytes] = []
        self._held_bytes = 0
        """Of all lines not yet written, those in the thread's hands included."""
        self._dropped = self._lost = 0
        """For want of room, since lines were last taken; and for whatever reason, since the start."""
        self._arrived, self._idle = threading.Event(), threading.Event()
        self._idle.set()
        self._stuck = self._closing = False
        # What follows is the thread's alone.
        self._untold, self._why = 0, ""
        self._within_line = False
        self._thread = threading.Thread(target=self._run, name="kestrel-log", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Records that were not written, since the start."""
        return self._lost

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._add(self.format(record))
        except Exception:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Logging's own would write to standard error, there and then."""
        self._add(f"a record of {record.name} can't be told: {traceback.format_exc().rstrip()}")

    def flush(self) -> None:
        """Waits until all is written, FLUSH_S at most, and no second time while nothing moves."""
        if not self._stuck:
            self._stuck = not self._idle.wait(FLUSH_S)

    def close(self) -> None:
        """Idempotent. What can't be written within FLUSH_S is lost."""
        self.flush()
        self._closing = True
        self._arrived.set()
        if not self._stuck:
            self._thread.join(FLUSH_S)
        super().close()

    def _add(self, text: str) -> None:
        line = text.encode(errors="backslashreplace") + b"\n"
        with self._lock:
            if self._closing or self._held_bytes + len(line) > self._most_bytes:
                self._dropped += 1
                self._lost += 1
            else:
                self._held_bytes += len(line)
                self._lines.append(line)
            if len(self._lines) <= 1 and not self._closing:
                self._idle.clear()
                self._arrived.set()

    def _run(self) -> None:
        while True:
            self._arrived.wait()
            if not self._closing:
                time.sleep(_TOGETHER_S)
            with self._lock:
                lines, self._lines = self._lines, []
                dropped, self._dropped = self._dropped, 0
                self._arrived.clear()
            self._tell(lines, dropped)
            with self._lock:
                self._held_bytes -= sum(map(len, lines))
                if not self._lines and not self._dropped:
                    self._idle.set()
                    self._stuck = False
                    if self._closing:
                        return

    def _tell(self, lines: list[bytes], dropped: int) -> None:
        """``dropped``: how many came after ``lines`` and are gone."""
        written = self._write(lines) if self._tell_lost() else 0
        unwritten = len(lines) - written
        with self._lock:
            self._lost += unwritten
        self._untold += unwritten + dropped
        if dropped and not unwritten:
            self._why = _TOO_MANY
            self._tell_lost()

    def _tell_lost(self) -> bool:
        """Whether there is nothing left to be told of."""
        if self._untold:
            record = logging.makeLogRecord(
                {
                    "name": __name__,
                    "levelno": logging.WARNING,
                    "levelname": "WARNING",
                    "msg": "%d records were lost: %s",
                    "args": (self._untold, self._why),
                }
            )
            if self._write([self.format(record).encode() + b"\n"]):
                self._untold = 0
        return not self._untold

    def _write(self, lines: list[bytes]) -> int:
        """How many of them were written, the first ones. Waits for a reader as long as it takes."""
        written = 0
        try:
            for group in _groups(lines):
                begin = b"\n" if self._within_line else b""
                self._put(begin + b"".join(group))
                written += len(group)
        except _Cut as cut:
            self._why = cut.why
            ends = accumulate(map(len, group), initial=len(begin))
            written += bisect_right(list(ends)[1:], cut.sent)
        return written

    def _put(self, data: bytes) -> None:
        """Raises _Cut."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
                self._within_line = data[len(data) - len(rest) - 1] != ord("\n")
            except BlockingIOError:  # Whoever shares the pipe may have made it so.
                ready = select.poll()
                ready.register(self._fd, select.POLLOUT)
                ready.poll()
            except OSError as error:
                raise _Cut(len(data) - len(rest), error.strerror or str(error)) from None


class _Cut(Exception):
    """Only the first ``sent`` bytes could be written."""

    def __init__(self, sent: int, why: str) -> None:
        super().__init__(why)
        self.sent, self.why = sent, why


def _groups(lines: list[bytes]) -> Iterator[list[bytes]]:
    """Lines to be written together: a pipe that other processes write to as well keeps so many bytes together."""
    group: list[bytes] = []
    size = 0
    for line in lines:
        if group and size + len(line) > select.PIPE_BUF:
            yield group
            group, size = [], 0
        group.append(line)
        size += len(line)
    if group:
        yield group
