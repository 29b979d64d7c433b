"""ServerProcess: fake_server.py as a process, its ready line, its log and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from tests.abuse.fake_server import HANG_FILE
from tests.forking.process import ForkedProcess
from tests.tiny import VARIABLES

ROOT = Path(__file__).parents[2]


class ServerProcess:
    """A context. ``stdout`` and ``stderr`` lead elsewhere than to us if given; then ``listen`` must name a port."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        listen: str = "127.0.0.1:0",
        stdout: IO[Any] | None = None,
        stderr: IO[Any] | None = None,
        **variables: str,
    ) -> None:
        self.log, self.hang = folder / "server.log", folder / "hang"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("KESTREL_", "OTEL_"))}
        with self.log.open("wb") as log:
            self.popen = ForkedProcess(
                [sys.executable, "-m", "tests.abuse.fake_server", "--listen", listen, *flags],
                stdout=stdout or subprocess.PIPE,
                stderr=stderr or log,
                cwd=ROOT,
                env={
                    **inherited,
                    **VARIABLES,
                    "KESTREL_DRAIN_DELAY": "0",
                    HANG_FILE: str(self.hang),
                    **variables,
                },
            )
        self.address = listen
        if stdout is None:
            assert self.popen.stdout is not None
            ready = self.popen.stdout.readline().decode()
            assert "ready" in ready, self.log.read_text(errors="replace")
            self.address = ready.partition("listening on ")[2].partition(",")[0]

    def stop(self, within_s: float) -> None:
        """SIGTERM; the process ends with status 0."""
        self.popen.send_signal(signal.SIGTERM)
        status = self.popen.wait(within_s)
        assert status == 0, (status, self.log.read_text(errors="replace")[-4000:])

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()
        if self.popen.stdout is not None:
            self.popen.stdout.close()
