"""A server of a cluster as a child process, without Ray."""

import asyncio
import dataclasses
import os
import re
import sys

import pytest

from kestrel_client import AsyncKestrelClient, KestrelError
from kestrel_grpc.cluster import server as cluster_server
from kestrel_grpc.cluster.plan import ServerTask
from kestrel_grpc.cluster.scaling import KV_USE, QUEUE_WAIT_S, UTILIZATION
from kestrel_grpc.cluster.server import ServerError, ServerProcess
from tests.forking.process import create_forked_process
from tests.waiting import until

TASK = ServerTask(
    settings='[device]\ndevice = "cpu"\nthreads = 1\n[scheduler]\nkv-cache-gib = 0.1\n',
    model="kestrel-small", port=0, drain_delay_s=0.0, grace_s=60.0, needs_token=False, secrets=(),
    version="v",
)  # fmt: skip


FAKE = """
import runpy
from tests.abuse import fake_server
fake_server.main(lambda: runpy.run_module("kestrel_grpc.cli.cluster.server_process", None, "__main__"))
"""
"""The program of COMMAND with the fake runtime."""


@pytest.fixture
async def start(monkeypatch):
    monkeypatch.setattr(cluster_server, "COMMAND", (sys.executable, "-c", FAKE))
    if hasattr(os, "fork"):
        monkeypatch.setattr(asyncio, "create_subprocess_exec", forked)
    started = []

    async def start(environ=None, **changes):
        task = dataclasses.replace(TASK, **changes)
        environ = {**os.environ, **(environ or {})}
        started.append(await ServerProcess.start(task, "127.0.0.1", "replica", environ))
        return started[-1]

    yield start
    for server in started:
        await server.stop(60)


async def forked(*command, **options):
    process = await create_forked_process(*command, **options)
    process.stdout = FirstLine(process._popen.stdout)
    return process


class FirstLine:
    def __init__(self, pipe):
        self._pipe = pipe

    async def readline(self):
        with self._pipe:
            return await asyncio.to_thread(self._pipe.readline)


async def test_a_server_serves_and_says_how_busy_it_is(start):
    # A node's own settings have no effect.
    server = await start({"KESTREL_MODEL": "nonsense", "KESTREL_DRAIN_DELAY": "600"})
    assert re.fullmatch(r"127\.0\.0\.1:\d+", server.address)
    assert await server.is_serving() and server.has_ended() is None
    assert await server.load() == {UTILIZATION: 0.0, QUEUE_WAIT_S: 0.0, KV_USE: 0.0}
    async with AsyncKestrelClient(server.address) as client:
        async with client.stream_query(None, "?", max_tokens=400) as stream:
            async for _ in stream:
                assert (await server.load())[UTILIZATION] > 0
                stopping = asyncio.create_task(server.stop(60))
                break
            # It drains: what runs may end.
            assert (await stream.result()).answer
    await stopping
    assert server.has_ended() == "exit status 0"
    await server.stop(60)


async def test_with_tokens_the_load_is_read_with_a_key_of_its_own(start, tmp_path):
    (tokens := tmp_path / "tokens").write_text("")
    tokens.chmod(0o600)
    settings = f'{TASK.settings}[security]\nauth-tokens = "{tokens}"\n'
    server = await start(
        {"KESTREL_API_KEY": "another-key-of-the-node"}, settings=settings, needs_token=True
    )
    assert UTILIZATION in await server.load()
    for token in (None, "another-key-of-the-node"):
        async with AsyncKestrelClient(server.address, token=token) as client:
            with pytest.raises(KestrelError, match="token"):
                await client.server_load()


async def test_a_server_whose_replica_is_killed_drains(start, monkeypatch):
    pipes, pipe = [], os.pipe
    monkeypatch.setattr(os, "pipe", lambda: pipes.append(pipe()) or pipes[-1])
    server = await start()
    async with AsyncKestrelClient(server.address) as client:
        async with client.stream_query(None, "?", max_tokens=400) as stream:
            async for _ in stream:
                break
            # As the end of this process would, this closes the end of the pipe that only this process has.
            with open(os.devnull) as null:
                os.dup2(null.fileno(), pipes[0][1], inheritable=False)
            assert (await stream.result()).answer
    assert await until(server.has_ended) == "exit status 0"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"settings": "[model]\nmodel = 'nonsense'\n"}, "the server did not start: exit status 2"),
        (
            {"secrets": ("KESTREL_API_KEY",)},
            "KESTREL_API_KEY: not set on the node 127.0.0.1; set it",
        ),
    ],
)
async def test_a_server_that_cannot_start(start, monkeypatch, changes, message):
    monkeypatch.delenv("KESTREL_API_KEY", raising=False)
    monkeypatch.delenv("KESTREL_MODEL")  # It would win over the settings.
    with pytest.raises(ServerError, match=message):
        await start(**changes)
