"""Scores over the wire: of points, boxes and outlines, of tasks and skills by name, whole and as streams."""

import pytest

from kestrel_client import AsyncKestrelClient
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from tests.engine.options.test_scores import outlining
from tests.fake_runtime import FakeRuntime
from tests.service.conftest import LIMITS, raw_image

FIELDS = {"Point": "points", "Detect": "objects"}


def always():
    return FakeRuntime(LIMITS, lambda fed: 5)


def task(skill, objects=("cat",), **fields):
    most = {} if skill == "Segment" else {"max_objects": 6}
    return {skill.lower(): getattr(pb, f"{skill}Task")(objects=objects, **most, **fields)}


def request(skill, **fields):
    return getattr(pb, f"{skill}Request")(image=raw_image(), **task(skill, **fields))


def stream(served, skill, wanted):
    return getattr(served.vision, f"Stream{skill}")(wanted)


@pytest.mark.parametrize("skill", FIELDS)
async def test_all_ways_to_ask_give_the_same_scores(serve, skill):
    served = await serve(always())
    found = (await getattr(served.vision, skill)(request(skill))).detections
    assert len({each.score for each in found}) > 3
    assert all(0 < each.score < 1 for each in found)
    threshold = sorted(each.score for each in found)[2]
    kept = [each for each in found if each.score >= threshold]
    wanted = request(skill, min_score=threshold)
    assert list((await getattr(served.vision, skill)(wanted)).detections) == kept
    events = [event async for event in stream(served, skill, wanted)]
    assert [event.detection for event in events[1:-2]] == kept
    several = request(skill, objects=["cat", "dog"], min_score=threshold)
    both = (await getattr(served.vision, skill)(several)).detections
    assert [each for each in both if each.label == "cat"] == kept
    assert all(each.score >= threshold for each in both)
    alone = pb.Task(**task(skill, min_score=threshold))
    analysis = pb.AnalyzeRequest(image=raw_image(), tasks=[alone])
    (outcome,) = (await served.vision.Analyze(analysis)).results
    assert list(getattr(outcome, skill.lower()).detections) == kept
    named = pb.RunSkillRequest(image=raw_image(), skill=pb.SkillTask(name=skill.lower()))
    named.skill.arguments.update({"object": "cat"})
    named.skill.settings.update({"max_objects": 6, "min_score": threshold})
    output = (await served.vision.RunSkill(named)).output
    assert [each["score"] for each in output[FIELDS[skill]]] == pytest.approx(
        [each.score for each in kept]
    )


async def test_an_outline_below_the_threshold_has_a_score_only(serve):
    served = await serve(FakeRuntime(LIMITS, outlining))
    whole = await served.vision.Segment(request("Segment"))
    (found,) = whole.detections
    assert found.score > 0 and found.outline.svg_path
    assert not whole.searches[0].HasField("omitted_score")
    wanted = request("Segment", min_score=found.score + 0.01)
    dropped = await served.vision.Segment(wanted)
    (search,) = dropped.searches
    assert search.omitted_score == found.score and not dropped.detections
    assert dropped.usage.output_tokens == 3
    events = [event async for event in stream(served, "Segment", wanted)]
    assert [event.WhichOneof("event") for event in events] == ["started", "search", "final"]


async def test_the_servers_default_applies_and_is_told(serve):
    every = await (await serve(always())).vision.Detect(request("Detect"))
    threshold = sorted(found.score for found in every.detections)[2]
    served = await serve(always(), min_score=threshold)
    kept = (await served.vision.Detect(request("Detect"))).detections
    assert list(kept) == [found for found in every.detections if found.score >= threshold]
    all_of_them = await served.vision.Detect(request("Detect", min_score=0))
    assert all_of_them.detections == every.detections
    async with AsyncKestrelClient(served.server.addresses[0]) as client:
        assert (await client.server_info()).limits.default_min_score == threshold


@pytest.mark.parametrize("skill", FIELDS)
async def test_a_response_has_the_probability_of_absence(serve, skill):
    there, absent = await serve(always()), await serve(FakeRuntime(LIMITS, lambda fed: 0))
    for served, found in ((there, True), (absent, False)):
        response = await getattr(served.vision, skill)(request(skill))
        assert bool(response.detections) == found
        (search,) = response.searches
        assert search.HasField("absence") and 0 < search.absence < 1
        events = [event async for event in stream(served, skill, request(skill))]
        assert events[-1].final.searches == response.searches
    several = request(skill, objects=["cat", "dog"])
    response = await getattr(there.vision, skill)(several)
    assert all(search.HasField("absence") for search in response.searches)
