"""LogWriter: a logging handler that writes lines to a file descriptor on its own thread.

A thread that logs never waits for a pipe's reader or a disk. Lines wait in a buffer instead. The buffer has a limit;
further lines are dropped and counted, as are lines that cannot be written. When writing is possible again, a record
reports their number.

The standard library's QueueListener limits neither the bytes that wait nor the time that its end takes. This handler
writes to the descriptor and not to ``sys.stderr``, because a thread that hangs in ``sys.stderr`` holds its lock, and
then the interpreter aborts at exit.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import traceback
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

from kestrel_engine import clock

FLUSH_S = 1.5
"""Seconds that a process waits at its end for its last lines to be written."""
_TOGETHER_S = 0.005
"""Seconds for which lines are collected and then written together. If each line woke the thread, the thread would need
the interpreter lock as often as calls end."""
_TOO_MANY = "the reader was too slow"


class LogWriter(logging.Handler):
    """Writes records of any thread. ``fd`` belongs to the caller and must stay open until ``close``. ``most_bytes``
    limits the bytes that wait."""

    def __init__(self, fd: int, most_bytes: int) -> None:
        super().__init__()
        self._fd, self._most_bytes = fd, most_bytes
        # Reentrant, because the garbage collector may run a destructor that logs at any point.
        self._lock = threading.RLock()
        self._lines: list[bytes] = []
        self.held_bytes = 0
        """Bytes of all lines that are not written yet, including those that the thread is writing."""
        self._dropped = self._lost = 0
        """Lines dropped for lack of room since the thread last fetched lines; lines lost for any reason since the
        start."""
        self._arrived, self.idle = threading.Event(), threading.Event()
        self.idle.set()
        self._stuck = self._closing = False
        # Only the thread uses the following attributes.
        self._unreported, self._why = 0, ""
        self._within_line = False
        self._thread = threading.Thread(target=self._run, name="kestrel-log", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Number of records since the start that were not written."""
        return self._lost

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._add(self.format(record))
        except Exception:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Adds the error as a line. The inherited method would write to standard error at once."""
        self._add(
            f"a record of {record.name} cannot be formatted: {traceback.format_exc().rstrip()}"
        )

    def flush(self) -> None:
        """Waits until all lines are written, at most FLUSH_S seconds. After a timeout, does not wait again until a line
        is written."""
        if not self._stuck:
            self._stuck = not clock.wait(self.idle, FLUSH_S)

    def close(self) -> None:
        """Ends the thread. Lines that cannot be written within FLUSH_S seconds are lost. Idempotent."""
        self.flush()
        self._closing = True
        self._arrived.set()
        if not self._stuck:
            self._thread.join(FLUSH_S)
        super().close()

    def _add(self, text: str) -> None:
        line = text.encode(errors="backslashreplace") + b"\n"
        with self._lock:
            if self._closing or self.held_bytes + len(line) > self._most_bytes:
                self._dropped += 1
                self._lost += 1
            else:
                self.held_bytes += len(line)
                self._lines.append(line)
            if len(self._lines) <= 1 and not self._closing:
                self.idle.clear()
                self._arrived.set()

    def _run(self) -> None:
        while True:
            self._arrived.wait()
            if not self._closing:
                clock.sleep(_TOGETHER_S)
            with self._lock:
                lines, self._lines = self._lines, []
                dropped, self._dropped = self._dropped, 0
                self._arrived.clear()
            self._write_batch(lines, dropped)
            with self._lock:
                self.held_bytes -= sum(map(len, lines))
                if not self._lines and not self._dropped:
                    self.idle.set()
                    self._stuck = False
                    if self._closing:
                        return

    def _write_batch(self, lines: list[bytes], dropped: int) -> None:
        """Writes ``lines`` and reports losses. ``dropped``: number of lines that were dropped after ``lines``."""
        written = self._write(lines) if self._report_lost() else 0
        unwritten = len(lines) - written
        with self._lock:
            self._lost += unwritten
        self._unreported += unwritten + dropped
        if dropped and not unwritten:
            self._why = _TOO_MANY
            self._report_lost()

    def _report_lost(self) -> bool:
        """Writes a record about lost lines. Returns whether no loss is left to report."""
        if self._unreported:
            record = logging.makeLogRecord(
                {
                    "name": __name__,
                    "levelno": logging.WARNING,
                    "levelname": "WARNING",
                    "msg": "%d records were lost: %s",
                    "args": (self._unreported, self._why),
                }
            )
            if self._write([self.format(record).encode() + b"\n"]):
                self._unreported = 0
        return not self._unreported

    def _write(self, lines: list[bytes]) -> int:
        """Writes lines in order. Returns the number of lines that were written. Waits for a reader without a limit."""
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
        """Writes all of ``data``. Raises _Cut."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
                self._within_line = data[len(data) - len(rest) - 1] != ord("\n")
            except BlockingIOError:
                # Another process that shares the pipe may have made it non-blocking.
                ready = select.poll()
                ready.register(self._fd, select.POLLOUT)
                ready.poll()
            except OSError as error:
                raise _Cut(len(data) - len(rest), error.strerror or str(error)) from None


class _Cut(Exception):
    """Only the first ``sent`` bytes were written. ``why``: the cause."""

    def __init__(self, sent: int, why: str) -> None:
        super().__init__(why)
        self.sent, self.why = sent, why


def _groups(lines: list[bytes]) -> Iterator[list[bytes]]:
    """Groups of lines to write at once. A write of up to PIPE_BUF bytes to a shared pipe is atomic."""
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
