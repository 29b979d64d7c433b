"""The processes that benchmarks start: servers (`ServerProcess`) and children that obey a pipe (`ChildProcess`).

Both are context managers. At the end of the context they ask the process to end, and kill it if it does not.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

START_PATIENCE_S = 400.0
"""Seconds after which a server that is not ready counts as failed."""
END_PATIENCE_S = 30.0
"""Seconds after which a process that was asked to end is killed."""

ROOT = Path(__file__).parents[2]

START: type[subprocess.Popen[Any]] = subprocess.Popen
"""What starts servers. Tests start them in another way."""


class ServerProcess:
    """A server in a separate process, ready for calls.

    ``command`` starts the server, which prints a line "… listening on ADDRESS, …" once it is ready. ``log``: the file
    that receives its standard error; None to inherit this process's. ``end_patience_s``: seconds that it may take to
    end. ``start``: starts the process; START if it is None. Attributes: ``ready_line``; ``address``, the first in that
    line; ``ready_s``, seconds from the start of the process until it was ready; ``status``, the exit status, once it
    has ended.

    Raises RuntimeError, with the end of the log, if the server ends or START_PATIENCE_S pass before it is ready.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        end_patience_s: float = END_PATIENCE_S,
        start: type[subprocess.Popen[Any]] | None = None,
    ) -> None:
        self._log, self._end_patience_s = log, end_patience_s
        self.status: int | None = None
        began = time.perf_counter()
        with contextlib.ExitStack() as stack:
            errors = None if log is None else stack.enter_context(log.open("wb"))
            self._process = (start or START)(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                cwd=ROOT,
            )
        try:
            self.ready_line = self._first_line()
        except BaseException:
            self.end()
            raise
        self.ready_s = time.perf_counter() - began
        self.address = self.ready_line.partition("listening on ")[2].partition(",")[0].strip()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, line: str) -> str:
        """Writes a line to the server's standard input and returns the next line of its output."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._read_line()

    def end(self) -> None:
        """Sends SIGTERM and waits for the end. Kills the process if it takes too long."""
        if self.status is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self.status = self._process.wait(self._end_patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self.status = self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def _first_line(self) -> str:
        overdue = threading.Timer(START_PATIENCE_S, self._process.kill)
        overdue.start()
        try:
            line = self._read_line()
        finally:
            overdue.cancel()
        if "listening on " not in line:
            raise RuntimeError(f"the server's first line is not its ready line: {line!r}")
        return line

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            text = "" if self._log is None else self._log.read_text(errors="replace")[-4000:]
            raise RuntimeError(f"the server ended with status {self._process.wait()}\n{text}")
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()


def serve(
    flags: Sequence[str], *, log: Path | None = None, end_patience_s: float = END_PATIENCE_S
) -> ServerProcess:
    """Starts ``kestrel-grpc serve`` with ``flags`` on a free port of 127.0.0.1, unless ``flags`` name another address.

    Raises RuntimeError as ServerProcess does.
    """
    listen = () if "--listen" in flags else ("--listen", "127.0.0.1:0")
    command = [sys.executable, "-m", "kestrel_grpc", "serve", *listen, "--drain-delay", "0", *flags]
    return ServerProcess(command, log=log, end_patience_s=end_patience_s)


class ChildProcess:
    """A child that runs ``target(pipe, *arguments)``. Attribute ``pipe``: the parent's end, also the context's value.

    The target must return when None arrives, or when it has done its work. The child is spawned, not forked, because
    gRPC does not support forks.
    """

    def __init__(self, target: Callable[..., object], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe: Connection
        self.pipe, childs_end = context.Pipe()
        self._process = context.Process(target=target, args=(childs_end, *arguments), daemon=True)
        self._process.start()
        childs_end.close()

    def end(self) -> None:
        """Sends None and waits for the end. Kills the child if it takes longer than END_PATIENCE_S."""
        with contextlib.suppress(OSError):  # The child has ended already.
            self.pipe.send(None)
        self._process.join(END_PATIENCE_S)
        self.kill()

    def kill(self) -> None:
        """Ends the child at once, if it runs."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self.pipe.close()

    def __enter__(self) -> Connection:
        return self.pipe

    def __exit__(self, *exc_info: object) -> None:
        self.end()
