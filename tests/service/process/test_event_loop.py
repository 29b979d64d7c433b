"""Which event loop runs a server process."""

import asyncio
import sys

import pytest

from kestrel_grpc.process.event_loop import run
from kestrel_grpc.settings.http import HttpConfig
from kestrel_grpc.settings.security import SecurityConfig, TlsFiles
from kestrel_grpc.settings.server import ServerConfig

HTTPS = ServerConfig(
    http=HttpConfig(http_listen=("127.0.0.1:0",)),
    security=SecurityConfig(tls=TlsFiles(certificate="c", private_key="k")),
)


async def _library() -> str:
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]


def test_uvloop_runs_a_server():
    pytest.importorskip("uvloop")
    assert run(_library(), ServerConfig()) == "uvloop"
    assert run(_library(), HTTPS) == "asyncio"


def test_asyncio_runs_a_server_without_uvloop(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert run(_library(), ServerConfig()) == "asyncio"
