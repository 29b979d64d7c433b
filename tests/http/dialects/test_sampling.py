"""Settings of sampling in all dialects: the forms of their values, and limits above the room for tokens."""

from typing import Any

import pytest

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine.types.step import Row, SampleSpec, StepToken
from tests.engine.fakes import never_ends
from tests.fake_runtime import FakeRuntime
from tests.service.conftest import LIMITS

PATHS = ("/v1/query", "/v1/chat/completions", "/v1/completions", "/api/generate", "/api/chat")
USER = [{"role": "user", "content": "What?"}]


def body(path: str, **settings: Any) -> dict[str, Any]:
    """A request with settings under the names of kestrel.v1."""
    if path == "/v1/query":
        return {"question": "What?", "settings": settings}
    if path.startswith("/v1"):
        asked = {"prompt": "What?"} if path == "/v1/completions" else {"messages": USER}
        return {**asked, **settings}
    names = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
    options = {names.get(name, name): value for name, value in settings.items()}
    asked = {"prompt": "What?"} if path == "/api/generate" else {"messages": USER}
    return {**asked, "options": options, "stream": False}


def num_tokens(answer: dict[str, Any]) -> int:
    return int(
        answer.get("eval_count")
        or answer.get("usage", {}).get("completion_tokens")
        or answer["metrics"]["output_tokens"]
    )


class RecordingRuntime(FakeRuntime):
    """Notes how the last token was drawn."""

    drawn: SampleSpec

    def sample(self, row: Row) -> StepToken:
        assert row.sample is not None
        self.drawn = row.sample
        return super().sample(row)


@pytest.mark.parametrize("path", PATHS)
async def test_settings_are_those_of_the_query(http, path: str):
    runtime = RecordingRuntime(LIMITS, never_ends)
    served, client = await http(runtime=runtime)
    settings: dict[str, Any] = {"temperature": 1.5, "top_p": 0.75, "top_k": 40, "min_p": 0.125}
    settings |= {"seed": 7}
    text = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    task = pb.QueryTask(question="What?", sampling=settings, text=text, max_tokens=30)
    await served.vision.Query(pb.QueryRequest(query=task))
    settings |= {**text, "max_tokens": 30}
    expected = runtime.drawn
    assert expected.rule.edits and expected.sampling.top_k == 40
    for given in (settings, {name: float(value) for name, value in settings.items()}):
        answer = (await client.post(path, json=body(path, **given))).json()
        assert runtime.drawn == expected and num_tokens(answer) == 30
    plain = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "top_k": -1}
    for given in ({"top_p": 0}, {"top_p": 0.0, "temperature": 1.5}, {"temperature": 0}):
        asked = body(path, max_tokens=3, stop=[""], **plain, **given)
        assert (await client.post(path, json=asked)).status_code == 200
        sampling = runtime.drawn.sampling
        assert sampling.temperature == 0 and sampling.top_k == 0 and not runtime.drawn.rule.edits


@pytest.mark.parametrize("path", PATHS)
async def test_errors_have_the_name_that_was_sent(http, path: str):
    _, client = await http()
    before = {"/v1/query": "settings.", "/api/generate": "options.", "/api/chat": "options."}
    renamed = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
    for setting, value, part in (
        ("max_tokens", 5.5, "must be a whole number, got 5.5"),
        ("max_tokens", "5", "must be a whole number, got a string"),
        ("max_tokens", True, "must be a whole number, got true or false"),
        ("top_p", 1.5, "1.5 is not in"),
        ("top_p", -0.5, "-0.5 is not in"),
        ("min_p", 2, "2.0 is not in"),
        ("repetition_penalty", 99, "99.0 is not in"),
        ("presence_penalty", 3, "3.0 is not in"),
        ("stop", [3], "must be a string, got a number"),
    ):
        response = await client.post(path, json=body(path, **{setting: value}))
        assert response.status_code == 400, (setting, response.text)
        error = response.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        name = renamed.get(setting, setting) if path.startswith("/api") else setting
        assert message.startswith(before.get(path, "") + name), message
        assert part in message
    if path.startswith("/v1") and path != "/v1/query":
        for fields, name in (
            ({"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens"),
            ({"repeat_penalty": 99}, "repeat_penalty"),
            ({"temperature": 99}, "temperature"),
            ({"temperature": -0.1}, "temperature"),
        ):
            response = await client.post(path, json={**body(path), **fields})
            assert response.json()["error"]["param"] == name, response.text


@pytest.mark.parametrize("path", PATHS)
async def test_a_limit_above_the_room_is_the_room(http, path: str):
    served, client = await http(runtime=FakeRuntime(LIMITS, never_ends))
    plain = (await client.post(path, json=body(path, max_tokens=1))).json()
    prompt = (
        plain.get("prompt_eval_count")
        or plain.get("usage", {}).get("prompt_tokens")
        or plain["metrics"]["input_tokens"]
    )
    room = served.engine.info.max_context - prompt
    unlimited = () if path == "/v1/query" else (-1,) if path.startswith("/v1") else (-2, -1, 0)
    for most in (room + 1, 100_000, 2**40, *unlimited):
        answer = await client.post(path, json=body(path, max_tokens=most))
        assert answer.status_code == 200, answer.text
        assert num_tokens(answer.json()) == room
    asked = {**body(path, max_tokens=100_000), "stream": True}
    streamed = await client.post(path, json=asked)
    assert streamed.status_code == 200 and "error" not in streamed.text[-300:]
    too_few = body(path, max_tokens=-3 if path.startswith("/v1") else 5)
    if path.startswith("/v1"):
        assert (await client.post(path, json=too_few)).status_code == 400


async def test_a_limit_above_that_of_the_server_is_that_of_the_server(http):
    _, client = await http(runtime=FakeRuntime(LIMITS, never_ends), max_new_tokens=20)
    answer = (await client.post("/v1/query", json=body("/v1/query", max_tokens=50))).json()
    assert num_tokens(answer) == 20
    samples = {**body("/v1/chat/completions", max_tokens=50), "n": 2}
    answer = (await client.post("/v1/chat/completions", json=samples)).json()
    assert num_tokens(answer) == 40


async def test_the_limit_of_an_answer_leaves_room_for_its_reasoning(http):
    served, client = await http(runtime=FakeRuntime(LIMITS, never_ends))
    asked = body("/v1/chat/completions", max_tokens=9999, max_reasoning_tokens=10)
    asked["reasoning"] = True
    usage = (await client.post("/v1/chat/completions", json=asked)).json()["usage"]
    room = served.engine.info.max_context - usage["prompt_tokens"]
    assert usage["completion_tokens"] == room - 1  # The token between them is not counted.
    assert usage["completion_tokens_details"]["reasoning_tokens"] <= 11
    asked |= {"max_reasoning_tokens": 9999, "max_tokens": 1}
    error = (await client.post("/v1/chat/completions", json=asked)).json()["error"]
    assert error["param"] == "max_reasoning_tokens", error


async def test_by_grpc_such_a_limit_is_an_error(http):
    served, _ = await http()
    request = pb.QueryRequest(query={"question": "What?", "max_tokens": 100_000})
    with pytest.raises(Exception, match="exceeds the"):
        await served.vision.Query(request)


async def test_a_seed_that_means_none(http):
    runtime = RecordingRuntime(LIMITS, never_ends)
    _, client = await http(runtime=runtime)
    for path in ("/api/generate", "/api/chat"):
        seeds = set()
        for _ in range(2):
            asked = body(path, seed=-1, temperature=1, max_tokens=2)
            assert (await client.post(path, json=asked)).status_code == 200
            seeds.add(runtime.drawn.sampling.seed)
        assert len(seeds) == 2 and 2**64 - 1 not in seeds
