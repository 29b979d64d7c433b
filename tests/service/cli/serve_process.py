"""A ``kestrel-grpc serve`` as a process of a test."""

import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.forking.process import ForkedProcess
from tests.service.command_line import PROGRAM, ROOT, environment
from tests.waiting import wait_until

READY = re.compile(
    r"^kestrel-grpc ready: (\S+) on cpu \(\w+\), listening on (.+), loaded in [\d.]+ s$"
)


class Process:
    """A ``serve`` process; ``started`` waits for its ready line. ``start``: ForkedProcess or subprocess.Popen."""

    def __init__(self, log, *arguments, start=ForkedProcess, **variables):
        self.log = log
        with log.open("wb") as errors:
            self.popen = start(
                [*PROGRAM, "serve", *map(str, arguments)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env=environment(**variables),
            )

    def started(self):
        self.ready = self.popen.stdout.readline().strip()
        assert self.ready, self.log.read_text()
        return self

    def signal(self, number):
        self.popen.send_signal(number)

    def wait(self, timeout=60):
        try:
            return self.popen.wait(timeout)
        finally:
            self.popen.stdout.close()

    def kill(self):
        if self.popen.poll() is None:
            self.popen.kill()
            self.wait()
        self.popen.stdout.close()


class Addresses(NamedTuple):
    grpc: str
    http: str


@contextmanager
def served_model(**variables: str) -> Iterator[Addresses]:
    """kestrel-tiny on both ports, by a process with these variables."""
    ports = ("--device", "cpu", "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0")
    with tempfile.TemporaryDirectory() as folder:
        process = Process(Path(folder) / "log", *ports, **variables).started()
        try:
            listening = re.compile(r"addresses=(\S+) protocol=http")
            http = wait_until(lambda: listening.search(process.log.read_text()))
            yield Addresses(READY.match(process.ready)[2], http[1])
            process.signal(signal.SIGINT)
            process.wait()
        finally:
            process.kill()
