"""StreamFrames: one response for each frame, late frames, failures of frames and of streams, and their limits."""

import asyncio
import contextlib
import logging
from typing import Any

import grpc
import numpy as np
import pytest

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_grpc.security.identity.principal import ANONYMOUS
from kestrel_grpc.services.answers import frames
from kestrel_grpc.settings.security import CallLimits, SecurityConfig
from tests.engine.fakes import never_ends
from tests.fake_runtime import FakeRuntime
from tests.service.conftest import LIMITS, HeldRuntime, Serve, raw_image
from tests.service.statuses import failure, of_message, read
from tests.waiting import until

TASKS = [
    pb.Task(key="what", query=pb.QueryTask(question="what?", max_tokens=2)),
    pb.Task(key="cats", detect=pb.DetectTask(objects=["cat"], max_objects=1)),
]
CONFIG = pb.FramesConfig(tasks=TASKS)
ACCESS_LOG = "kestrel_grpc.access"


def frame(number: int, *, side: int = 40, **fields: Any) -> pb.StreamFramesRequest:
    """A frame that differs from all others."""
    image = fields.pop("image", None) or raw_image(side, side)
    if image.HasField("raw"):
        image.raw.data = bytes([number % 256]) * len(image.raw.data)
    return pb.StreamFramesRequest(frame=pb.Frame(frame_id=number, image=image, **fields))


def opening(config: pb.FramesConfig = CONFIG, **changes: Any) -> pb.StreamFramesRequest:
    changed = pb.FramesConfig()
    changed.CopyFrom(config)
    changed.MergeFrom(pb.FramesConfig(**changes))
    return pb.StreamFramesRequest(config=changed)


def slow(step_s: float = 0.05) -> FakeRuntime:
    return FakeRuntime(LIMITS, never_ends, cost=lambda plan: step_s)


def limits(**limits: Any) -> dict[str, Any]:
    return {"security": SecurityConfig(calls=CallLimits(**limits))}


def outcomes(responses: list[pb.StreamFramesResponse]) -> dict[int, str]:
    return {each.frame_id: each.WhichOneof("outcome") or "" for each in responses}


async def all_of(call: Any) -> list[pb.StreamFramesResponse]:
    return [response async for response in call]


async def test_every_frame_has_one_response(serve: Serve, caplog):
    """A frame that fails is one of them. Without a budget no frame is dropped."""
    served = await serve(server_config={"access_log": "text"})
    broken = common_pb2.Image(encoded=b"no image")
    sent = [
        opening(),
        frame(1, capture_time={"seconds": 5}),
        frame(2, image=broken),
        frame(7, side=900),
    ]
    with caplog.at_level(logging.INFO, ACCESS_LOG):
        responses = await all_of(served.vision.StreamFrames(sent))
    assert outcomes(responses) == {1: "results", 2: "error", 7: "results"}
    by_id = {each.frame_id: each for each in responses}
    first, failed, large = by_id[1], by_id[2], by_id[7]
    assert [result.key for result in first.results.results] == ["what", "cats"]
    alone = await served.vision.Query(
        pb.QueryRequest(
            images=[frame(1).frame.image], query=pb.QueryTask(question="what?", max_tokens=2)
        )
    )
    assert first.results.results[0].query.answers[0].text == alone.answers[0].text
    (seen,) = first.results.info.images
    assert seen == common_pb2.SeenImage(size=common_pb2.ImageSize(width=40, height=40), num_crops=1)
    assert first.capture_time.seconds == 5 and not failed.HasField("capture_time")
    assert (first.work.crops, first.work.encoded_crops, first.work.reused_crops) == (1, 1, 0)
    assert large.work.crops == large.work.encoded_crops > 4 and not large.work.overview_only
    assert 0 <= first.work.waited_ms <= first.work.total_ms
    assert failed.error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert of_message(failed.error).fields == ["frame.image"]
    assert len({each.request_id for each in responses}) == 3
    lines = [r.getMessage() for r in caplog.records if "StreamFrames" in r.getMessage()]
    assert sorted(line.partition("frame=")[2].split()[0] for line in lines) == [
        *("answered", "answered", "failed")
    ]
    assert served.server.guard.held_bytes == 0 and served.engine.num_requests == 0


async def test_frames_share_crops(serve: Serve):
    """The response says how many crops the tower did not encode."""
    served = await serve(crop_cache_bytes=1 << 24)
    first = frame(1, side=900)
    pixels = np.frombuffer(first.frame.image.raw.data, np.uint8).reshape(900, 900, 3).copy()
    pixels[:60, :60] = 255
    sent = [opening(max_in_flight=1), first]
    for number in (2, 3):
        sent.append(frame(number, side=900))
        sent[-1].frame.image.raw.data = pixels.tobytes()
    works = [each.work for each in await all_of(served.vision.StreamFrames(sent))]
    assert works[0].crops == works[1].crops == works[2].crops > 4
    assert (works[1].encoded_crops, works[1].reused_crops) == (2, works[1].crops - 2)
    assert (works[2].encoded_crops, works[2].reused_crops) == (0, 0)


FIXED = [
    pb.Task(key="what", query=pb.QueryTask(question="what?", max_tokens=2, sampling={"seed": 3})),
    pb.Task(key="cats", detect=pb.DetectTask(objects=["cat"], max_objects=1)),
]


async def repeated(served: Any, tasks: list[pb.Task], **changes: Any) -> list[Any]:
    """The responses of a frame, of the same again, of another one, and of the first one again."""
    config = pb.FramesConfig(tasks=tasks, max_in_flight=1, **changes)
    sent = [opening(config), frame(1), frame(2), frame(3), frame(4)]
    for each in (sent[2], sent[4]):
        each.frame.image.CopyFrom(sent[1].frame.image)
    return await all_of(served.vision.StreamFrames(sent))


async def test_a_frame_that_equals_the_last_one_has_its_results(serve: Serve, caplog):
    served = await serve(server_config={"access_log": "text"})
    with caplog.at_level(logging.INFO, ACCESS_LOG):
        first, same, other, again = await repeated(served, FIXED)
    assert [each.work.repeated for each in (first, same, other, again)] == [
        False,
        True,
        False,
        False,
    ]
    assert same.work.crops == 1 and same.work.encoded_crops == same.work.reused_crops == 0
    for one, two in zip(first.results.results, same.results.results, strict=True):
        kind = one.WhichOneof("outcome")
        had, has = getattr(one, kind), getattr(two, kind)
        assert (had.info.request_id, has.info.request_id) == (first.request_id, same.request_id)
        assert not has.usage.ByteSize() and not has.timings.ByteSize() and had.usage.ByteSize()
        for each in (had, has):
            each.info.request_id = ""
            each.ClearField("usage")
            each.ClearField("timings")
        assert had == has
    assert not same.results.usage.ByteSize() and same.results.info.model == first.results.info.model
    assert again.results.results[1].detect.detections == first.results.results[1].detect.detections
    lines = [r.getMessage() for r in caplog.records if "StreamFrames" in r.getMessage()]
    found = [line.partition("frame=")[2].split()[0] for line in lines]
    assert found == ["answered", "repeated", "answered", "answered"]


@pytest.mark.parametrize(
    "tasks",
    [
        TASKS,
        [pb.Task(detect=pb.DetectTask(objects=["cat"], sampling={"temperature": 0.5}))],
        [*FIXED, pb.Task(detect=pb.DetectTask(objects=["x" * 500]))],
    ],
    ids=["sampled by default", "sampled", "an error"],
)
async def test_results_that_may_differ_are_not_repeated(serve: Serve, tasks):
    responses = await repeated(await serve(), tasks)
    assert not any(each.work.repeated for each in responses) and len(responses) == 4


@pytest.mark.parametrize(("tasks", "num_repeated"), [(FIXED, 3), (TASKS, 0)])
async def test_a_frame_that_equals_one_that_is_computed_waits_for_it(
    serve: Serve, monkeypatch, tasks, num_repeated
):
    """Unless a task samples."""
    served, kept = await serve(HeldRuntime()), []

    class Noted(frames.LastFrames):
        def __init__(self, *given):
            super().__init__(*given)
            kept.append(self)

    def waiting():
        """The frames that wait for an equal one."""
        return sum(len(done._waiters) for done in kept[0]._computing.values()) if kept else 0

    monkeypatch.setattr(frames, "LastFrames", Noted)
    sent = [opening(pb.FramesConfig(tasks=tasks, max_in_flight=4)), frame(1)]
    for number in (2, 3, 4):
        sent.append(frame(number))
        sent[-1].frame.image.CopyFrom(sent[1].frame.image)
    answering = asyncio.create_task(all_of(served.vision.StreamFrames(sent)))
    computed = len(tasks) * (4 - num_repeated)
    await until(lambda: (waiting(), served.engine.num_requests) == (num_repeated, computed))
    served.runtime.gate.set()
    responses = await answering
    assert len(responses) == 4
    assert sum(each.work.repeated for each in responses) == num_repeated


async def test_a_frame_does_not_wait_for_results_of_one_that_fails(serve: Serve):
    served = await serve(slow(0.01))
    tasks = [*FIXED, pb.Task(detect=pb.DetectTask(objects=["x" * 500]))]
    sent = [opening(pb.FramesConfig(tasks=tasks, max_in_flight=3)), frame(1)]
    for number in (2, 3):
        sent.append(frame(number))
        sent[-1].frame.image.CopyFrom(sent[1].frame.image)
    responses = await all_of(served.vision.StreamFrames(sent))
    assert [each.work.repeated for each in responses] == [False] * 3
    assert all(each.results.results[-1].HasField("error") for each in responses)


async def test_the_next_frame_arrives_while_one_is_computed(serve: Serve, monkeypatch):
    """It is no call yet, so it neither counts for limits nor overtakes."""
    served = await serve(HeldRuntime())
    taken: list[int] = []
    take = frames.FrameStream.take

    def noted(stream: Any, message: Any, principal: Any) -> bool:
        taken.append(message.frame.frame_id)
        return take(stream, message, principal)

    monkeypatch.setattr(frames.FrameStream, "take", noted)
    call = served.vision.StreamFrames()
    await call.write(opening(max_in_flight=1))
    for number in (1, 2, 3):
        await call.write(frame(number))
    await until(lambda: 2 in taken)
    assert taken == [0, 1, 2]
    assert served.server.in_flight.count == 1 and served.engine.num_requests <= 2
    served.runtime.gate.set()
    assert [(await call.read()).frame_id for _ in range(3)] == [1, 2, 3]
    call.cancel()


async def test_equal_pixels_in_another_region_are_no_repetition(serve: Serve):
    served = await serve()
    sent = [opening(pb.FramesConfig(tasks=FIXED[1:], max_in_flight=1)), frame(1), frame(2)]
    sent[2].frame.image.CopyFrom(sent[1].frame.image)
    for each, left in zip(sent[1:], (0.0, 0.5), strict=True):
        each.frame.image.region.CopyFrom(common_pb2.Box(x_min=left, x_max=left + 0.5, y_max=1))
    first, second = await all_of(served.vision.StreamFrames(sent))
    assert not second.work.repeated
    assert first.results.results[0].detect.detections != second.results.results[0].detect.detections


async def test_a_newer_frame_takes_the_place_of_one_that_waits(serve: Serve, caplog):
    served = await serve(HeldRuntime(), server_config={"access_log": "text"})
    call = served.vision.StreamFrames()
    await call.write(opening(latency_budget_ms=60_000, max_in_flight=1))
    await call.write(frame(1))
    await until(lambda: served.engine.num_requests == 2)
    with caplog.at_level(logging.INFO, ACCESS_LOG):
        for number in (2, 3, 4):
            await call.write(frame(number))
        await call.done_writing()
        responses = [await call.read(), await call.read()]
        served.runtime.gate.set()
        responses += [await call.read(), await call.read()]
        assert await call.read() is grpc.aio.EOF
    assert outcomes(responses) == {1: "results", 2: "dropped", 3: "dropped", 4: "results"}
    dropped = [each for each in responses if each.HasField("dropped")]
    assert {each.dropped for each in dropped} == {pb.DROP_REASON_NEWER_FRAME}
    assert sum("frame=dropped" in line for line in caplog.text.splitlines()) == 2
    assert [each.frame_id for each in responses] == [2, 3, 1, 4]


async def test_a_stale_frame_is_dropped(serve: Serve):
    served = await serve(HeldRuntime())
    call = served.vision.StreamFrames()
    await call.write(opening(latency_budget_ms=50, max_in_flight=1))
    await call.write(frame(1))
    await until(lambda: served.engine.num_requests == 2)
    await call.write(frame(2))
    first = await call.read()
    served.runtime.gate.set()
    second = await call.read()
    assert (first.frame_id, first.dropped) == (2, pb.DROP_REASON_STALE)
    assert first.work.waited_ms >= 50 and first.work.crops == 0
    assert (second.frame_id, second.WhichOneof("outcome")) == (1, "results")
    call.cancel()


async def test_a_late_frame_is_computed_with_its_overview(serve: Serve, monkeypatch):
    served = await serve()
    late = iter((False, True, True))
    monkeypatch.setattr(frames.FrameStream, "is_late", lambda stream, waited_s: next(late))
    config = opening(latency_budget_ms=60_000, late=pb.LATE_FRAMES_OVERVIEW, max_in_flight=1)
    call = served.vision.StreamFrames()
    await call.write(config)
    works = []
    for number, side in ((1, 900), (2, 900), (3, 20)):
        await call.write(frame(number, side=side))
        works.append((await call.read()).work)
    # The last one has no other crops.
    assert [work.overview_only for work in works] == [False, True, False]
    assert works[0].crops > 4 and [work.crops for work in works[1:]] == [1, 1]
    call.cancel()


def test_after_some_late_frames_one_with_all_crops_is_tried():
    async def tried() -> list[bool]:
        stream = frames.FrameStream()
        stream.take(opening(latency_budget_ms=100, late=pb.LATE_FRAMES_OVERVIEW), ANONYMOUS)
        late = []
        await stream.begin()
        stream.end(0.15, is_whole=True)
        for _ in range(6):
            await stream.begin()
            late.append(stream.is_late(0.0))
            stream.end(0.01, is_whole=False)
        return late

    assert asyncio.run(tried()) == [True, True, True, True, False, False]


FRAMES = "VisionService/StreamFrames"

INVALID: list[tuple[str, list[pb.StreamFramesRequest]]] = [
    ("config: is required in the first message", [frame(1)]),
    ("config: must be in the first message only", [opening(), opening()]),
    ("frame: is required", [opening(), pb.StreamFramesRequest()]),
    ("config.tasks: has 0 tasks", [pb.StreamFramesRequest(config=pb.FramesConfig())]),
    ("config.tasks[0]: holds no task", [opening(pb.FramesConfig(tasks=[pb.Task()]))]),
    ("config.latency_budget_ms: is 0; must be 1 to 60000", [opening(latency_budget_ms=0)]),
    ("config.max_in_flight: is 17; must be 1 to 16", [opening(max_in_flight=17)]),
    ("config.late: needs latency_budget_ms", [opening(late=pb.LATE_FRAMES_OVERVIEW)]),
    ("config.late: 9 is not", [opening(late=9)]),
    ("config.options.request_id: must not be set", [opening(options={"request_id": "mine"})]),
    ("frame.frame_id: must be at least 1", [opening(), frame(0)]),
    ("frame.frame_id: is 4, but must be above 9", [opening(last_frame_id=9), frame(4)]),
    ("frame.frame_id: is 3, but must be above 3", [opening(), frame(3), frame(3)]),
]


async def test_what_ends_a_stream(moved_clock, serve: Serve):
    served = await serve(server_config=limits(read_s=60, deadline_s=None))
    for message, sent in INVALID:
        told = await served.refusal(FRAMES, sent)
        assert told.code is grpc.StatusCode.INVALID_ARGUMENT, message
        assert told.message.startswith(message), told.message
    told = await served.refusal(FRAMES, [opening(options={"model": "x"}), frame(1)])
    assert (told.code, told.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    told = await served.refusal(FRAMES, [b"\x0a\xff\xff"])
    assert (told.code, told.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    silent = served.vision.StreamFrames()
    await silent.write(opening())
    reading = asyncio.ensure_future(silent.read())
    await until(lambda: moved_clock.advance(100) or reading.done())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reading
    assert read(caught.value).reason == "SLOW_SENDER"
    assert await all_of(served.vision.StreamFrames([])) == []
    assert served.server.guard.held_bytes == 0


async def test_huge_frames(serve: Serve):
    served = await serve(server_config={"max_message_bytes": 1 << 20})
    told = await served.refusal(FRAMES, [opening(), frame(1, side=620)])
    assert (told.code, told.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")


async def test_streams_of_one_principal_are_limited(serve: Serve):
    served = await serve(server_config={"max_message_bytes": 1 << 20})
    calls = []
    for number in range(1, frames.MOST_STREAMS + 1):
        call = served.vision.StreamFrames()
        await call.write(opening())
        await call.write(frame(number))
        calls.append(call)
    await asyncio.gather(*(call.read() for call in calls))
    # Without a message: gRPC loses the status if it cannot send one.
    told = await failure(served.vision.StreamFrames())
    assert (told.code, told.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS")
    calls[0].cancel()

    async def another_is_answered():
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError):
            return len(await all_of(served.vision.StreamFrames([opening(), frame(99)]))) == 1

    await until(another_is_answered)
    for call in calls:
        call.cancel()


async def test_a_slow_reader_loses_the_stream(serve: Serve, caplog):
    served = await serve(server_config={**limits(write_s=0.5), "access_log": "text"})
    tasks = [pb.Task(key=f"{n:0128}", detect=pb.DetectTask()) for n in range(32)]
    options = [("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    with caplog.at_level(logging.INFO, ACCESS_LOG):
        async with grpc.aio.insecure_channel(served.server.addresses[0], options) as channel:
            sent = [opening(pb.FramesConfig(tasks=tasks)), *(frame(n) for n in range(1, 200))]
            call = VisionServiceStub(channel).StreamFrames(sent)
            await until(lambda: "reason=SLOW_READER" in caplog.text)
            await until(lambda: served.server.guard.held_bytes == 0)
            await until(lambda: served.server.in_flight.count == 0)
            call.cancel()


async def test_cancelling_a_stream_ends_its_frames(serve: Serve):
    served = await serve(HeldRuntime())
    call = served.vision.StreamFrames([opening(), frame(1), frame(2)])
    await until(lambda: served.engine.num_requests == 4)
    call.cancel()
    served.runtime.gate.set()
    await until(lambda: served.engine.num_requests == 0)
    await until(lambda: served.server.guard.held_bytes == 0)


async def test_a_stopping_server_ends_the_frames_that_run_and_then_the_stream(serve: Serve):
    served = await serve(HeldRuntime())
    call = served.vision.StreamFrames()
    await call.write(opening())
    await call.write(frame(1))
    await until(lambda: served.engine.num_requests == 2)
    await served.server.drain()
    await call.write(frame(2))
    served.runtime.gate.set()
    first = await call.read()
    assert (first.frame_id, first.WhichOneof("outcome")) == (1, "results")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    told = read(caught.value)
    assert (told.code, told.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
