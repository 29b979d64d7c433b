"""Log-probabilities over the wire: of answers, descriptions, tasks and skills by name, whole and as streams."""

import math

import grpc
import pytest

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from tests.service.conftest import raw_image
from tests.service.statuses import failure

SAMPLING = {
    "max_tokens": 8,
    "sampling": common_pb2.Sampling(temperature=0.0),
    "text": common_pb2.TextOptions(logprobs=True),
}
REQUESTS = {
    "Query": pb.QueryRequest(
        images=[raw_image()], query=pb.QueryTask(question="what?", **SAMPLING)
    ),
    "Caption": pb.CaptionRequest(image=raw_image(), caption=pb.CaptionTask(**SAMPLING)),
}


def answer_of(response):
    (answer,) = getattr(response, "answers", None) or response.captions
    return answer


def stream(served, skill, request):
    return getattr(served.vision, f"Stream{skill}")(request)


@pytest.mark.parametrize("skill", REQUESTS)
async def test_a_result_has_one_for_each_token_with_their_sum_and_mean(serve, skill):
    served = await serve()
    response = await getattr(served.vision, skill)(REQUESTS[skill])
    answer = answer_of(response)
    logprobs = answer.logprobs
    assert len(logprobs.tokens) == response.usage.output_tokens == 8
    text = b"".join(token.utf8 for token in logprobs.tokens).decode(errors="replace")
    assert text == answer.text
    values = [token.logprob for token in logprobs.tokens]
    assert all(value <= 0 for value in values) and len(set(values)) > 4
    assert logprobs.sum == pytest.approx(math.fsum(values))
    assert logprobs.mean == pytest.approx(logprobs.sum / 8)
    for token in logprobs.tokens:
        assert token.text == token.utf8.decode(errors="replace")
        assert token.utf8 == (bytes([token.id - 100]) if 100 <= token.id < 356 else b"")


@pytest.mark.parametrize("skill", REQUESTS)
async def test_a_stream_has_them_in_its_deltas(serve, skill):
    served = await serve()
    events = [event async for event in stream(served, skill, REQUESTS[skill])]
    final = answer_of(events[-1].final)
    unary = answer_of(await getattr(served.vision, skill)(REQUESTS[skill]))
    assert final.logprobs == unary.logprobs
    told = [token for event in events for token in event.text_delta.tokens]
    assert told == list(final.logprobs.tokens[: len(told)]) and told


@pytest.mark.parametrize("skill", REQUESTS)
async def test_the_likeliest_tokens_at_each_place(serve, skill):
    served = await serve()
    request = type(REQUESTS[skill])()
    request.CopyFrom(REQUESTS[skill])
    text = getattr(request, skill.lower()).text
    plain = answer_of(await getattr(served.vision, skill)(request))
    text.top_logprobs = 3
    response = answer_of(await getattr(served.vision, skill)(request))
    assert response.logprobs.sum == plain.logprobs.sum
    for token, other in zip(response.logprobs.tokens, plain.logprobs.tokens, strict=True):
        assert list(token.top)[:1] == [other] and len(token.top) == 3 and not other.top
    events = [event async for event in stream(served, skill, request)]
    assert answer_of(events[-1].final).logprobs == response.logprobs
    told = [token for event in events for token in event.text_delta.tokens]
    assert told == list(response.logprobs.tokens[: len(told)]) and told
    for wrong in ({"top_logprobs": 21}, {"top_logprobs": -1}, {"logprobs": False}):
        text.CopyFrom(common_pb2.TextOptions(**{"logprobs": True, "top_logprobs": 3} | wrong))
        failed = await failure(getattr(served.vision, skill)(request))
        assert failed.fields == [f"{skill.lower()}.text.top_logprobs"]


async def test_each_task_has_its_own(serve):
    served = await serve()
    alone = answer_of(await served.vision.Query(REQUESTS["Query"]))
    tasks = [
        pb.Task(query=pb.QueryTask(question="what?", **SAMPLING)),
        pb.Task(caption=pb.CaptionTask()),
    ]
    response = await served.vision.Analyze(pb.AnalyzeRequest(image=raw_image(), tasks=tasks))
    assert answer_of(response.results[0].query).logprobs == alone.logprobs
    assert not answer_of(response.results[1].caption).HasField("logprobs")


async def test_a_skill_by_name_has_them(serve):
    served = await serve()
    alone = answer_of(await served.vision.Query(REQUESTS["Query"]))
    request = pb.RunSkillRequest(image=raw_image(), skill=pb.SkillTask(name="query", **SAMPLING))
    request.skill.arguments.update({"question": "what?"})
    assert (await served.vision.RunSkill(request)).logprobs == alone.logprobs
    request.skill.ClearField("text")
    assert not (await served.vision.RunSkill(request)).HasField("logprobs")
    request.skill.settings.update({"logprobs": True})
    assert (await served.vision.RunSkill(request)).logprobs == alone.logprobs
    wrong = {"logprobs": "yes"}
    request.skill.settings.update(wrong)
    failed = await failure(served.vision.RunSkill(request))
    assert failed.fields == ["skill.settings.logprobs"]


async def test_other_skills_refuse_it(serve):
    served = await serve()
    for name in ("point", "detect", "segment"):
        task = pb.SkillTask(name=name, arguments={"object": "a"}, text={"logprobs": True})
        failed = await failure(
            served.vision.RunSkill(pb.RunSkillRequest(image=raw_image(), skill=task))
        )
        assert failed.code == grpc.StatusCode.INVALID_ARGUMENT
        assert failed.fields == ["skill.text.logprobs"]
