"""Questions that presuppose objects over the wire: gRPC, tasks, streams, samples, SDK and command line."""

import grpc
import pytest

from kestrel_client import AsyncKestrelClient, InvalidRequestError, QueryTask
from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from tests.client.commands.test_stored_images import IMAGE as FILE
from tests.client.commands.test_stored_images import kestrel as kestrel
from tests.engine.fakes import IMAGE
from tests.engine.requests.test_presuppositions import shows
from tests.fake_runtime import FakeRuntime
from tests.service.conftest import LIMITS, raw_image
from tests.service.statuses import failure

GREEDY = {"max_tokens": 6, "sampling": common_pb2.Sampling(temperature=0)}


def request(*objects, **fields):
    abstention = pb.Abstention(objects=objects)
    return pb.QueryRequest(
        images=[raw_image()],
        query=pb.QueryTask(question="?", **GREEDY, abstention=abstention, **fields),
    )


async def test_all_ways_to_ask_abstain_alike(serve):
    served = await serve(FakeRuntime(LIMITS, shows("dog")))
    answered = await served.vision.Query(request("dog"))
    assert (answered.answers[0].text, answered.abstained) == ("yes", False)
    assert [each.object for each in answered.presupposed] == ["dog"]
    assert not answered.presupposed[0].finish_reason
    missed = await served.vision.Query(request("dog", "cat"))
    (answer,) = missed.answers
    assert (answer.text, missed.abstained) == ("", True)
    assert answer.finish_reason == common_pb2.FINISH_REASON_STOP
    assert missed.info.images[0].image_id
    assert missed.presupposed[0].absence < 0.5 < missed.presupposed[1].absence < 1
    assert missed.usage.image_tokens == 2 * answered.usage.image_tokens / 2
    asked = request("dog", "cat")
    events = [event async for event in served.vision.StreamQuery(asked)]
    assert [event.WhichOneof("event") for event in events] == ["started", "final"]
    assert events[-1].final.presupposed == missed.presupposed
    given = request("dog", "cat")
    given.query.abstention.max_absence = 1.0
    assert (await served.vision.Query(given)).answers[0].text == "yes"
    task = pb.QueryTask(question="?", **GREEDY, abstention=pb.Abstention(objects=["cat"]))
    analysis = pb.AnalyzeRequest(image=raw_image(), tasks=[pb.Task(query=task)])
    (outcome,) = (await served.vision.Analyze(analysis)).results
    assert outcome.query.abstained
    named = pb.RunSkillRequest(image=raw_image(), skill=pb.SkillTask(name="query", **GREEDY))
    named.skill.arguments.update({"question": "?", "presupposes": ["cat"]})
    named.skill.settings.update({"max_absence": 0.25})
    assert (await served.vision.RunSkill(named)).output["answer"] == ""


async def test_samples_share_one_look(serve):
    served = await serve(FakeRuntime(LIMITS, shows("dog")))
    alone = await served.vision.Query(request("dog"))
    three = await served.vision.Query(request("dog", num_samples=3))
    assert [each.text for each in three.answers] == ["yes"] * 3
    assert three.presupposed == alone.presupposed
    look, answer = 1, alone.usage.output_tokens - 1
    assert three.usage.output_tokens == look + 3 * answer
    missed = await served.vision.Query(request("cat", num_samples=3))
    assert missed.abstained
    seeds = [each.seed for each in missed.answers]
    assert seeds == [seeds[0] + number for number in range(3)]


@pytest.mark.parametrize(
    ("objects", "absence", "field"),
    [
        ([], None, "abstention.objects"),
        (["cat"] * 9, None, "abstention.objects"),
        (["cat", " "], None, "abstention.objects[1]"),
        (["cat"], 1.5, "abstention.max_absence"),
    ],
)
async def test_errors_name_the_field(serve, objects, absence, field):
    served = await serve()
    given = request(*objects)
    if absence is not None:
        given.query.abstention.max_absence = absence
    given.query.abstention.SetInParent()
    status = await failure(served.vision.Query(given))
    assert status.code is grpc.StatusCode.INVALID_ARGUMENT and status.fields == [f"query.{field}"]


async def test_the_sdk_and_the_default_of_the_server(serve):
    served = await serve(FakeRuntime(LIMITS, shows("dog")), max_absence=1.0)
    async with AsyncKestrelClient(served.server.addresses[0]) as client:
        assert (await client.server_info()).limits.default_max_absence == 1.0
        asked = await client.query(IMAGE, "?", presupposes=["cat"], temperature=0)
        assert asked.answer == "yes" and asked.presupposed[0].absence > 0.5
        limited = {"presupposes": ["cat"], "max_absence": 0.1, "temperature": 0}
        missed = await client.query(IMAGE, "?", **limited)
        assert missed.abstained and "abstained" in repr(missed)
        (told,) = missed.to_dict()["presupposed"]
        assert (told["object"], told["absence"]) == ("cat", missed.presupposed[0].absence)
        task = QueryTask("?", **limited)
        assert (await client.analyze(IMAGE, [task]))[task].abstained
        async with client.stream_query(IMAGE, "?", **limited) as stream:
            assert [event async for event in stream] == []
        for wrong in ({"presupposes": "cat"}, {"max_absence": 0.5}, {"presupposes": [3]}):
            with pytest.raises(InvalidRequestError):
                await client.query(IMAGE, "?", **wrong)


async def test_the_command_line_says_what_is_missing(kestrel):
    asked = ["query", FILE, "what?", "--temperature", 0, "--max-tokens", 4]
    plain = await kestrel(*asked)
    assert await kestrel(*asked, "--presupposes", "cat", "--max-absence", 1) == plain
    flags = ["--presupposes", "cat", "--presupposes", "dog", "--max-absence", 0]
    status, told, errors = await kestrel(*asked, *flags)
    assert (status, told) == (0, "") and "not answered" in errors
    assert "cat: absent with probability " in errors and "dog: absent" in errors
