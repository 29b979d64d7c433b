"""Streams of frames in the SDK and on the command line."""

import asyncio
import io
import itertools
import json
from collections.abc import AsyncIterator, Iterator

import grpc
import numpy as np
import pytest

from kestrel_client import (
    AsyncKestrelClient,
    DetectTask,
    InvalidArgumentError,
    InvalidRequestError,
    KestrelClient,
    KestrelError,
    QueryTask,
    UnavailableError,
)
from kestrel_client.commands.parser import CommandError
from kestrel_client.commands.requests.watch import jpegs
from tests.engine.fakes import never_ends
from tests.fake_runtime import FakeRuntime
from tests.service.conftest import LIMITS, HeldRuntime
from tests.service.services.answers.test_frames import until

CATS = DetectTask("cat", max_objects=1)
WHAT = QueryTask("what?", max_tokens=2)


def picture(number: int, side: int = 40) -> np.ndarray:
    return np.full((side, side, 3), number, np.uint8)


async def test_frames_of_the_asynchronous_client(serve):
    served = await serve()

    async def camera() -> AsyncIterator[np.ndarray]:
        for number in (1, 2):
            yield picture(number)

    async with AsyncKestrelClient(served.server.addresses[0]) as client:
        async with client.frames({"cats": CATS, "what": WHAT}, camera()) as stream:
            found = [frame async for frame in stream]
        assert sorted(frame.frame_id for frame in found) == [1, 2]
        for frame in found:
            assert frame[CATS].objects == frame["cats"].objects
            assert frame[WHAT].question == "what?" and frame.analysis.image_size.width == 40
            assert (frame.num_crops, frame.encoded_crops, frame.overview_only) == (1, 1, False)
            assert frame.dropped is None and frame.error is None
            assert frame.source[0, 0, 0] == frame.frame_id
        mixed = [frame async for frame in client.frames([CATS], [picture(3), b"no image"])]
        failed = next(frame for frame in mixed if frame.error is not None)
        assert isinstance(failed.error, InvalidArgumentError) and failed.frame_id == 2
        with pytest.raises(InvalidArgumentError):
            failed[CATS]
        with pytest.raises(InvalidRequestError):
            client.frames([], [], late="sometimes")
        with pytest.raises(InvalidArgumentError, match=r"config\.tasks"):
            [frame async for frame in client.frames([], [picture(1)])]
        with pytest.raises(InvalidRequestError):  # An error of the source ends the stream.
            [frame async for frame in client.frames([CATS], [picture(4), 17])]


async def test_frames_of_the_synchronous_client(serve):
    served = await serve()
    address = served.server.addresses[0]

    def watch() -> list[int]:
        with KestrelClient(address) as client:
            with client.frames([CATS], map(picture, (1, 2, 3))) as stream:
                found = [frame.frame_id for frame in stream if frame[0].objects is not None]
            endless = client.frames([CATS], itertools.repeat(picture(9)))
            with endless as stream:
                next(stream)
            with pytest.raises(InvalidRequestError):
                list(client.frames([CATS], [picture(4), 17]))
            return found

    assert sorted(await asyncio.to_thread(watch)) == [1, 2, 3]
    await until(lambda: served.engine.num_requests == 0)


async def test_dropped_frames(serve):
    served = await serve(HeldRuntime())
    async with AsyncKestrelClient(served.server.addresses[0]) as client:
        frames = [picture(number) for number in range(6)]
        stream = client.frames([CATS], frames, latency_budget_ms=60_000, max_in_flight=1)
        found = {}
        async for frame in stream:
            found[frame.frame_id] = frame
            served.runtime.gate.set()
    assert found[1].dropped is None and found[6].dropped is None
    dropped = [frame for frame in found.values() if frame.dropped]
    assert dropped and {frame.dropped for frame in dropped} == {"newer_frame"}
    with pytest.raises(KestrelError, match="was dropped"):
        dropped[0][CATS]


async def test_another_stream_continues_after_a_lost_connection(serve):
    """Ids go on, and the frame that was under way is lost."""
    served = await serve(FakeRuntime(LIMITS, never_ends, cost=lambda plan: 0.02))
    address = served.server.addresses[0]
    queue: asyncio.Queue[np.ndarray | None] = asyncio.Queue()

    async def camera() -> AsyncIterator[np.ndarray]:
        while (image := await queue.get()) is not None:
            yield image

    async with AsyncKestrelClient(address) as client:
        async with client.frames([WHAT], camera()) as stream:
            queue.put_nowait(picture(1))
            assert (await anext(stream)).frame_id == 1
            queue.put_nowait(picture(2))
            await until(lambda: served.engine.num_requests == 1)
            stream._call.cancel()
            stream._failed(_unavailable())
            stream._call, stream._connection = None, stream._connection + 1
            lost = await anext(stream)
            assert (lost.frame_id, lost.dropped) == (2, "lost")
            for number in (3, 4):
                queue.put_nowait(picture(number))
            queue.put_nowait(None)
            left = [frame async for frame in stream]
            assert left and all(frame.analysis is not None for frame in left)
            assert left[-1].frame_id > 2


@pytest.mark.slow
async def test_a_server_that_does_not_come_back(serve, monkeypatch):
    from kestrel_client.calls import frames

    monkeypatch.setattr(frames, "_FIRST_PAUSE_S", 0.001)
    served = await serve()
    address = served.server.addresses[0]
    await served.server.stop(grace_s=0)
    async with AsyncKestrelClient(address) as client:
        stream = client.frames([CATS], [picture(1)])
        with pytest.raises(UnavailableError):
            await anext(stream)
        assert stream._failures == frames._MOST_ATTEMPTS + 1
        stream = client.frames([CATS], [picture(1)], reconnect=False)
        with pytest.raises(UnavailableError):
            await anext(stream)
        assert stream._failures == 1


def _unavailable():
    import grpc

    return grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "lost"
    )


def test_jpegs_on_standard_input():
    first, second = b"\xff\xd8one\xff\xd9", b"\xff\xd8two\xff\xd9"
    assert list(jpegs(_stream(first + second))) == [first, second]
    for data in (b"GIF89a", first + b"x", first + b"\xff\xd8cut"):
        with pytest.raises(CommandError, match="standard input"):
            list(jpegs(_stream(data)))


def _stream(data: bytes) -> io.BufferedReader:
    class Slow(io.RawIOBase):
        """Gives few bytes at a time."""

        def __init__(self) -> None:
            self._left: Iterator[bytes] = iter([data[i : i + 3] for i in range(0, len(data), 3)])

        def readable(self) -> bool:
            return True

        def readinto(self, buffer) -> int:
            part = next(self._left, b"")
            buffer[: len(part)] = part
            return len(part)

    return io.BufferedReader(Slow())


async def test_watch(serve, tmp_path, capsys, monkeypatch):
    import pyvips

    from kestrel_grpc.cli.program import main

    served = await serve()
    for number in (1, 2):
        image = pyvips.Image.black(40, 40, bands=3) + number
        image.cast("uchar").copy(interpretation="srgb").pngsave(str(tmp_path / f"{number}.png"))
    address = served.server.addresses[0]
    words = ["watch", str(tmp_path), "--detect", "cat", "--fps", "100", "--server", address]
    assert await asyncio.to_thread(main, words) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(line["frame"] for line in lines) == [1, 2]
    assert all("objects" in line["tasks"]["0"] and line["num_crops"] == 1 for line in lines)


async def test_a_status_that_grpc_drops_is_asked_for_again(serve):
    """Where a frame cannot be sent any more, because the server has just refused the stream."""
    served = await serve()

    class Broken:
        async def read(self):
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.INTERNAL,
                grpc.aio.Metadata(),
                grpc.aio.Metadata(),
                details="Internal error from Core",
            )

    async def open_broken(*_, **__):
        return Broken()

    async with AsyncKestrelClient(served.server.addresses[0]) as client:
        stream = client.frames([], [picture(1)])
        # gRPC itself may drop the status, too.
        streams = iter([open_broken, *3 * [stream._open_stream]])
        stream._open_stream = lambda *messages, **handling: next(streams)(*messages, **handling)
        with pytest.raises(InvalidArgumentError, match=r"config\.tasks"):
            [frame async for frame in stream]
    assert len([*streams]) < 3, "another attempt was made"
