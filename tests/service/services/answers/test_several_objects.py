"""Detect, Point and Segment with several names: as the calls one by one, the image's prefix read once, fail alone."""

import asyncio

import grpc
import numpy as np
import pytest

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_grpc.services.answers.several import MAX_SEQUENCES
from tests.fake_runtime import FakeRuntime
from tests.service.conftest import LIMITS, HeldRuntime, raw_image
from tests.service.statuses import failure, of_message
from tests.waiting import until

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NAMES = ["cat", "red dot", "house", "größer"]
SKILLS = ["Point", "Detect", "Segment"]
IMAGE = np.full((40, 60, 3), 200, np.uint8)


def task(skill, *names, **fields):
    limit = {"max_tokens": 30} if skill == "Segment" else {"max_objects": 3}
    return getattr(pb, f"{skill}Task")(objects=names, **limit | fields)


def request(skill, *names, **fields):
    own = {skill.lower(): task(skill, *names, **fields)}
    return getattr(pb, f"{skill}Request")(image=raw_image(), **own)


def stream(served, skill, wanted):
    return getattr(served.vision, f"Stream{skill}")(wanted)


@pytest.mark.parametrize("skill", SKILLS)
async def test_each_name_gives_what_it_gives_alone(serve, skill):
    served = await serve()
    method = getattr(served.vision, skill)
    alone = [await method(request(skill, name)) for name in NAMES]
    assert len({str(response.detections) for response in alone}) > 1
    together = await method(request(skill, *NAMES))
    assert list(together.searches) == [response.searches[0] for response in alone]
    assert [search.object for search in together.searches] == NAMES
    assert list(together.detections) == [found for each in alone for found in each.detections]
    assert together.usage.output_tokens == sum(r.usage.output_tokens for r in alone)
    assert together.usage.input_tokens == sum(r.usage.input_tokens for r in alone)
    assert together.info.images == alone[0].info.images and together.info.images[0].image_id
    assert together.info.model == "fake" and together.info.request_id and together.info.seed
    assert together.timings.total_ms >= together.timings.ttft_ms > 0


@pytest.mark.parametrize("skill", ["Point", "Segment"])
async def test_spatial_references_are_for_every_name(serve, skill):
    served = await serve()
    method = getattr(served.vision, skill)
    refs = [common_pb2.SpatialRef(point=common_pb2.Point(x=0.25, y=0.5))]
    together = await method(request(skill, *NAMES[:2], spatial_refs=refs))
    alone = [await method(request(skill, name, spatial_refs=refs)) for name in NAMES[:2]]
    assert list(together.detections) == [found for each in alone for found in each.detections]
    assert together.usage.input_tokens == sum(each.usage.input_tokens for each in alone)


@pytest.mark.parametrize("skill", SKILLS)
async def test_a_stream_has_the_objects_of_each_name_and_then_all(serve, skill):
    served = await serve()
    wanted = request(skill, *NAMES, sampling=common_pb2.Sampling(seed=3))
    together = await getattr(served.vision, skill)(wanted)
    events = [event async for event in stream(served, skill, wanted)]
    kinds = [event.WhichOneof("event") for event in events]
    assert [event.sequence for event in events] == list(range(len(events)))
    assert kinds[0] == "started" and kinds[-1] == "final"
    assert kinds.count("search") == len(NAMES)
    final = events[-1].final
    assert (final.detections, final.searches) == (together.detections, together.searches)
    assert events[0].started == final.info
    assert final.info.images == together.info.images and final.info.seed == 3
    for name, search in zip(NAMES, together.searches, strict=True):
        own = [event for event in events if label(event) == name]
        assert own[-1].search == search
        found = [event.detection for event in own if event.HasField("detection")]
        expected = [each for each in together.detections if each.label == name]
        for each in expected:
            each.ClearField("outline")
        if skill == "Segment":  # A path without a box is no event.
            expected = [each for each in expected if each.HasField("box")]
        assert found == expected


def label(event):
    """Name of the object that an event is about."""
    kind = event.WhichOneof("event")
    own = getattr(event, kind)
    if kind == "search":
        return own.object
    return own.label if kind in ("detection", "path_piece") else ""


@pytest.mark.parametrize("skill", SKILLS)
async def test_a_task_of_analyze_has_several_names(serve, skill):
    served = await serve()
    together = await getattr(served.vision, skill)(request(skill, *NAMES))
    name = skill.lower()
    tasks = [pb.Task(**{name: task(skill, *each)}) for each in (NAMES, ["cat", " "], [" "], [])]
    asked = pb.AnalyzeRequest(image=raw_image(), tasks=tasks)
    analysis = await served.vision.Analyze(asked)
    every, partly, *failed = analysis.results
    every = getattr(every, name)
    assert (every.detections, every.searches) == (together.detections, together.searches)
    good, bad = getattr(partly, name).searches
    assert good == every.searches[0]
    assert of_message(bad.error).fields == [f"tasks[1].{name}.objects[1]"]
    fields = [of_message(each.error).fields for each in failed]
    assert fields == [[f"tasks[2].{name}.objects[0]"], [f"tasks[3].{name}.objects"]]
    events = [event async for event in served.vision.StreamAnalyze(asked)]
    own = [event for event in events if event.key == "0"]
    assert {label(event) for event in own[:-1]} == set(NAMES)
    assert getattr(own[-1].task_final, name).detections == every.detections
    assert [of_message(e.search.error).fields for e in events if e.search.HasField("error")] == [
        [f"tasks[1].{name}.objects[1]"]
    ]


async def test_a_frame_has_several_names(serve):
    served = await serve()
    together = await served.vision.Detect(request("Detect", "cat", "dog"))
    config = pb.FramesConfig(tasks=[pb.Task(detect=task("Detect", "cat", "dog", " "))])
    frame = pb.Frame(frame_id=1, image=raw_image())
    sent = [pb.StreamFramesRequest(config=config), pb.StreamFramesRequest(frame=frame)]
    (told,) = [response async for response in served.vision.StreamFrames(sent)]
    found = told.results.results[0].detect
    assert found.detections == together.detections
    assert of_message(found.searches[2].error).fields == ["config.tasks[0].detect.objects[2]"]


async def test_the_image_is_encoded_once_and_its_prefix_shared(serve):
    runtime = FakeRuntime(LIMITS)
    served = await serve(runtime)
    names = [f"object {number}" for number in range(256)]
    response = await served.vision.Detect(request("Detect", *names, max_objects=1))
    assert not any(search.HasField("error") for search in response.searches)
    assert len(response.searches) == 256
    encoded = [piece for plan in runtime.plans for piece in plan.encode]
    assert len({piece.image.key for piece in encoded}) == 1
    assert sum(piece.last - piece.first for piece in encoded) == encoded[0].image.num_crops
    assert response.usage.cached_tokens >= 255 * 82
    assert served.engine.num_requests == 0


async def test_a_call_takes_a_bounded_number_of_places(serve):
    """Two calls of 256 names each fit into a queue with few places beyond that."""
    most = 0

    def watch(plan):
        nonlocal most
        most = max(most, served.engine.num_requests)
        return 0.0

    served = await serve(FakeRuntime(LIMITS, cost=watch), max_queue=2 * MAX_SEQUENCES)
    names = [f"object {number}" for number in range(100)]
    wanted = request("Detect", *names, max_objects=1)
    responses = await asyncio.gather(served.vision.Detect(wanted), served.vision.Detect(wanted))
    for response in responses:
        assert not any(search.HasField("error") for search in response.searches)
    assert MAX_SEQUENCES < most <= 2 * MAX_SEQUENCES


async def test_names_begin_when_their_turn_comes(serve):
    served = await serve(HeldRuntime())
    find = pb.DetectTask(objects=[f"object {number}" for number in range(256)])
    tasks = [pb.Task(detect=find) for _ in range(32)]
    call = served.vision.Analyze(pb.AnalyzeRequest(image=raw_image(), tasks=tasks))
    await until(lambda: served.engine.num_requests == MAX_SEQUENCES)
    assert len(asyncio.all_tasks()) < 32 * 50
    call.cancel()
    served.runtime.gate.set()
    await until(lambda: served.engine.num_requests == 0)


@pytest.mark.parametrize("streaming", [False, True], ids=["unary", "stream"])
async def test_a_name_that_fails_leaves_the_others_alone(serve, streaming):
    served = await serve()
    wanted = request("Detect", "cat", " ", "x" * 400, "dog")
    if streaming:
        *_, last = [event async for event in stream(served, "Detect", wanted)]
        response = last.final
    else:
        response = await served.vision.Detect(wanted)
    failed = [search.HasField("error") for search in response.searches]
    assert failed == [False, True, True, False]
    for index, reason in ((1, "INVALID_REQUEST"), (2, "CONTEXT_LENGTH_EXCEEDED")):
        told = of_message(response.searches[index].error)
        assert (told.code, told.reason) == (INVALID, reason)
        assert told.fields == [f"detect.objects[{index}]"]
        assert told.request_id == response.info.request_id


async def test_the_error_of_a_name_says_when_to_try_again(serve):
    """It has the details that the status of a call has."""
    served = await serve(HeldRuntime(), max_queue=1)
    asking = asyncio.ensure_future(served.vision.Detect(request("Detect", *NAMES, "more")))
    await until(lambda: served.engine.num_requests == 4)
    served.runtime.gate.set()
    response = await asking
    (told,) = [of_message(each.error) for each in response.searches if each.HasField("error")]
    assert (told.code, told.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert told.retry_after_s is not None and told.retry_after_s > 0
    assert told.quota_subject == "anonymous" and told.request_id == response.info.request_id
    assert len([each for each in response.searches if not each.HasField("error")]) == 4


WRONG = [
    ([], {}, "objects", "is empty; name 1 to 256 objects"),
    (["cat", "dog", "cat"], {}, "objects", "twice"),
    ([str(n) for n in range(257)], {}, "objects", "has 257 names, the limit is 256"),
    ([" "], {}, "objects[0]", "must not be empty"),
    (["cat", "dog"], {"sampling": {"top_p": 2}}, "sampling.top_p", "not in (0, 1]"),
    (["cat", "dog"], {"max_tokens": 10_000}, "max_tokens", "exceeds"),
    (["cat", "dog"], {"max_tokens": 0}, "max_tokens", "at least 1"),
    (["cat", "dog"], {"min_score": 2}, "min_score", "not a number in [0, 1]"),
]


@pytest.mark.parametrize("skill", SKILLS)
async def test_what_is_wrong_with_the_call_fails_it(serve, skill):
    served = await serve()
    for names, fields, field, words in WRONG:
        told = await failure(getattr(served.vision, skill)(request(skill, *names, **fields)))
        assert told.code == INVALID
        assert told.fields == [f"{skill.lower()}.{field}"] and words in told.message
    assert served.engine.num_requests == 0
