"""Constraints over the wire: in requests, streams, tasks and skills by name, and their errors."""

import json

import grpc
import pytest

from kestrel_client import AsyncKestrelClient
from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from tests.engine.options.test_constraints import SCHEMA, matches
from tests.service.conftest import raw_image
from tests.service.statuses import failure

CHOICES = ["red", "green", "green crescent"]


GREEDY = {"max_tokens": 100, "sampling": common_pb2.Sampling(temperature=0.0)}


def constrained(**constraint):
    return {**GREEDY, "text": {"constraint": constraint}}


async def test_answers_descriptions_streams_tasks_and_named_skills_match(serve):
    served = await serve()
    by_choice = constrained(choices={"texts": CHOICES})
    by_schema = constrained(json_schema=json.dumps(SCHEMA))
    ask = pb.QueryRequest(query=pb.QueryTask(question="what?", **by_choice))
    (answer,) = (await served.vision.Query(ask)).answers
    assert answer.text in CHOICES and answer.finish_reason == common_pb2.FINISH_REASON_STOP
    caption = pb.CaptionRequest(image=raw_image(), caption=pb.CaptionTask(**by_schema))
    described = (await served.vision.Caption(caption)).captions[0].text
    assert matches({"json_schema": SCHEMA}, described)
    stream = served.vision.StreamCaption(caption)
    events = [event async for event in stream]
    assert events[-1].final.captions[0].text == described
    assert "".join(event.text_delta.text for event in events) == described
    tasks = [
        pb.Task(query=pb.QueryTask(question="what?", **constrained(regex="[ab]{3}"))),
        pb.Task(caption=pb.CaptionTask(**by_schema)),
    ]
    analysis = await served.vision.Analyze(pb.AnalyzeRequest(image=raw_image(), tasks=tasks))
    assert set(analysis.results[0].query.answers[0].text) <= {"a", "b"}
    assert analysis.results[1].caption.captions[0].text == described
    named = pb.RunSkillRequest(skill=pb.SkillTask(name="query"))
    named.skill.arguments.update({"question": "what?"})
    named.skill.settings.update(
        {"temperature": 0, "max_tokens": 100, "constraint": {"choices": CHOICES}}
    )
    assert (await served.vision.RunSkill(named)).output["answer"] == answer.text


@pytest.mark.parametrize(
    ("constraint", "field", "words"),
    [
        ({"json_schema": '{"properties": {"a": 3}}'}, "json_schema", "at /properties/a"),
        ({"regex": "(a"}, "regex", "unclosed group at character 1"),
        ({"grammar": "start: b"}, "grammar", "unknown name"),
        ({"choices": {"texts": ["a", ""]}}, "choices.texts[1]", "must not be empty"),
        ({}, "", "exactly one"),
    ],
)
async def test_errors_name_field_and_place(serve, constraint, field, words):
    served = await serve()
    request = pb.QueryRequest(query=pb.QueryTask(question="a", **constrained(**constraint)))
    failed = await failure(served.vision.Query(request))
    assert failed.code == grpc.StatusCode.INVALID_ARGUMENT
    assert failed.fields == [f"query.text.constraint.{field}".rstrip(".")]
    assert words in failed.message


async def test_penalties_and_bias_reach_the_rules(serve):
    served = await serve()
    bias = [common_pb2.LogitBias(id=7, bias=-100)]
    text = common_pb2.TextOptions(repetition_penalty=1.5, frequency_penalty=0.5, logit_bias=bias)
    task = pb.QueryTask(question="x", **GREEDY | {"max_tokens": 3, "text": text})
    request = pb.QueryRequest(query=task)
    await served.vision.Query(request)
    options = {"temperature": 0, "max_tokens": 3, "repetition_penalty": 1.5}
    options |= {"frequency_penalty": 0.5, "logit_bias": {7: -100}}
    async with AsyncKestrelClient(served.server.addresses[0]) as client:
        await client.query(None, "x", **options)
    samples = [r.sample for plan in served.runtime.plans for r in (*plan.prefill, *plan.decode)]
    edits = [sample.rule.edits for sample in samples if sample is not None]
    assert edits[:3] == edits[3:] and len(edits) == 6
    assert edits[0] == ((7, -100.0, 1.0, 0.0), (100 + ord("x"), 0.0, 1.5, 0.0))
    request.query.text.logit_bias[0].bias = 101
    assert (await failure(served.vision.Query(request))).fields == ["query.text.logit_bias[0]"]
    request.query.text.logit_bias[0].bias, request.query.sampling.min_p = 1, 2
    assert (await failure(served.vision.Query(request))).fields == ["query.sampling.min_p"]
