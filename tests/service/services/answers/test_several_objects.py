"""Detect and Point with several names: as the same calls one by one, the image's prefix read once, names fail alone."""

import asyncio

import grpc
import numpy as np
import pytest

from kestrel_client import (
    AsyncKestrelClient,
    InvalidArgumentError,
    InvalidRequestError,
    TaskDone,
)
from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine.runtime.fake import FakeRuntime
from kestrel_grpc.services.answers.analysis import MAX_TASKS
from tests.service.conftest import LIMITS, raw_image
from tests.service.statuses import failure
from tests.waiting import until

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NAMES = ["cat", "red dot", "house", "größer"]
SKILLS = ["Point", "Detect"]
IMAGE = np.full((40, 60, 3), 200, np.uint8)


def request(skill, **fields):
    return getattr(pb, f"{skill}Request")(image=raw_image(), **{"max_objects": 3} | fields)


def stream(served, skill, wanted):
    return getattr(served.vision, f"Stream{skill}")(wanted)


def places(response):
    return response.points if isinstance(response, pb.PointResponse) else response.objects


@pytest.mark.parametrize("skill", SKILLS)
async def test_each_name_gives_what_it_gives_alone(serve, skill):
    served = await serve()
    method = getattr(served.vision, skill)
    alone = [await method(request(skill, object=name)) for name in NAMES]
    assert len({str(places(response)) for response in alone}) > 1
    together = await method(request(skill, objects=NAMES))
    assert [result.key for result in together.results] == ["0", "1", "2", "3"]
    results = [getattr(result, skill.lower()) for result in together.results]
    assert [list(places(r)) for r in results] == [list(places(r)) for r in alone]
    assert [r.finish_reason for r in results] == [r.finish_reason for r in alone]
    assert not places(together) and not together.seed
    assert together.usage.output_tokens == sum(r.usage.output_tokens for r in alone)
    assert together.usage.input_tokens == sum(r.usage.input_tokens for r in alone)
    assert together.finish_reason == max(r.finish_reason for r in alone)
    assert together.image_size == alone[0].image_size and together.model == "fake"
    assert together.image_id and together.request_id
    assert together.timings.total_time_ms >= together.timings.ttft_ms > 0


async def test_spatial_references_are_for_every_name(serve):
    served = await serve()
    refs = [common_pb2.SpatialRef(point=common_pb2.Point(x=0.25, y=0.5))]
    together = await served.vision.Point(request("Point", objects=NAMES[:2], spatial_refs=refs))
    for name, result in zip(NAMES, together.results, strict=False):
        alone = await served.vision.Point(request("Point", object=name, spatial_refs=refs))
        assert result.point.points == alone.points
        assert result.point.usage.input_tokens == alone.usage.input_tokens


@pytest.mark.parametrize("skill", SKILLS)
async def test_a_stream_has_the_objects_of_each_name_and_then_all(serve, skill):
    served = await serve()
    wanted = request(skill, objects=NAMES)
    together = await getattr(served.vision, skill)(wanted)
    events = [event async for event in stream(served, skill, wanted)]
    kinds = [event.WhichOneof("event") for event in events]
    assert [event.sequence for event in events] == list(range(len(events)))
    assert kinds[0] == "started" and kinds[-1] == "final"
    assert kinds.count("task_final") == len(NAMES)
    assert events[0].key == events[-1].key == ""
    for index, result in enumerate(together.results):
        own = [event for event in events if event.key == str(index)]
        *found, last = [event.WhichOneof("event") for event in own]
        assert set(found) <= {"object"} and last == "task_final"
        expected = list(places(getattr(result, skill.lower())))
        assert [event.object for event in own[:-1]] == expected
        assert list(places(getattr(own[-1].task_final, skill.lower()))) == expected
    assert [r.key for r in events[-1].final.results] == [r.key for r in together.results]


async def test_the_image_is_encoded_once_and_its_prefix_shared(serve):
    runtime = FakeRuntime(LIMITS)
    served = await serve(runtime)
    names = [f"object {number}" for number in range(256)]
    response = await served.vision.Detect(request("Detect", objects=names, max_objects=1))
    assert [result.WhichOneof("outcome") for result in response.results] == ["detect"] * 256
    encoded = [piece for plan in runtime.plans for piece in plan.encode]
    assert len({piece.image.key for piece in encoded}) == 1
    assert sum(piece.last - piece.first for piece in encoded) == encoded[0].image.num_crops
    cached = [result.detect.usage.cached_tokens for result in response.results]
    assert cached.count(0) == 1 and min(sorted(cached)[1:]) >= 82
    assert served.engine.num_requests == 0


async def test_a_call_takes_a_bounded_number_of_places(serve):
    """Two calls of 256 names each fit into a queue with few places beyond that."""
    most = 0

    def watch(plan):
        nonlocal most
        most = max(most, served.engine.num_requests)
        return 0.0

    served = await serve(FakeRuntime(LIMITS, cost=watch), max_queue=2 * MAX_TASKS)
    names = [f"object {number}" for number in range(100)]
    wanted = request("Detect", objects=names, max_objects=1)
    responses = await asyncio.gather(served.vision.Detect(wanted), served.vision.Detect(wanted))
    for response in responses:
        assert [result.WhichOneof("outcome") for result in response.results] == ["detect"] * 100
    assert MAX_TASKS < most <= 2 * MAX_TASKS


@pytest.mark.parametrize("streaming", [False, True], ids=["unary", "stream"])
async def test_a_name_that_fails_leaves_the_others_alone(serve, streaming):
    served = await serve()
    wanted = request("Detect", objects=["cat", " ", "x" * 400, "dog"])
    if streaming:
        *_, last = [event async for event in stream(served, "Detect", wanted)]
        response = last.final
    else:
        response = await served.vision.Detect(wanted)
    outcomes = [result.WhichOneof("outcome") for result in response.results]
    assert outcomes == ["detect", "error", "error", "detect"]
    for index, reason in ((1, "INVALID_REQUEST"), (2, "CONTEXT_LENGTH_EXCEEDED")):
        error = response.results[index].error
        assert (error.code, error.reason) == (INVALID.value[0], reason)
        assert error.field_violations[0].field == f"objects[{index}]"


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"object": "cat", "objects": ["dog"]}, "objects", "set only one"),
        ({"objects": ["cat", "dog", "cat"]}, "objects", "twice"),
        ({"objects": [str(n) for n in range(257)]}, "objects", "has 257 names, the limit is 256"),
        ({"objects": ["cat", "dog"], "max_objects": 0}, "max_objects", "at least 1"),
        (
            {"objects": ["cat", "dog"], "sampling": common_pb2.Sampling(top_p=2)},
            "sampling.top_p",
            "not in (0, 1]",
        ),
        (
            {"objects": ["cat", "dog"], "sampling": common_pb2.Sampling(max_tokens=10_000)},
            "sampling.max_tokens",
            "exceeds",
        ),
    ],
)
@pytest.mark.parametrize("skill", SKILLS)
async def test_what_is_wrong_with_the_call_fails_it(serve, skill, fields, field, words):
    served = await serve()
    told = await failure(getattr(served.vision, skill)(request(skill, **fields)))
    assert told.code == INVALID
    assert told.fields == [field] and words in told.message
    assert served.engine.num_requests == 0


@pytest.mark.parametrize("skill", ["point", "detect"])
async def test_the_sdk_keys_results_and_events_by_name(serve, skill):
    served = await serve()
    options = {"max_objects": 3}
    async with AsyncKestrelClient(served.server.addresses[0]) as client:
        method = getattr(client, skill)
        alone = [await method(IMAGE, name, **options) for name in NAMES]
        found = await method(IMAGE, objects=NAMES, **options)
        assert list(found) == NAMES and not found.errors
        for name, result in zip(NAMES, alone, strict=True):
            assert list(found[name]) == list(result) and found[name].object == name
        assert found.usage.output_tokens == sum(result.usage.output_tokens for result in alone)
        assert found.total_time_ms > 0 and found.image_id
        assert len(found.marks.boxes + found.marks.points) == sum(len(result) for result in alone)
        async with getattr(client, f"stream_{skill}")(IMAGE, objects=NAMES, **options) as stream:
            events = [event async for event in stream]
        for name, result in zip(NAMES, alone, strict=True):
            *places, done = [event for event in events if event.key == name]
            assert [event.event for event in places] == list(result)
            assert isinstance(done, TaskDone) and list(done.outcome) == list(result)
        assert list(await stream.result()) == NAMES
        partly = await method(IMAGE, objects=["cat", " "])
        assert list(partly.errors) == [" "] and partly["cat"].object == "cat"
        bad = [("cat", {"objects": ["dog"]}), ("", {"objects": "cat"}), ("", {"objects": []})]
        for name, fields in bad:
            with pytest.raises(InvalidRequestError, match=r"^objects: "):
                await method(IMAGE, name, **fields)
        with pytest.raises(InvalidArgumentError) as caught:
            await method(IMAGE, objects=["cat", "dog", "cat"])
        assert caught.value.field_violations[0].field == "objects"


async def test_giving_up_frees_everything(serve):
    served = await serve(FakeRuntime(LIMITS, cost=lambda plan: 0.01))
    names = [f"object {number}" for number in range(100)]
    call = stream(served, "Detect", request("Detect", objects=names))
    async for event in call:
        if event.WhichOneof("event") == "object":
            break
    call.cancel()
    await until(lambda: not served.engine.num_requests)
