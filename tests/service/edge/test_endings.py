"""However a call ends, the engine's request ends with it: cancellation, deadline, disconnect, a slow reader."""

import asyncio
import logging

import grpc
import pytest

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from tests.fake_runtime import FakeRuntime
from tests.service.conftest import LIMITS, NO_END, EndlessRuntime, raw_image
from tests.service.statuses import failure
from tests.waiting import until

LONG = pb.QueryRequest(
    images=[raw_image()], query=pb.QueryTask(question="what?", max_tokens=NO_END)
)


async def all_freed(served):
    """The engine forgets the requests, and then takes as much as ever: no page is lost."""
    await until(lambda: served.engine.num_requests == 0)
    short = pb.QueryRequest(query=pb.QueryTask(question="?", max_tokens=2))
    full = await asyncio.gather(*(served.vision.Query(short) for _ in range(6)))
    assert all(response.usage.output_tokens == 2 for response in full)


async def fill(served):
    """Takes every place of the batch."""
    running = [
        asyncio.ensure_future(served.vision.Query(LONG)) for _ in range(LIMITS.max_batch_size)
    ]
    await until(lambda: served.engine.stats.running >= len(running))
    return running


async def test_cancelling_a_stream_frees_the_engine(serve, caplog):
    served = await serve(EndlessRuntime())
    call = served.vision.StreamQuery(LONG)
    for _ in range(3):
        await call.read()
    assert served.engine.num_requests == 1
    call.cancel()
    await all_freed(served)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


async def test_cancelling_a_unary_call_frees_the_engine(serve):
    served = await serve(EndlessRuntime())
    call = served.vision.Query(LONG)
    await until(lambda: served.engine.num_requests != 0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await all_freed(served)


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_deadline_frees_the_engine(serve, streaming):
    served = await serve(EndlessRuntime())

    def ask(timeout):
        if streaming:
            return served.vision.StreamQuery(LONG, timeout=timeout)
        return served.vision.Query(LONG, timeout=timeout)

    told = await served.overdue(ask)
    assert told.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await all_freed(served)


async def test_a_request_that_waits_in_the_queue_is_dropped_at_its_deadline(serve):
    served = await serve(EndlessRuntime())
    running = await fill(served)
    late = pb.QueryRequest(images=[raw_image(30, 20)], query=LONG.query)
    told = await failure(served.vision.Query(late, timeout=0.1))
    assert told.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: served.engine.num_requests == len(running))
    keys = {piece.image.key for plan in served.runtime.plans for piece in plan.encode}
    assert len(keys) == 1, "its image was not encoded"
    for call in running:
        call.cancel()
    await all_freed(served)


async def test_a_request_that_waits_too_long_is_refused_with_a_hint(moved_clock, serve):
    served = await serve(EndlessRuntime(), max_queue_wait_s=60)
    running = await fill(served)
    late = asyncio.ensure_future(failure(served.vision.Query(LONG)))
    await until(lambda: served.engine.num_requests > len(running))
    moved_clock.advance(60)
    told = await late
    assert told.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert told.reason == "QUEUE_TIMEOUT"
    assert told.retry_after_s is not None
    for call in running:
        call.cancel()
    await all_freed(served)


async def test_a_client_that_vanishes_frees_the_engine(serve):
    served = await serve(EndlessRuntime())
    async with grpc.aio.insecure_channel(
        served.server.addresses[0], options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        stub = type(served.vision)(channel)
        calls = [stub.StreamQuery(LONG) for _ in range(3)]
        for call in calls:
            await call.read()
        assert served.engine.num_requests == 3
    await all_freed(served)


async def test_a_slow_reader_gets_everything_and_holds_nobody_up(serve):
    served = await serve(FakeRuntime(LIMITS, lambda fed: 197))
    request = pb.QueryRequest()
    request.CopyFrom(LONG)
    request.query.max_tokens = 200
    call = aiter(served.vision.StreamQuery(request))
    first = await anext(call)
    assert first.WhichOneof("event") == "started"
    await until(lambda: served.engine.num_requests == 0)  # The engine does not wait for the reader.
    events = [event async for event in call]
    assert (
        events[-1].final.answers[0].text
        == "".join(e.text_delta.text for e in events[:-1])
        == "a" * 200
    )


async def test_the_request_id_is_echoed_field_before_metadata_before_our_own(serve):
    served = await serve()
    request = pb.QueryRequest(query=pb.QueryTask(question="?", max_tokens=2))

    async def echoed(request, **kwargs):
        call = served.vision.Query(request, **kwargs)
        response = await call
        metadata = dict(await call.initial_metadata())
        assert metadata["x-request-id"] == response.info.request_id
        return response.info.request_id

    assert len(await echoed(request)) == 32
    assert await echoed(request, metadata=(("x-request-id", "from-metadata"),)) == "from-metadata"
    unusable = await echoed(request, metadata=(("x-request-id", "x" * 300),))
    assert len(unusable) == 32
    request.options.request_id = "from-field"
    assert await echoed(request, metadata=(("x-request-id", "from-metadata"),)) == "from-field"
    stream = served.vision.StreamQuery(request)
    events = [event async for event in stream]
    assert events[0].started.request_id == events[-1].final.info.request_id == "from-field"
    assert dict(await stream.initial_metadata())["x-request-id"] == "from-field"


async def test_the_access_log_has_a_line_for_every_call(serve, caplog):
    caplog.set_level(logging.INFO, "kestrel_grpc.access")
    served = await serve(EndlessRuntime(), server_config={"access_log": "text"})
    request = pb.QueryRequest(query=pb.QueryTask(question="?", max_tokens=2))
    request.options.request_id = "good"
    lines = []

    async def logged():
        """Of the call that ended last. It is logged after its caller has its status."""
        await until(lambda: not served.server.in_flight.count)
        lines.append(dict(part.split("=", 1) for part in access_log()[-1].split()))

    def access_log():
        return [r.getMessage() for r in caplog.records if r.name == "kestrel_grpc.access"]

    await served.vision.Query(request)
    await logged()
    await failure(served.vision.Query(pb.QueryRequest(query=pb.QueryTask(question=""))))
    await logged()
    await served.overdue(lambda timeout: served.vision.Query(LONG, timeout=timeout))
    await logged()
    call = served.vision.StreamQuery(LONG)
    await call.read()
    call.cancel()
    await logged()
    good, invalid, late, gone = lines
    assert good["method"] == "kestrel.v1.VisionService/Query"
    assert (good["code"], good["request_id"]) == ("OK", "good")
    assert good["output_tokens"] == "2"
    assert float(good["ms"]) >= float(good["ttft_ms"]) > 0
    assert good["peer"].startswith("ipv4:127.0.0.1:")
    assert [line["code"] for line in (invalid, late, gone)] == [
        "INVALID_ARGUMENT",
        "DEADLINE_EXCEEDED",
        "CANCELLED",
    ]
