"""OpenAI's chat completions over the fake runtime."""

import base64
import json
from typing import Any

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_grpc.http.dialects.models import served_name
from tests.http.conftest import data_url
from tests.service.conftest import NO_END, EndlessRuntime


def user(text: str, url: str | None = None) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if url is not None:
        parts.insert(0, {"type": "image_url", "image_url": {"url": url, "detail": "low"}})
    return {"role": "user", "content": parts}


def chunks(text: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


ASKED: dict[str, Any] = {"model": "moondream3-preview", "temperature": 0, "max_tokens": 12}


async def test_a_conversation_is_a_query_with_its_history(http):
    served, client = await http()
    url = data_url()
    messages = [
        {"role": "system", "content": "Be brief."},
        user("What is it?", url),
        {"role": "assistant", "content": "A dot."},
        {"role": "user", "content": "And its colour?"},
    ]
    body = (await client.post("/v1/chat/completions", json={**ASKED, "messages": messages})).json()
    request = pb.QueryRequest(images=[{"encoded": base64.b64decode(url.partition(",")[2])}])
    request.query.question = "And its colour?"
    request.query.history.add(question="Be brief.\n\nWhat is it?", answer="A dot.")
    request.query.sampling.temperature, request.query.max_tokens = 0, 12
    response = await served.vision.Query(request)
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": response.answers[0].text}
    assert body["usage"]["prompt_tokens"] == response.usage.input_tokens
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    assert body["model"] == response.info.model


async def test_what_lmms_eval_sends_is_a_question_about_the_image(http):
    """Its client puts the text before the images, which are PNGs, and greedy settings beside."""
    _, client = await http()
    before, after = [], []
    for asked, parts in ((before, [0, 1]), (after, [1, 0])):
        content = user("How many dots?", data_url())["content"]
        messages = [{"role": "user", "content": [content[part] for part in parts]}]
        body = {
            "model": "moondream3-preview",
            "max_tokens": 16,
            "temperature": 0,
            "messages": messages,
        }
        asked.append((await client.post("/v1/chat/completions", json=body)).json()["choices"])
    assert before == after and before[0][0]["message"]["content"]


async def test_a_response_format_gives_json(http):
    _, client = await http()
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    asked = {**ASKED, "max_tokens": 40, "messages": [user("What?")]}
    asked["response_format"] = schema_format(schema)
    body = (await client.post("/v1/chat/completions", json=asked)).json()
    [choice] = body["choices"]
    assert list(json.loads(choice["message"]["content"])) == ["ok"]
    assert choice["finish_reason"] == "stop"
    asked["response_format"] = {"type": "json_object", "schema": schema}
    same = (await client.post("/v1/chat/completions", json=asked)).json()
    assert same["choices"] == body["choices"]
    asked["response_format"] = {"type": "json_object"}
    body = (await client.post("/v1/chat/completions", json=asked)).json()
    assert body["choices"][0]["message"]["content"].startswith("{")
    asked["response_format"] = {"type": "text"}
    body = (await client.post("/v1/chat/completions", json=asked)).json()
    assert not body["choices"][0]["message"]["content"].startswith("{")


def two_images(text: str, url: str) -> dict[str, Any]:
    message = user(text, url)
    return {**message, "content": [*message["content"], message["content"][0]]}


async def test_a_message_may_hold_several_images(http):
    served, client = await http()
    first, second = data_url(), data_url(200)
    parts = [
        {"type": "image_url", "image_url": {"url": first}},
        {"type": "text", "text": "Compare."},
        {"type": "image_url", "image_url": {"url": second}},
    ]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "Both red."},
        user("And this?", second),
    ]
    body = (await client.post("/v1/chat/completions", json={**ASKED, "messages": messages})).json()
    images = [base64.b64decode(url.partition(",")[2]) for url in (first, second)]
    request = pb.QueryRequest(images=[{"encoded": images[each]} for each in (0, 1, 1)])
    request.query.question = "And this?"
    request.query.history.add(question="Compare.", answer="Both red.", num_images=2)
    request.query.sampling.temperature, request.query.max_tokens = 0, 12
    response = await served.vision.Query(request)
    [choice] = body["choices"]
    assert choice["message"]["content"] == response.answers[0].text
    assert body["usage"]["prompt_tokens"] == response.usage.input_tokens
    assert response.usage.image_tokens == 3 * served.engine.info.image_positions


async def test_a_stream_has_a_role_deltas_a_reason_and_the_usage(http):
    _, client = await http()
    asked = {**ASKED, "messages": [user("What?", data_url())]}
    whole = (await client.post("/v1/chat/completions", json=asked)).json()
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    first, *middle, last, usage = chunks(
        (await client.post("/v1/chat/completions", json=asked)).text
    )
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle)
    assert text == whole["choices"][0]["message"]["content"]
    assert last["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] > 0
    assert len({chunk["id"] for chunk in (first, *middle, last, usage)}) == 1


async def test_stop_ends_the_answer(http):
    _, client = await http()
    asked = {**ASKED, "max_tokens": 40, "messages": [user("What?", data_url())]}
    whole = (await client.post("/v1/chat/completions", json=asked)).json()
    text = whole["choices"][0]["message"]["content"]
    assert whole["choices"][0]["finish_reason"] == "length" and len(text) > 6
    stop = text[3:6]
    expected = text[: text.index(stop)]
    for given in (stop, ["not in the text", stop], [stop]):
        asked["stop"] = given
        body = (await client.post("/v1/chat/completions", json=asked)).json()
        assert body["choices"][0]["message"]["content"] == expected
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] < whole["usage"]["completion_tokens"]
    streamed = chunks(
        (await client.post("/v1/chat/completions", json={**asked, "stream": True})).text
    )
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in streamed) == expected
    assert streamed[-1]["choices"][0]["finish_reason"] == "stop"


async def test_several_samples_are_several_choices(http):
    _, client = await http()
    asked = {**ASKED, "messages": [user("What?", data_url())], "temperature": 1, "seed": 5}
    alone = [
        (await client.post("/v1/chat/completions", json={**asked, "seed": 5 + i})).json()
        for i in range(3)
    ]
    body = (await client.post("/v1/chat/completions", json={**asked, "n": 3})).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    texts = [each["choices"][0]["message"]["content"] for each in alone]
    assert [choice["message"]["content"] for choice in body["choices"]] == texts
    used = [each["usage"]["completion_tokens"] for each in alone]
    assert body["usage"]["completion_tokens"] == sum(used)
    one = (await client.post("/v1/chat/completions", json={**asked, "n": 1})).json()
    assert one["choices"] == alone[0]["choices"]


async def test_log_probabilities_of_the_answer(http):
    _, client = await http()
    asked = {**ASKED, "max_tokens": 40, "messages": [user("What?", data_url())]}
    asked |= {"logprobs": True, "top_logprobs": 0}
    whole = (await client.post("/v1/chat/completions", json=asked)).json()
    [choice] = whole["choices"]
    tokens = choice["logprobs"]["content"]
    assert len(tokens) == whole["usage"]["completion_tokens"] == 40
    joined = bytes(byte for token in tokens for byte in token["bytes"])
    assert joined.decode(errors="replace") == choice["message"]["content"]
    assert all(token["logprob"] <= 0 and token["top_logprobs"] == [] for token in tokens)
    streamed = chunks(
        (await client.post("/v1/chat/completions", json={**asked, "stream": True})).text
    )
    choices = [chunk["choices"][0] for chunk in streamed]
    assert choices[0]["logprobs"] is None
    told = [token for each in choices if each["logprobs"] for token in each["logprobs"]["content"]]
    assert told == tokens
    text = choice["message"]["content"]
    stopped = {**asked, "stop": text[3:6], "stream": True}
    streamed = chunks((await client.post("/v1/chat/completions", json=stopped)).text)
    told = [
        token
        for chunk in streamed
        if chunk["choices"][0]["logprobs"]
        for token in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert told == tokens[: len(told)] and 6 <= len(told) < 40


async def test_detect_and_point_answer_with_pixels(http):
    _, client = await http()
    url = data_url(60, 40)
    for skill, key in (("Detect", "bbox_2d"), ("point", "point_2d")):
        asked = {**ASKED, "messages": [user(f"{skill}: dot", url)]}
        body = (await client.post("/v1/chat/completions", json=asked)).json()
        content = body["choices"][0]["message"]["content"]
        found = json.loads(content)
        assert all(each["label"] == "dot" for each in found)
        for each in found:
            xs, ys = each[key][::2], each[key][1::2]
            assert all(0 <= x <= 60 for x in xs) and all(0 <= y <= 40 for y in ys)
        streamed = chunks(
            (await client.post("/v1/chat/completions", json={**asked, "stream": True})).text
        )
        assert streamed[1]["choices"][0]["delta"]["content"] == content


async def test_errors_name_the_message(http):
    _, client = await http()
    url, plain = data_url(), {"messages": [user("a")]}
    assistant = {"role": "assistant", "content": "Yes."}
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"messages": []}, "messages", "must hold a user message"),
        ({"messages": [assistant]}, "messages", "must hold a user message"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "got 'tool'"),
        (
            {"messages": [user("a"), {**user("b", url), "role": "assistant"}, user("c")]},
            "messages[1].content",
            "only user messages",
        ),
        ({"messages": [two_images("Detect: a", url)]}, "messages", "hold 2 images"),
        ({"messages": [user("a", "https://x/y.png")]}, "messages[0].content[0].image_url", "none"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content[0].type", "audio"),
        ({**plain, "tools": [{}]}, "tools", "call no tools"),
        ({**plain, "n": 0}, "n", "must be in [1, 2147483647], got 0"),
        ({**plain, "n": -1}, "n", "must be in [1, 2147483647], got -1"),
        ({**plain, "n": 17}, "n", "17 is not in [1, 16]"),
        ({**plain, "n": 2, "stream": True}, "n", "must be 1 in a stream"),
        ({"messages": [user("Point: a", url)], "n": 2}, "n", "must be 1 for boxes and points"),
        ({**plain, "stop": ["x", 3]}, "stop[1]", "must be a string"),
        ({**plain, "stop": ["", "x" * 999]}, "stop[1]", "the limit is"),
        ({**plain, "stop": "x" * 999}, "stop", "the limit is"),
        ({**plain, "stop": {"x": 1}}, "stop", "must be a string or a list"),
        ({**plain, "temperature": 2.1}, "temperature", "must be in [0, 2], got 2.1"),
        ({"messages": [user("Detect: a", url)], "stop": ["x"]}, "stop", "not a setting"),
        ({**plain, "logprobs": 3}, "logprobs", "must be true or false"),
        ({**plain, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "must be from 0 to 20, got 21"),
        ({**plain, "top_logprobs": 2}, "top_logprobs", "set logprobs to true"),
        ({"messages": [user("Detect: a", url)], "logprobs": True}, "logprobs", "not a setting"),
        ({**plain, "presence_penalty": 2.5}, "presence_penalty", "2.5 is not in"),
        ({**plain, "frequency_penalty": -3}, "frequency_penalty", "-3.0 is not in"),
        ({**plain, "logit_bias": {"51200": 1}}, "logit_bias.51200", "0 to 51199"),
        ({**plain, "logit_bias": {"x": 1}}, "logit_bias.x", "id of a token"),
        ({**plain, "logit_bias": {"7": -101}}, "logit_bias.7", "-101.0 is not in"),
        ({**plain, "max_tokens": 0}, "max_tokens", "must be in [1,"),
        ({"messages": [user(" ")]}, "messages", "must hold a user message that has text"),
        (
            {**plain, "response_format": {"type": "text", "schema": {"a": 1}}},
            "response_format.schema",
            "belongs into json_schema",
        ),
        (
            {
                "messages": [user("a")],
                "response_format": {"type": "json_schema", "scheme": {"a": 1}},
            },
            "response_format.scheme",
            "did you mean schema?",
        ),
        (
            {**plain, "response_format": {"type": "xml"}},
            "response_format.type",
            "must be text, json_object or json_schema",
        ),
        (
            {**plain, "response_format": schema_format({"properties": {"a": 3}})},
            "response_format.json_schema.schema",
            "at /properties/a",
        ),
        (
            {"messages": [user("Detect: a", url)], "response_format": {"type": "json_object"}},
            "response_format",
            "must be text for boxes",
        ),
    ]  # fmt: skip
    for body, param, part in cases:
        response = await client.post("/v1/chat/completions", json={**ASKED, **body})
        error = response.json()["error"]
        assert response.status_code == 400, error
        assert error["param"] == param and part in error["message"], error
        assert error["type"] == "invalid_request_error"


async def test_paths_that_are_not_supported_say_what_to_do(http):
    _, client = await http()
    for path in ("embeddings", "made_up"):
        response = await client.post(f"/v1/{path}", json={"model": "x", "prompt": "Once"})
        error = response.json()["error"]
        assert response.status_code == 404 and error["code"] == "path_not_found"
        assert f"there is no path '/v1/{path}'" in error["message"]
        known = {"embeddings": "make no embeddings of texts"}
        assert known.get(path, "") in error["message"]


async def test_models_are_listed(http):
    served, client = await http()
    body = (await client.get("/v1/models")).json()
    name = served.engine.info.model
    assert [model["id"] for model in body["data"]] == [name]
    for asked in (name, "moondream", "vikhyatk/moondream2", "moondream/moondream3.1-9B-A2B"):
        assert (await client.get(f"/v1/models/{asked}")).json() == body["data"][0]
    unknown = await client.get("/v1/models/acme/gpt")
    assert unknown.status_code == 404 and unknown.json()["error"]["param"] == "model"


def test_a_name_of_the_hub_means_the_served_model_of_that_name():
    names = ["kestrel-tiny", "moondream3.1-9b-a2b", "vikhyatk/moondream2"]
    assert served_name("moondream/moondream3.1-9B-A2B", names) == "moondream3.1-9b-a2b"
    assert served_name("moondream2:1.8b", names) == "vikhyatk/moondream2"
    assert served_name("moondream3-preview", names) == "kestrel-tiny"
    assert served_name("gpt-4o", names) == "gpt-4o"


async def test_an_address_that_ends_with_a_slash(http):
    _, client = await http()
    asked = {**ASKED, "messages": [user("What?")]}
    assert (await client.post("/v1//chat/completions", json=asked)).status_code == 200
    assert (await client.get("/v1///models")).status_code == 200
    assert (await client.get("/v1//made_up")).status_code == 404


async def test_an_error_within_a_stream_is_its_last_event(moved_clock, http):
    _, client = await http(runtime=EndlessRuntime())
    asked = {**ASKED, "messages": [user("What?")], "max_tokens": NO_END, "stream": True}
    events = []
    url = "/v1/chat/completions"
    async with client.stream("POST", url, json=asked, timeout=None) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            events += [json.loads(line[6:])] if line else []
            if len(events) == 2:
                moved_clock.advance(1000)
    *pieces, last = events
    assert len(pieces) > 1 and all(piece["choices"] for piece in pieces)
    assert last["error"].keys() == {"message", "type", "param", "code"}
    assert last["error"]["code"] == "deadline_exceeded", last
