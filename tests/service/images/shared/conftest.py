"""A real redis-server, or valkey-server, of the machine, on a free port."""

import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.service.certificates import Pair
from tests.waiting import wait_until

PROGRAM = shutil.which("valkey-server") or shutil.which("redis-server")
PASSWORD = "a-password-that-no-log-shows"


class RedisServer:
    """A server that can be killed, stopped and started again on its port."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.folder = folder
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, tls: Pair | None = None) -> None:
        assert PROGRAM is not None
        port = ["--port", self.port]
        if tls is not None:
            port = ["--port", 0, "--tls-port", self.port, "--tls-auth-clients", "no"]
            port += ["--tls-cert-file", tls.cert, "--tls-key-file", tls.key]
        words = [PROGRAM, *port, "--bind", "127.0.0.1", "--save", "", "--dir", self.folder,
                 "--requirepass", PASSWORD, "--daemonize", "no", "--loglevel", "warning"]  # fmt: skip
        self._process = subprocess.Popen([*map(str, words)], stdout=subprocess.DEVNULL)
        wait_until(self._listens)

    def _listens(self) -> bool:
        assert self._process is not None and self._process.poll() is None
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def freeze(self) -> None:
        """Connections stay open, and nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)
            self._process = None


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    pytest.importorskip("redis")
    if PROGRAM is None:
        pytest.skip("neither valkey-server nor redis-server is installed (make toolchains)")
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()
