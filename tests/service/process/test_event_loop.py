"""Which event loop runs a server process."""

import asyncio
import sys

import pytest

from kestrel_grpc.process.event_loop import run


async def _library() -> str:
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]


def test_uvloop_runs_a_server():
    pytest.importorskip("uvloop")
    assert run(_library()) == "uvloop"


def test_asyncio_runs_a_server_without_uvloop(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert run(_library()) == "asyncio"
