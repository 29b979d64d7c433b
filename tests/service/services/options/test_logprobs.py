"""Log-probabilities over the wire: of answers, descriptions, tasks and skills by name, whole and as streams."""

import math

import grpc
import pytest

from kestrel_client import AsyncKestrelClient, CaptionTask, QueryTask
from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from tests.engine.fakes import IMAGE
from tests.service.conftest import raw_image
from tests.service.statuses import failure

SAMPLING = common_pb2.Sampling(temperature=0.0, max_tokens=8, logprobs=True)
REQUESTS = {
    "Query": pb.QueryRequest(image=raw_image(), question="what?", sampling=SAMPLING),
    "Caption": pb.CaptionRequest(image=raw_image(), sampling=SAMPLING),
}
TEXTS = {"Query": "answer", "Caption": "caption"}


def token_id(result):
    """Of the first token."""
    return result.logprobs.tokens[0].id


def stream(served, skill, request):
    return getattr(served.vision, f"Stream{skill}")(request)


@pytest.mark.parametrize("skill", REQUESTS)
async def test_a_result_has_one_for_each_token_with_their_sum_and_mean(serve, skill):
    served = await serve()
    response = await getattr(served.vision, skill)(REQUESTS[skill])
    logprobs = response.logprobs
    assert len(logprobs.tokens) == response.usage.output_tokens == 8
    text = b"".join(token.utf8 for token in logprobs.tokens).decode(errors="replace")
    assert text == getattr(response, TEXTS[skill])
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
    final = events[-1].final
    assert final.logprobs == (await getattr(served.vision, skill)(REQUESTS[skill])).logprobs
    told = [token for event in events for token in event.text_delta.tokens]
    assert told == list(final.logprobs.tokens[: len(told)]) and told


@pytest.mark.parametrize("skill", REQUESTS)
async def test_without_the_setting_there_are_none(serve, skill):
    served = await serve()
    request = type(REQUESTS[skill])()
    request.CopyFrom(REQUESTS[skill])
    asked = await getattr(served.vision, skill)(request)
    for value in (None, False):
        request.sampling.ClearField("logprobs")
        if value is not None:
            request.sampling.logprobs = value
        response = await getattr(served.vision, skill)(request)
        assert not response.HasField("logprobs")
        assert getattr(response, TEXTS[skill]) == getattr(asked, TEXTS[skill])
        events = [event async for event in stream(served, skill, request)]
        assert not events[-1].final.HasField("logprobs")
        assert all(not event.text_delta.tokens for event in events)


@pytest.mark.parametrize("skill", REQUESTS)
async def test_the_likeliest_tokens_at_each_place(serve, skill):
    served = await serve()
    request = type(REQUESTS[skill])()
    request.CopyFrom(REQUESTS[skill])
    plain = await getattr(served.vision, skill)(request)
    request.sampling.top_logprobs = 3
    response = await getattr(served.vision, skill)(request)
    assert response.logprobs.sum == plain.logprobs.sum
    for token, other in zip(response.logprobs.tokens, plain.logprobs.tokens, strict=True):
        assert list(token.top)[:1] == [other] and len(token.top) == 3 and not other.top
    events = [event async for event in stream(served, skill, request)]
    assert events[-1].final.logprobs == response.logprobs
    told = [token for event in events for token in event.text_delta.tokens]
    assert told == list(response.logprobs.tokens[: len(told)]) and told
    for sampling in ({"top_logprobs": 21}, {"logprobs": False}):
        wrong = type(request)()
        wrong.CopyFrom(request)
        wrong.sampling.MergeFrom(common_pb2.Sampling(**sampling))
        failed = await failure(getattr(served.vision, skill)(wrong))
        assert failed.fields == ["sampling.top_logprobs"]


async def test_each_task_has_its_own(serve):
    served = await serve()
    alone = await served.vision.Query(REQUESTS["Query"])
    tasks = [
        pb.AnalyzeTask(query=pb.QueryTask(question="what?", sampling=SAMPLING)),
        pb.AnalyzeTask(caption=pb.CaptionTask()),
    ]
    response = await served.vision.Analyze(pb.AnalyzeRequest(image=raw_image(), tasks=tasks))
    assert response.results[0].query.logprobs == alone.logprobs
    assert not response.results[1].caption.HasField("logprobs")


async def test_a_skill_by_name_has_them(serve):
    served = await serve()
    alone = await served.vision.Query(REQUESTS["Query"])
    request = pb.RunSkillRequest(image=raw_image(), skill="query", sampling=SAMPLING)
    request.arguments.update({"question": "what?"})
    assert (await served.vision.RunSkill(request)).logprobs == alone.logprobs
    request.sampling.ClearField("logprobs")
    assert not (await served.vision.RunSkill(request)).HasField("logprobs")
    request.settings.update({"logprobs": True})
    assert (await served.vision.RunSkill(request)).logprobs == alone.logprobs
    wrong = {"logprobs": "yes"}
    request.settings.update(wrong)
    failed = await failure(served.vision.RunSkill(request))
    assert failed.fields == ["settings.logprobs"]


@pytest.mark.parametrize("skill", ["Point", "Detect", "Segment"])
async def test_other_skills_refuse_it(serve, skill):
    served = await serve()
    request = getattr(pb, f"{skill}Request")(image=raw_image(), object="a", sampling=SAMPLING)
    failed = await failure(getattr(served.vision, skill)(request))
    assert failed.code == grpc.StatusCode.INVALID_ARGUMENT
    assert failed.fields == ["sampling.logprobs"]


async def test_the_sdk_has_them_typed(serve):
    served = await serve()
    async with AsyncKestrelClient(served.server.addresses[0]) as client:
        options = {"temperature": 0, "max_tokens": 8}
        result = await client.query(IMAGE, "what?", logprobs=True, **options)
        assert result.logprobs is not None and len(result.logprobs) == 8
        assert result.logprobs.sum == pytest.approx(sum(t.logprob for t in result.logprobs))
        async with client.stream_query(IMAGE, "what?", logprobs=True, **options) as events:
            told = [token async for event in events for token in event.tokens]
            streamed = await events.result()
        assert streamed.logprobs == result.logprobs
        assert tuple(told) == result.logprobs.tokens[: len(told)]
        likeliest = await client.query(IMAGE, "what?", logprobs=True, top_logprobs=4, **options)
        assert likeliest.logprobs is not None
        for token, plain in zip(likeliest.logprobs, result.logprobs, strict=True):
            assert len(token.top) == 4 and token.top[0] == plain
        assert likeliest.to_dict()["logprobs"]["tokens"][0]["top"][0]["id"] == token_id(result)
        ask, describe = QueryTask("what?", logprobs=True, **options), CaptionTask(max_tokens=3)
        analysis = await client.analyze(IMAGE, [ask, describe])
        assert analysis[ask].logprobs == result.logprobs and analysis[describe].logprobs is None
