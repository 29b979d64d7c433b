"""Limits of reasoning and answer, and system text, over the wire: gRPC, SDK, command line, HTTP's forms."""

import io

import grpc
import pytest

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from tests.client.commands.test_stored_images import kestrel as kestrel
from tests.fake_runtime import FakeRuntime
from tests.service.conftest import LIMITS
from tests.service.statuses import failure

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


def thinks_long(fed):
    """Reasoning without end; the answer "yes"."""
    said = fed[fed.index(4) + 1 :]
    if 3 not in said:
        return 100 + ord("x")
    answered = len(said) - said.index(3) - 1
    return [*(100 + letter for letter in b"yes"), 0][min(answered, 3)]


async def test_a_limit_of_the_reasoning(serve):
    served = await serve(FakeRuntime(LIMITS, thinks_long))
    sampling = {"max_tokens": 9, "sampling": common_pb2.Sampling(temperature=0)}
    request = pb.QueryRequest(query=pb.QueryTask(question="why?", reasoning=True, **sampling))
    plain = await served.vision.Query(request)
    (answer,) = plain.answers
    assert (plain.usage.reasoning_tokens, answer.finish_reason) == (9, LENGTH)
    assert answer.reasoning.finish_reason == LENGTH and answer.text == "yes"
    request.query.max_reasoning_tokens = 4
    response = await served.vision.Query(request)
    (cut,) = response.answers
    assert (response.usage.reasoning_tokens, cut.reasoning.text) == (4, "xxxx")
    assert (cut.finish_reason, cut.reasoning.finish_reason, cut.text) == (STOP, LENGTH, "yes")
    stream = served.vision.StreamQuery(request)
    final = [event async for event in stream][-1].final
    assert final.answers[0].reasoning == cut.reasoning
    named = pb.RunSkillRequest(skill=pb.SkillTask(name="query", **sampling))
    named.skill.arguments.update({"question": "why?", "reasoning": True})
    named.skill.settings.update({"max_reasoning_tokens": 4})
    output = (await served.vision.RunSkill(named)).output
    assert output["reasoning"]["finish_reason"] == "length" and output["answer"] == "yes"


@pytest.mark.parametrize(
    ("most", "reasoning", "told"),
    [(0, True, "at least 1"), (3, False, "without reasoning"), (290, True, "+ 10 for the answer")],
)
async def test_other_limits_are_refused(serve, most, reasoning, told):
    served = await serve()
    sampling = {"max_tokens": 9, "max_reasoning_tokens": most}
    request = pb.QueryRequest(query=pb.QueryTask(question="why?", reasoning=reasoning, **sampling))
    status = await failure(served.vision.Query(request))
    assert status.code is grpc.StatusCode.INVALID_ARGUMENT and told in status.message
    assert status.fields == ["query.max_reasoning_tokens"]


async def test_the_command_line_has_both(kestrel, monkeypatch):
    asked = await kestrel("query", "Be brief.\n\nwhy?", "--temperature", 0, "--max-tokens", 4)
    flags = ["--system", "Be brief.", "--temperature", 0, "--max-tokens", 4]
    assert await kestrel("query", "why?", *flags) == asked
    thinking = [*flags, "--reasoning", "--max-reasoning-tokens", 2, "--json"]
    status, told, errors = await kestrel("query", "why?", *thinking)
    assert (status, errors) == (0, "") and '"reasoning_tokens": 2' in told
    image = "clients/python/kestrel_client/commands/demo.jpg"
    _, joined, _ = await kestrel("query", image, "Be brief.\n\nwhy?", *flags[2:])
    monkeypatch.setattr("sys.stdin", io.StringIO("why?\n"))
    assert (await kestrel("chat", image, *flags))[1] == joined
