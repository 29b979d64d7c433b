"""The SDK against three server processes: calls about an image stay on one server, and missing images are sent
again."""

import asyncio
import json
import signal

import pytest

from kestrel_client import ImageHandle, NotFoundError, QueryTask
from kestrel_grpc.cli.program import main
from tests.abuse.processes.three_servers import FILES, GREEDY, Servers, places
from tests.threaded import streamed
from tests.waiting import until

BOTH = pytest.mark.parametrize("kind", ["sync", "async"])


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    running = Servers(tmp_path_factory.mktemp("servers"))
    yield running
    running.close()


@BOTH
@pytest.mark.slow_with("sync")
async def test_calls_about_an_image_stay_on_one_server(servers, kind):
    async with servers.client(kind) as client:
        before = await places(client)
        assert len(set(before)) > 1, "the ports, which differ each time, decide"
        assert await places(client) == before
        for image, name in list(zip(FILES, before, strict=True))[:6]:
            handle = await client.put_image(image)
            by_id = ImageHandle(handle.image_id)
            assert (await client.caption(handle, "short", **GREEDY)).model == name
            assert (await streamed(client, by_id, "?", **GREEDY)).model == name
            result = await client.analyze(by_id, [QueryTask("?", **GREEDY)])
            assert result.model == name and result.image_id == handle.image_id
    # Of another client too: the digest of the image decides.
    async with servers.client(kind) as client:
        assert await places(client) == before
        in_session = await places(client, session="of-one-user")
        assert len(set(in_session)) == 1
        assert await client.query(None, "?", **GREEDY)


@BOTH
@pytest.mark.slow_with("async")
async def test_a_server_that_is_killed_costs_no_call(servers, kind):
    """Its images move to the others, and back. No other image moves."""
    async with servers.client(kind) as client:
        before = await places(client)
        handles = [await client.put_image(each) for each in FILES]
        ids = [ImageHandle(handle.image_id) for handle in handles]
        servers.kill("a")
        try:
            after = [(await client.query(each, "?", **GREEDY)).model for each in ids]
            assert "a" not in after
            moved = [
                n for n, (old, new) in enumerate(zip(before, after, strict=True)) if old != new
            ]
            assert moved == [n for n, name in enumerate(before) if name == "a"]
            by_streams = [(await streamed(client, each, "?", **GREEDY)).model for each in ids]
            assert by_streams == after
            assert await places(client) == after
        finally:
            servers.restart("a")

        async def are_back():
            return await places(client) == before

        await until(are_back)
        # The server that was killed has lost its images, and the clients' ids.
        again = [(await client.query(each, "?", **GREEDY)).model for each in handles]
        assert again == before


@BOTH
@pytest.mark.slow_with("sync")
async def test_a_server_that_is_killed_while_it_answers(servers, kind):
    """gRPC does not repeat a call whose server has sent metadata. The client does."""
    async with servers.client(kind) as client:
        before = await places(client)
        victim = before[0]
        hang = servers.processes[victim].hang
        hang.touch()
        calls = [
            asyncio.create_task(client.query(each, "?", temperature=0, max_tokens=60))
            for each in FILES
        ]
        await until(lambda: servers.is_busy(victim))
        servers.kill(victim)
        hang.unlink()
        try:
            results = [await call for call in calls]
            assert all(result.usage.output_tokens == 60 for result in results)
            pairs = zip(before, results, strict=True)
            assert all(old == new.model for old, new in pairs if old != victim)
        finally:
            servers.restart(victim)


async def test_a_batch_uses_all_servers(servers, tmp_path):
    for number, file in enumerate(FILES):
        (tmp_path / f"{number}.png").write_bytes(file)
    words = ["batch", tmp_path, "--query", "?", "--max-tokens", 2, "--output",
             tmp_path / "results.jsonl", "--quiet", "--server", ",".join(servers.addresses)]  # fmt: skip
    assert await asyncio.to_thread(main, [*map(str, words)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(lines) == len(FILES) and len({line["model"] for line in lines}) > 1
    assert main(["admin", "--server", ",".join(servers.addresses), "statistics"]) == 2


async def test_a_server_that_drains_is_left(servers):
    async with servers.client("async") as client:
        before = await places(client)
        leaving = servers.processes[before[0]]
        leaving.hang.touch()
        calls = [asyncio.create_task(client.query(each, "?", max_tokens=40)) for each in FILES]
        await until(lambda: servers.is_busy(before[0]))
        leaving.popen.send_signal(signal.SIGTERM)
        leaving.hang.unlink()
        try:
            assert all([(await call).usage.output_tokens == 40 for call in calls])
            after = await places(client)
            assert after == await places(client) and before[0] not in after
            pairs = zip(before, after, strict=True)
            assert all(old == new for old, new in pairs if old != before[0])
            leaving.popen.wait(60)
        finally:
            servers.restart(before[0])


@BOTH
@pytest.mark.slow_with("sync")
async def test_an_image_that_no_server_knows(servers, kind, tmp_path):
    unknown = ImageHandle("img_" + 32 * "0")
    (path := tmp_path / "image.png").write_bytes(FILES[0])
    async with servers.client(kind) as client:
        with pytest.raises(NotFoundError, match="send the image again"):
            await client.query(unknown, "?")
        with pytest.raises(NotFoundError):
            await streamed(client, unknown, "?")
        # The handle's own source.
        held = ImageHandle(unknown.image_id, source=path)
        assert (await client.query(held, "?", **GREEDY)).image_size == (32, 24)
        # The id was replaced once and for all.
        assert (await client.query(unknown, "?", **GREEDY)).image_size == (32, 24)
        await client.delete_image(held)
        for deleted in (unknown, held):
            with pytest.raises(NotFoundError):
                await client.query(deleted, "?")
        several = await client.query(
            FILES[1], "?", images=[ImageHandle("img_" + 32 * "1", source=FILES[2])], **GREEDY
        )
        assert len(several.images) == 2


@BOTH
@pytest.mark.slow_with("sync")
async def test_the_caller_is_asked_for_what_the_client_does_not_keep(servers, kind):
    asked = []

    def source(image_id):
        asked.append(image_id)
        return FILES[3] if image_id == known else None

    known = ""
    async with servers.client(kind, kept_image_bytes=0, image_source=source) as client:
        known = (await client.put_image(FILES[3])).image_id
        # On the server of this session, which may be another one, and on all servers once they forget.
        results = [
            await client.query(ImageHandle(known), "?", session=f"s{n}", **GREEDY)
            for n in range(12)
        ]
        assert len({result.model for result in results}) > 1
        assert set(asked) == {known}
        with pytest.raises(NotFoundError):
            await client.query(ImageHandle("img_" + 32 * "2"), "?")
        assert asked[-1] == "img_" + 32 * "2"
