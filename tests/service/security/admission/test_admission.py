"""The checks before a message is decoded: size, calls in progress, memory, rate; and the server's own deadline."""

import asyncio
import secrets

import grpc
import pytest

from kestrel_client import AsyncKestrelClient, OverloadedError
from kestrel_client._pb.kestrel.v1 import common_pb2, image_service_pb2, model_service_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_grpc.security.admission import refusal_pace
from kestrel_grpc.security.admission.admission import Admission, RateExceeded, TooManyCalls
from kestrel_grpc.security.identity.principal import Scope
from kestrel_grpc.security.identity.tokens import line_of, new_token
from kestrel_grpc.settings.security import CallLimits, SecurityConfig
from kestrel_grpc.settings.server import MIB
from tests.service.conftest import LIMITS, NO_END, EndlessRuntime
from tests.service.statuses import failure
from tests.waiting import until


def query(text="what?", max_tokens=2):
    return pb.QueryRequest(
        query=pb.QueryTask(
            question=text, max_tokens=max_tokens, sampling=common_pb2.Sampling(temperature=0)
        )
    )


def large(max_tokens=2, width=25):
    """A request with an image of 60 bytes a column, no other like it."""
    request = query(max_tokens=max_tokens)
    data = secrets.token_bytes(60 * width)
    request.images.add().raw.CopyFrom(common_pb2.RawImage(data=data, width=width, height=20))
    return request


def limited(**limits):
    return {"security": SecurityConfig(calls=CallLimits(**limits))}


def test_a_bucket_fills_at_its_rate_up_to_its_burst(still_clock):
    admission = Admission(CallLimits(rate=2, burst=3))

    def calls():
        for count in range(10):
            try:
                with admission.admit("a"):
                    pass
            except RateExceeded as error:
                return count, error.retry_after_s
        raise AssertionError("there is no limit")

    assert calls() == (3, 0.5)
    still_clock.advance(0.25)
    assert calls() == (0, 0.25)
    still_clock.advance(0.25)
    assert calls() == (1, 0.5)
    still_clock.advance(1000)
    assert calls() == (3, 0.5)
    with admission.admit("b"):
        pass
    assert admission.limited == 4


def test_calls_are_counted_for_each_principal():
    admission = Admission(CallLimits(calls=2))
    with admission.admit("a"), admission.admit("a"):
        with pytest.raises(TooManyCalls, match="a: 2 calls are in progress; the limit is 2"):
            with admission.admit("a"):
                pass
        with admission.admit("b"):
            assert admission.calls == 3
    with pytest.raises(ZeroDivisionError), admission.admit("a"):
        raise ZeroDivisionError
    assert (admission.calls, admission.limited) == (0, 1)


def test_principals_that_came_once_are_forgotten(monkeypatch):
    monkeypatch.setattr("kestrel_grpc.security.admission.admission._MAX_REMEMBERED", 5)
    admission = Admission(CallLimits(rate=1, burst=1))
    with admission.admit("busy"):
        for number in range(100):
            with admission.admit(f"p{number}"):
                pass
        assert len(admission.accounts) <= 6
        with pytest.raises(RateExceeded), admission.admit("busy"):
            pass


async def test_a_full_bucket_says_when_to_come_back(serve):
    served = await serve(server_config=limited(rate=0.01, burst=1))
    await served.vision.Query(query())
    told = await failure(served.vision.Query(query()))
    assert (told.code, told.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "RATE_EXCEEDED")
    assert 0 < told.retry_after_s <= 100
    assert 0 < int(told.trailers["grpc-retry-pushback-ms"]) <= 100_000


async def test_a_caller_that_is_refused_again_and_again_is_refused_later(
    serve, moved_clock, monkeypatch
):
    monkeypatch.setattr(refusal_pace, "AT_ONCE", 2)
    monkeypatch.setattr(refusal_pace, "RATE", 1 / 60)
    monkeypatch.setattr(refusal_pace, "LONGEST_S", 60.0)
    served = await serve(EndlessRuntime(), server_config=limited(calls=1))
    guard = served.server.guard
    running = asyncio.ensure_future(served.vision.Query(query(max_tokens=NO_END)))
    await until(lambda: guard.admission.calls)

    async def refused(**options):
        told = await failure(served.vision.Query(large(), **options))
        assert told.reason == "TOO_MANY_CALLS" and told.retry_after_s == 1

    calls = [asyncio.ensure_future(refused()) for _ in range(12)]
    await until(lambda: guard.refusals.num_delayed == 9)  # The first three are not.
    assert guard.admission.calls == 1, "they count no more"
    moved_clock.advance(61)
    await asyncio.gather(*calls)
    assert guard.refusals.num_delayed == 0
    calls = [asyncio.ensure_future(refused(timeout=60)) for _ in range(3)]
    await until(lambda: guard.refusals.num_delayed == 2)  # The first is not.
    moved_clock.advance(31)  # Half of the time that they have.
    await asyncio.gather(*calls)
    left = [asyncio.ensure_future(refused()) for _ in range(3)]
    await until(lambda: guard.refusals.num_delayed == 3)
    for call in left:
        call.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    await until(lambda: not guard.refusals.num_delayed)
    running.cancel()


async def test_the_sdk_comes_back_when_told(serve):
    served = await serve(server_config=limited(rate=10, burst=1))
    async with AsyncKestrelClient(served.server.addresses[0], timeout=60) as client:

        async def asked():
            await asyncio.gather(*(client.query(None, "?", max_tokens=2) for _ in range(4)))
            return served.server.guard.admission.limited >= 3

        await until(asked)


async def test_calls_in_progress_are_bounded(serve):
    served = await serve(EndlessRuntime(), server_config=limited(calls=2))
    running = [
        asyncio.ensure_future(served.vision.Query(query(max_tokens=NO_END))) for _ in range(2)
    ]
    await until(lambda: served.server.guard.admission.calls >= 2)
    told = await failure(served.vision.Query(query()))
    assert (told.code, told.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS")
    assert told.retry_after_s == 1
    for call in running:
        call.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await until(lambda: not served.server.guard.admission.calls)
    assert (await served.vision.Query(query())).usage.output_tokens == 2


async def test_messages_in_memory_are_bounded(serve, monkeypatch):
    """A call waits for room before its message is read, and then is told to come back."""
    monkeypatch.setattr("kestrel_grpc.security.admission.guard._ROOM_WAIT_S", 0.3)
    served = await serve(
        EndlessRuntime(), server_config={**limited(held_bytes=10_000), "max_message_bytes": 4000}
    )
    running = asyncio.ensure_future(served.vision.Query(large(NO_END)))
    await until(lambda: served.engine.num_requests >= 1)
    assert 3000 < served.server.guard.held_bytes < 3200
    told = await failure(served.vision.Query(query("a" * 40)))
    assert (told.code, told.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGES_FULL")
    assert told.retry_after_s == 1
    assert served.server.guard.limited == 1
    running.cancel()
    await until(lambda: not served.server.guard.held_bytes)
    assert (await served.vision.Query(query())).usage.output_tokens == 2


async def test_a_call_waits_for_room_and_gets_it(serve):
    served = await serve(
        EndlessRuntime(), server_config={**limited(held_bytes=10_000), "max_message_bytes": 4000}
    )
    calls = [served.vision.Query(large(20)) for _ in range(5)]
    for call in calls:
        assert (await call).usage.output_tokens == 20
    assert (served.server.guard.held_bytes, served.server.guard.limited) == (0, 0)


async def test_too_large_is_told_apart_and_not_tried_again(serve):
    served = await serve(server_config={"max_message_bytes": MIB})
    size = MIB + MIB // 8
    for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
        too_large = query(secrets.token_hex(size // 2))
        told = await failure(served.vision.Query(too_large, compression=compression))
        assert (told.code, told.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")
        assert told.retry_after_s is None
        assert told.trailers["grpc-retry-pushback-ms"] == "-1"
    refused = served.server.guard.limited
    address = served.server.addresses[0]
    async with AsyncKestrelClient(address, timeout=60) as client:
        with pytest.raises(OverloadedError, match="the limit is 1048576"):
            await client.query(None, "a" * size)
    assert served.server.guard.limited == refused == 0


async def test_far_too_large_is_refused_by_grpc(serve):
    served = await serve(server_config={"max_message_bytes": MIB})
    told = await failure(served.vision.Query(query("a" * (2 * MIB))))
    assert told.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in told.message


@pytest.mark.parametrize("size", [16 * MIB, pytest.param(200 * MIB, marks=pytest.mark.slow)])
async def test_a_message_that_grows_beyond_bounds_is_not_unpacked(serve, size):
    """A thousandth of it travels."""
    served = await serve(server_config={"max_message_bytes": 8 * MIB})
    bomb = query("a" * size)
    told = await failure(served.vision.Query(bomb, compression=grpc.Compression.Gzip))
    assert (told.code, told.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert "send it without compression" in told.message


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
@pytest.mark.parametrize("width", [1, 300])
async def test_compressed_requests_are_taken(serve, compression, width):
    """Small ones are unpacked at once, larger ones in a thread."""
    served = await serve()
    answer = await served.vision.Query(large(width=width), compression=compression)
    assert answer.usage.output_tokens == 2
    request = large(width=width)
    stream = served.vision.StreamQuery(request, compression=compression)
    assert [event async for event in stream][-1].final.usage.output_tokens == 2


async def test_a_piece_of_an_upload_is_bounded_too(serve):
    served = await serve(server_config={"max_message_bytes": MIB})
    parts = [
        image_service_pb2.UploadImageRequest(info=image_service_pb2.UploadInfo()),
        image_service_pb2.UploadImageRequest(chunk=bytes(MIB + MIB // 8)),
    ]
    told = await served.refusal("ImageService/UploadImage", parts)
    assert told.reason == "MESSAGE_TOO_LARGE"


async def test_a_call_without_its_message_is_told_so(serve):
    served = await serve()
    call = served.channel.stream_unary("/kestrel.v1.VisionService/Query")
    told = await failure(call(iter(())))
    assert (told.code, told.reason) == (grpc.StatusCode.UNIMPLEMENTED, "NO_MESSAGE")


async def test_of_two_messages_the_first_counts(serve):
    """As plain grpc.aio has it: what comes after the one message of a method is never read."""
    served = await serve()
    [answer] = await served.send("VisionService/Query", [query(max_tokens=2), query(max_tokens=5)])
    assert pb.QueryResponse.FromString(answer).usage.output_tokens == 2


async def test_a_message_without_fields_is_not_read(serve):
    served = await serve()
    load = served.channel.unary_unary("/kestrel.v1.ModelService/GetLoad")
    assert model_service_pb2.GetLoadResponse.FromString(await load(b"\xff" * 1000)).ready


@pytest.mark.parametrize("timeout", [None, 60])
async def test_no_call_takes_longer_than_the_server_lets_it(serve, timeout):
    served = await serve(EndlessRuntime(), server_config=limited(deadline_s=0.3))
    told = await failure(served.vision.Query(query(max_tokens=NO_END), timeout=timeout))
    assert (told.code, told.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
    stream = query(max_tokens=NO_END)
    told = await failure(served.vision.StreamQuery(stream, timeout=timeout))
    assert "0.3 s" in told.message
    await until(lambda: not served.engine.num_requests)


async def test_a_full_queue_refuses_before_a_message_is_decoded(serve, tmp_path):
    """A caller that may ask for the best priority is refused once its message tells that it did not."""
    path, token = tmp_path / "tokens", new_token()
    path.write_text(line_of("a", [Scope.INFER], token))
    config = {"security": SecurityConfig(auth_tokens=str(path))}
    served = await serve(EndlessRuntime(), max_queue=1, server_config=config)
    caller = (("authorization", f"Bearer {token}"),)
    held = [
        asyncio.ensure_future(served.vision.Query(query(max_tokens=NO_END), metadata=caller))
        for _ in range(1 + LIMITS.max_batch_size)
    ]
    await until(lambda: served.engine.num_requests >= len(held))
    garbage = served.channel.unary_unary("/kestrel.v1.VisionService/Query")
    told = await failure(garbage(b"\xff" * 1000, metadata=caller))
    assert (told.code, told.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert told.retry_after_s == 1
    assert served.server.guard.admission.calls == len(held)
    for call in held:
        call.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    await until(lambda: not served.engine.num_requests)
    told = await failure(garbage(b"\xff" * 1000, metadata=caller))
    assert told.code is grpc.StatusCode.INVALID_ARGUMENT
