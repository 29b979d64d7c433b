"""A ``kestrel-grpc serve`` as a process of a test."""

import re
import subprocess

from tests.forking.process import ForkedProcess
from tests.service.command_line import PROGRAM, ROOT, environment

READY = re.compile(
    r"^kestrel-grpc ready: (\S+) on cpu \(float32\), listening on (.+), loaded in [\d.]+ s$"
)


class Process:
    """A ``serve`` process; ``started`` waits for its ready line. ``start``: ForkedProcess or subprocess.Popen."""

    def __init__(self, log, *arguments, start=ForkedProcess):
        self.log = log
        with log.open("wb") as errors:
            self.popen = start(
                [*PROGRAM, "serve", *map(str, arguments)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env=environment(),
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
