"""A call whose answer is late is sent a second time, and the first answer counts."""

import asyncio

import grpc
import pytest

from kestrel_client import (
    AsyncKestrelClient,
    InvalidRequestError,
    KestrelClient,
    NotFoundError,
    OverloadedError,
)
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import (
    VisionServiceServicer,
    add_VisionServiceServicer_to_server,
)
from kestrel_client.calls.hedging import SHARE
from tests.waiting import outlived, until

Code = grpc.StatusCode


class Late(VisionServiceServicer):
    """Answers calls about "a" only when they come to another server, which it knows by the header."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.cancelled: list[str] = []
        self.fails: dict[str, grpc.StatusCode] = {}

    async def Query(self, request, context):
        about = dict(context.invocation_metadata()).get("x-kestrel-image", "")
        self.begun.append(about)
        try:
            if about in self.fails:
                if not about.endswith("+"):  # A call that may be hedged fails after its hedge.
                    most = 1 + int(SHARE * (self.begun.count(about) - 1))
                    await until(lambda: self.begun.count(f"{about}+") >= most)
                await context.abort(self.fails[about], about)
            if about == "a":
                await asyncio.Event().wait()
            return pb.QueryResponse(answers=[pb.Answer(text=about)])
        except asyncio.CancelledError:
            self.cancelled.append(about)
            raise


@pytest.fixture
async def late():
    server, servicer = grpc.aio.server(), Late()
    add_VisionServiceServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield servicer
    await server.stop(None)


@pytest.fixture(params=["async", "sync"])
async def ask(request, late):
    """Asks about "a" with either client, which hedges after 0.05 s, or after ``after_s``."""
    if request.param == "async":
        async with AsyncKestrelClient(late.address, hedge_after=0.05, timeout=60) as client:

            async def query(session="a", after_s=0.05):
                client._channel._hedges.after_s = after_s
                return await client.query(None, "?", session=session)

            yield query
    else:
        with KestrelClient(late.address, hedge_after=0.05, timeout=60) as client:

            async def query(session="a", after_s=0.05):
                client._channel._hedges.after_s = after_s
                return await asyncio.to_thread(client.query, None, "?", session=session)

            yield query


async def test_the_first_answer_counts_and_the_other_call_is_cancelled(late, ask):
    assert (await ask()).answer == "a+"
    assert late.begun == ["a", "a+"]
    await until(lambda: late.cancelled == ["a"])


async def test_an_early_answer_is_not_asked_for_twice(late, ask):
    for _ in range(5):
        assert (await ask("quick", after_s=600)).answer == "quick"
    assert late.begun == ["quick"] * 5


async def test_an_error_waits_for_the_other_call(late, ask):
    late.fails["b"] = Code.NOT_FOUND
    assert (await ask("b")).answer == "b+"
    late.begun.clear()
    late.fails["b+"] = Code.RESOURCE_EXHAUSTED
    for _ in range(int(1 / SHARE)):
        await ask("quick", after_s=600)  # Earns the next one.
    with pytest.raises((NotFoundError, OverloadedError)) as told:
        await ask("b")
    assert told.value.code is Code.NOT_FOUND, "the first call's error"


async def test_few_calls_are_sent_twice(late, ask):
    late.fails = {"b": Code.NOT_FOUND, "b+": Code.NOT_FOUND}
    for _ in range(12):
        with pytest.raises(NotFoundError):
            await ask("b")
    assert late.begun.count("b") == 12
    assert late.begun.count("b+") == 2


async def test_it_is_off_by_default_and_streams_are_never_sent_twice(late):
    async def asked(timeout):
        async with AsyncKestrelClient(late.address, timeout=timeout) as client:
            with pytest.raises(TimeoutError):
                await client.query(None, "?", session="a")

    await outlived(asked, lambda _: late.begun)
    assert set(late.begun) == {"a"}
    with pytest.raises(InvalidRequestError, match="hedge_after=0: must be above 0"):
        KestrelClient("127.0.0.1:1", hedge_after=0)


async def test_a_cancelled_caller_cancels_both(late):
    async with AsyncKestrelClient(late.address, hedge_after=0.05, timeout=60) as client:
        late.fails["c+"] = late.fails["c"] = Code.INTERNAL
        task = asyncio.create_task(client.query(None, "?", session="a"))
        await until(lambda: len(late.begun) >= 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: "a" in late.cancelled)
