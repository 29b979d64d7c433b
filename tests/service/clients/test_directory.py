"""The SDK follows a list of servers: they appear and vanish under load, and no call fails."""

import asyncio
import itertools
import os
import signal

import pytest

from kestrel_client import ImageHandle, directory
from tests.abuse.processes.three_servers import FILES, GREEDY, Servers, places
from tests.threaded import streamed
from tests.waiting import until


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    running = Servers(tmp_path_factory.mktemp("servers"))
    yield running
    running.close()


@pytest.mark.slow_with("async")
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_servers_appear_and_vanish_under_load(servers, kind, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(directory.Directory.__init__, "__defaults__", (0.02,))
    file = tmp_path / "servers"

    def lists(*names: str) -> None:
        (new := tmp_path / "new").write_text(
            "".join(f"{servers.processes[name].address}\n" for name in names)
        )
        os.replace(new, file)

    async def until_at(*names: str) -> None:
        async def are_at() -> bool:
            return set(await places(client)) == set(names)

        await until(are_at)

    lists("a", "b")
    answered, stopping = [], asyncio.Event()

    async def call(number: int) -> None:
        for index in itertools.cycle(range(len(FILES))):  # Each server owns some of them.
            if stopping.is_set():
                return
            image = FILES[index] if number % 3 else handles[index]
            if number % 2:
                result = await streamed(client, image, "?", temperature=0.0, max_tokens=12)
            else:
                result = await client.query(image, "?", **GREEDY)
            answered.append(result.model)

    async with servers.client(kind, target=f"directory:{file}") as client:
        handles = [ImageHandle((await client.put_image(each)).image_id) for each in FILES]
        callers = [asyncio.create_task(call(number)) for number in range(4)]
        try:
            await until_at("a", "b")
            await until(lambda: {"a", "b"} <= set(answered))
            # A stream that has begun goes on, also if its server is listed no longer.
            before = await places(client)
            image = FILES[before.index("a")]
            long = asyncio.create_task(streamed(client, image, "?", temperature=0, max_tokens=200))
            lists("a", "b", "c")
            await until_at("a", "b", "c")
            # A server that joins takes over some images, and moves no others.
            after = await places(client)
            assert all(old == new for old, new in zip(before, after, strict=True) if new != "c")
            lists("b", "c")
            servers.processes["a"].popen.send_signal(signal.SIGTERM)
            await until_at("b", "c")
            assert (await long).usage.output_tokens == 200
            # The other order: a server is killed before the directory knows.
            servers.kill("b")
            await until_at("c")
            lists("c")
            count = len(answered)
            await until(lambda: len(answered) >= count + 20)
            # A list without a server changes nothing.
            file.write_text("")
            await until(lambda: "names no server" in caplog.text)
            assert set(await places(client)) == {"c"}
        finally:
            stopping.set()
            ended = await asyncio.gather(*callers, return_exceptions=True)
            for name in ("a", "b"):
                servers.processes[name].popen.wait(60)
                servers.restart(name)
    failures = [each for each in ended if each is not None]
    # Of a server that is killed, only a stream that has begun may end early.
    assert [each for each in failures if type(each).__name__ != "ConnectionLostError"] == []
    assert set(answered) == {"a", "b", "c"}
