"""Anthropic's Messages over the fake runtime: each is what chat completions answer to the same conversation."""

import json
from typing import Any

import httpx2
import pytest

from kestrel_engine import EngineOverloaded, Quota
from kestrel_grpc.settings.security import SecurityConfig
from tests.http.conftest import data_url, question_with_stop
from tests.http.dialects.test_responses import chat, events
from tests.service.conftest import NO_END, EndlessRuntime
from tests.waiting import until

PATH = "/v1/messages"
LIMITED: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
USER: dict[str, Any] = {"role": "user", "content": "What?"}


def image_block(url: str) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/jpeg", "data": url.partition(",")[2]}
    return {"type": "image", "source": source}


async def send(client: Any, **asked: Any) -> dict[str, Any]:
    response = await client.post(PATH, json={**LIMITED, **asked})
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["id"] == f"msg_{response.headers['request-id']}"
    return dict(body)


async def test_a_message_is_the_completion_of_the_same_conversation(http):
    _, client = await http()
    url = data_url()
    asked = {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [image_block(url)]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "x", "signature": ""},
                    {"type": "text", "text": "A dot."},
                ],
            },
            {"role": "user", "content": "And its colour?"},
        ],
        "thinking": {"type": "enabled", "budget_tokens": 6},
        "metadata": {"user_id": "a"},
    }
    same = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image_url", "image_url": url}]},
        {"role": "assistant", "content": "A dot."},
        {"role": "user", "content": "And its colour?"},
    ]
    expected = await chat(client, same, reasoning_effort="high", max_reasoning_tokens=6)
    message, used = expected["choices"][0]["message"], expected["usage"]
    body = await send(client, **asked)
    thinking, text = body["content"]
    assert thinking == {
        "type": "thinking",
        "thinking": message["reasoning_content"],
        "signature": "",
    }
    assert text == {"type": "text", "text": message["content"]}
    assert (body["stop_reason"], body["stop_sequence"]) == ("max_tokens", None)
    usage = body["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == used["prompt_tokens"]
    assert usage["output_tokens"] == used["completion_tokens"]
    details = used["completion_tokens_details"]
    assert usage["output_tokens_details"]["thinking_tokens"] == details["reasoning_tokens"] > 0

    async def streamed(**others: Any) -> list[dict[str, Any]]:
        response = await client.post(PATH, json={**LIMITED, **asked, **others, "stream": True})
        return events(response.text)

    stream = await streamed()
    names = [event["type"] for event in stream]
    assert [name for place, name in enumerate(names) if names[place - 1] != name] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_stop") * 2,
        *("message_delta", "message_stop"),
    ]
    assert stream[0]["message"]["content"] == [] and stream[0]["message"]["stop_reason"] is None
    texts = ["", ""]
    for event in stream:
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            texts[event["index"]] += delta[delta["type"].removesuffix("_delta")]
    assert texts == [message["reasoning_content"], message["content"]]
    assert stream[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert stream[-2]["usage"]["output_tokens"] == used["completion_tokens"]

    hidden = {"thinking": {"type": "enabled", "budget_tokens": 6, "display": "omitted"}}
    body = await send(client, **{**asked, **hidden})
    assert body["content"] == [{**thinking, "thinking": ""}, text]
    shown = [each for each in await streamed(**hidden) if each["type"] == "content_block_delta"]
    assert {each["delta"]["type"] for each in shown} == {"text_delta"}


async def test_the_stop_sequence_that_ended_the_answer_is_named(http):
    _, client = await http()

    async def ask(question: str) -> str:
        body = await send(client, messages=[{**USER, "content": question}], max_tokens=40)
        return str(body["content"][0]["text"])

    question, text, stop = await question_with_stop(ask)
    asked = {"messages": [{**USER, "content": question}], "max_tokens": 40}
    for stops in ([stop], ["not there", stop, f"{stop}!"]):
        body = await send(client, **asked, stop_sequences=stops)
        assert body["content"][0]["text"] == text[: text.index(stop)]
        assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", stop)
    body = await send(client, **asked, stop_sequences=["not there"])
    assert body["content"][0]["text"] == text and body["stop_sequence"] is None
    streamed = {**LIMITED, **asked, "stop_sequences": [stop], "stream": True}
    *_, last, _ = events((await client.post(PATH, json=streamed)).text)
    assert last["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stop}


async def test_forms_and_boxes(http):
    _, client = await http()
    properties = {"ok": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["ok"]}
    schema["additionalProperties"] = False
    form = {"format": {"type": "json_schema", "schema": schema}}
    body = await send(client, messages=[USER], output_config=form, max_tokens=40)
    assert list(json.loads(body["content"][0]["text"])) == ["ok"]
    assert body["stop_reason"] == "end_turn"
    url = data_url(60, 40)
    text = {"type": "text", "text": "Detect: dot"}
    parts = [{"type": "image_url", "image_url": url}, text]
    expected = await chat(client, [{"role": "user", "content": parts}])
    body = await send(client, messages=[{"role": "user", "content": [image_block(url), text]}])
    assert body["content"][0]["text"] == expected["choices"][0]["message"]["content"]


def blocks(*given: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*given]}]}


CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "must hold a user message"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", "must be"),
    ({"messages": [{**USER, "image": "b"}]}, "messages[0].image", "in model"),
    (blocks({"type": "document"}), "messages[0].content[0].type", "must be text or image"),
    (blocks({"type": "tool_result"}), "messages[0].content[0].type", "must be text or image"),
    (
        blocks({"type": "image", "source": {"type": "file"}}),
        "messages[0].content[0].source.type",
        "must be base64 or url, got 'file'",
    ),
    (
        blocks({"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}),
        "messages[0].content[0].source.url",
        "fetches none",
    ),
    ({"system": [image_block(data_url())]}, "system", "only user messages"),
    ({"tools": [{"name": "a"}]}, "tools", "call no tools"),
    ({"thinking": {"type": "on"}}, "thinking.type", "must be one of"),
    ({"thinking": {"type": "enabled", "display": "x"}}, "thinking.display", "must be one of"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5000}}, "thinking.budget_tokens", "5000"),
    ({"temperature": 1.5}, "temperature", "must be in [0, 1], got 1.5"),
    ({"max_tokens": -1}, "max_tokens", "must be in [1,"),
    ({"stop": "a"}, "stop", "use stop_sequences"),
    ({"stop_sequences": ["x" * 999]}, "stop_sequences[0]", "the limit is"),
    ({"stop_sequence": ["a"]}, "stop_sequence", "did you mean stop_sequences?"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type", "json_schema"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"properties": {"a": 3}}}}},
        "output_config.format.schema",
        "at /properties/a",
    ),
    ({"model": "other"}, "model", "other"),
]


async def test_what_is_refused(http):
    _, client = await http()
    for body, field, why in CASES:
        response = await client.post(PATH, json={"messages": [USER], **LIMITED, **body})
        assert response.status_code == (404 if field == "model" else 400), response.text
        told = response.json()
        assert told["type"] == "error" and told["request_id"] == response.headers["request-id"]
        kind = "not_found_error" if field == "model" else "invalid_request_error"
        error = told["error"]
        assert error["type"] == kind and error["message"].startswith(f"{field}: "), error
        assert why in error["message"]


async def test_either_header_holds_the_token(http):
    security = SecurityConfig(api_key="k" * 40)
    _, client = await http(server_config={"security": security})
    asked = {"messages": [USER], **LIMITED}
    for headers in ({"x-api-key": "k" * 40}, {"authorization": f"Bearer {'k' * 40}"}):
        response = await client.post(
            PATH, json=asked, headers={**headers, "anthropic-version": "2023-06-01"}
        )
        assert response.status_code == 200, response.text
    response = await client.post(PATH, json=asked, headers={"x-api-key": "other"})
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    "quota, status, kind",
    [(None, 529, "overloaded_error"), (Quota("a", "calls", 2, 1), 429, "rate_limit_error")],
)
async def test_a_busy_server_is_not_a_caller_beyond_its_share(
    http, monkeypatch, quota, status, kind
):
    served, client = await http()

    async def start(request):
        raise EngineOverloaded("the queue is full", retry_after_s=3, quota=quota)

    monkeypatch.setattr(served.engine, "start", start)
    response = await client.post(PATH, json={"messages": [USER], **LIMITED})
    assert response.status_code == status and response.headers["retry-after"] == "3"
    assert response.json()["error"]["type"] == kind


async def test_a_stream_that_fails_ends_with_an_error(moved_clock, http):
    _, client = await http(runtime=EndlessRuntime())
    asked = {"messages": [USER], "max_tokens": NO_END, "stream": True}
    text = ""
    async with client.stream("POST", PATH, json=asked, timeout=httpx2.Timeout(None)) as response:
        async for piece in response.aiter_text():
            text += piece
            if "content_block_delta" in piece:
                moved_clock.advance(1000)
    last = events(text)[-1]
    assert last["type"] == "error" and last["error"]["type"] == "timeout_error"


@pytest.mark.parametrize(
    "path, asked", [(PATH, {"messages": [USER]}), ("/v1/responses", {"input": "What?"})]
)
async def test_a_client_that_leaves_cancels_its_request(http, path, asked):
    served, client = await http(runtime=EndlessRuntime())
    limit = {"max_tokens" if path == PATH else "max_output_tokens": NO_END}
    async with client.stream("POST", path, json={**asked, **limit, "stream": True}) as response:
        await anext(response.aiter_text())
        assert served.engine.num_requests == 1
    await until(lambda: served.engine.num_requests == 0)
