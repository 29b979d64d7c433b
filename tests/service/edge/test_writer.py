"""Which writes the server gives up, and whether the client or the server cancelled a call."""

import asyncio
import gc

import grpc
import pytest

from kestrel_grpc.edge.calls.call import Call
from kestrel_grpc.edge.failures.errors import SlowReader
from kestrel_grpc.edge.grpc_method import Writer, write_limit


class Reader:
    """A context whose writes take as long as they say."""

    code = "something else of the context"

    def __init__(self):
        self.written = 0
        self.metadata = []

    async def send_initial_metadata(self, metadata):
        self.metadata.append(metadata)

    async def write(self, seconds):
        await asyncio.sleep(seconds)
        self.written += 1


@pytest.fixture
def reader():
    return Reader()


@pytest.fixture
async def writer(still_clock, reader):
    return Writer(Call("Stream", "ipv4:127.0.0.1:1", reader), write_limit(0.1))


async def test_writes_that_take_long_only_together_are_left_alone(reader, writer):
    for _ in range(8):
        await writer.write(0.03)
    await asyncio.sleep(0.15)
    await writer.write(0.05)
    assert reader.written == 9 and reader.metadata == [()]
    assert writer.code == reader.code


async def test_one_that_takes_longer_is_given_up(still_clock, reader, writer):
    await writer.write(0.07)
    began = still_clock.now()
    with pytest.raises(SlowReader, match=r"did not read the stream for 0\.1 s"):
        await writer.write(5)
    assert still_clock.now() - began == pytest.approx(0.1)
    assert reader.written == 1
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0, "nobody else cancelled us"
    await asyncio.sleep(0)


async def test_the_task_that_writes_is_the_one_to_be_told(writer):
    async def write():
        await writer.write(5)

    await writer.write(0)
    with pytest.raises(SlowReader):
        await asyncio.create_task(write())


async def test_a_cancellation_from_outside_stays_one(writer):
    task = asyncio.create_task(writer.write(5))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_deadline_around_it_stays_one(writer):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.03):
            await writer.write(5)


async def test_a_client_that_goes_before_the_headers_leaves_no_traceback(caplog, reader):
    """The call's task is cancelled while initial metadata is sent, which then fails."""
    gone = asyncio.Event()

    async def send(metadata):
        await gone.wait()
        raise grpc.aio.InternalError("the operation failed")

    reader.send_initial_metadata = send
    call = Call("Query", "ipv4:127.0.0.1:1", reader, request_id="mine")
    task = asyncio.create_task(call.accept())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gone.set()
    await asyncio.sleep(0)
    call.release()
    del task
    gc.collect()
    await asyncio.sleep(0)
    assert not caplog.records
