"""OpenAI's Responses over the fake runtime: each is what chat completions answer to the same conversation."""

import json
from typing import Any

from tests.http.conftest import data_url
from tests.http.dialects.test_openai import chunks
from tests.service.conftest import NO_END, EndlessRuntime

PATH = "/v1/responses"
LIMITED: dict[str, Any] = {"temperature": 0, "max_output_tokens": 12}


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each under its own name."""
    found = []
    for part in text.strip().split("\n\n"):
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def chat(client: Any, messages: list[dict[str, Any]], **others: Any) -> dict[str, Any]:
    asked = {"messages": messages, "temperature": 0, "max_tokens": 12, **others}
    response = await client.post("/v1/chat/completions", json=asked)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def respond(client: Any, **asked: Any) -> dict[str, Any]:
    response = await client.post(PATH, json={**LIMITED, **asked})
    assert response.status_code == 200, response.text
    return dict(response.json())


async def test_a_response_is_the_completion_of_the_same_conversation(http):
    _, client = await http()
    url = data_url()
    image = {"type": "input_image", "image_url": url, "detail": "original"}
    asked = {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [image]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "x"}]},
            {
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "A dot.", "annotations": []}],
            },
            {"role": "user", "content": [{"type": "input_text", "text": "And its colour?"}]},
        ],
        "reasoning": {"effort": "high", "summary": "auto"},
        "metadata": {"a": "b"},
        "store": True,
    }
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image_url", "image_url": url}]},
        {"role": "assistant", "content": "A dot."},
        {"role": "user", "content": "And its colour?"},
    ]
    expected = await chat(client, messages, reasoning_effort="high")
    body = await respond(client, **asked)
    message = expected["choices"][0]["message"]
    reasoned, answered = body["output"]
    assert [part["text"] for part in reasoned["summary"]] == [message["reasoning_content"]]
    assert [part["text"] for part in answered["content"]] == [message["content"]]
    used = expected["usage"]
    assert body["usage"]["input_tokens"] == used["prompt_tokens"]
    assert body["usage"]["output_tokens"] == used["completion_tokens"]
    assert body["usage"]["total_tokens"] == used["total_tokens"]
    assert body["usage"]["output_tokens_details"] == used["completion_tokens_details"]
    assert body["instructions"] == "Be brief." and body["metadata"] == {"a": "b"}
    assert body["store"] is False and body["reasoning"]["effort"] == "high"
    assert expected["choices"][0]["finish_reason"] == "length"
    assert body["status"] == answered["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}

    streamed = events((await client.post(PATH, json={**LIMITED, **asked, "stream": True})).text)
    assert [event["sequence_number"] for event in streamed] == [*range(len(streamed))]
    names = [event["type"].removeprefix("response.") for event in streamed]
    assert [name for place, name in enumerate(names) if names[place - 1] != name] == [
        *("created", "in_progress", "output_item.added", "reasoning_summary_part.added"),
        *("reasoning_summary_text.delta", "reasoning_summary_text.done"),
        *("reasoning_summary_part.done", "output_item.done", "output_item.added"),
        *("content_part.added", "output_text.delta", "output_text.done", "content_part.done"),
        *("output_item.done", "incomplete"),
    ]
    texts = {"reasoning_summary_text": "", "output_text": ""}
    for name, event in zip(names, streamed, strict=True):
        if name.endswith(".delta"):
            texts[name.removesuffix(".delta")] += event["delta"]
    assert [*texts.values()] == [message["reasoning_content"], message["content"]]
    last = streamed[-1]["response"]
    done = [event["item"] for event in streamed if event["type"].endswith("item.done")]
    assert done == last["output"]
    for each in (body, last):  # What differs between two requests.
        del each["id"], each["created_at"], each["output"], each["usage"]
    assert last == body


async def test_the_form_of_the_answer(http):
    _, client = await http()
    properties = {"ok": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["ok"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    body = await respond(client, input="What?", text={"format": form}, max_output_tokens=40)
    [answered] = body["output"]
    assert list(json.loads(answered["content"][0]["text"])) == ["ok"]
    assert body["status"] == "completed" and body["text"] == {"format": form}
    unknown = {"type": "json_object", "made_up": json.loads("[" * 300 + "]" * 300)}
    body = await respond(client, input="What?", text={"format": unknown})
    assert body["text"] == {"format": {"type": "json_object"}}
    assert body["output"][0]["content"][0]["text"].startswith("{")


async def test_boxes(http):
    _, client = await http()
    url = data_url(60, 40)
    parts = [
        {"type": "input_image", "image_url": url},
        {"type": "input_text", "text": "Detect: dot"},
    ]
    given = [{"role": "user", "content": parts}]
    expected = await chat(client, given)
    content = expected["choices"][0]["message"]["content"]
    body = await respond(client, input=given)
    assert json.loads(content) and body["output"][0]["content"][0]["text"] == content
    streamed = await client.post(PATH, json={**LIMITED, "input": given, "stream": True})
    assert events(streamed.text)[-1]["response"]["output"][0]["content"][0]["text"] == content
    chat_asked = {"messages": given, "temperature": 0, "max_tokens": 12, "stream": True}
    streamed = await client.post("/v1/chat/completions", json=chat_asked)
    assert chunks(streamed.text)[1]["choices"][0]["delta"]["content"] == content


CASES: list[tuple[dict[str, Any], str, str]] = [
    ({}, "input", "must hold a user message"),
    (
        {"text": {"format": {"type": "json_schema", "schema": {}, "strict": [[]]}}},
        "text.format.strict",
        "must be true or false",
    ),
    (
        {"text": {"format": {"schema": {"a": 1}}}},
        "text.format.schema",
        "needs the type json_schema",
    ),
    ({"input": 5}, "input", "must be a string or a list of messages"),
    ({"input": [{"type": "function_call"}]}, "input[0].type", "must be message"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]", "stores no responses"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "must be system"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
        "input[0].content[0].type",
        "must be text or image_url",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
        "input[0].content[0].file_id",
        "is not read here",
    ),
    ({"input": [{"role": "user", "content": "a", "image": "b"}]}, "input[0].image", "in model"),
    ({"previous_response_id": "r"}, "previous_response_id", "stores no responses"),
    ({"background": True}, "background", "stores no responses"),
    ({"tools": [{}]}, "tools", "call no tools"),
    ({"messages": [{}]}, "messages", "use input"),
    ({"max_tokens": 5}, "max_tokens", "use max_output_tokens"),
    ({"max_output_tokens": 0}, "max_output_tokens", "must be in [1,"),
    ({"max_output_token": 5}, "max_output_token", "did you mean max_output_tokens?"),
    ({"temperature": 3}, "temperature", "must be in [0, 2], got 3"),
    ({"response_format": {"type": "text"}}, "response_format", "use text.format"),
    ({"include": ["message.output_text.logprobs"]}, "include", "use /v1/chat/completions"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "must be one of"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "must be text, json_object or"),
    (
        {"text": {"format": {"type": "json_schema", "schema": {"properties": {"a": 3}}}}},
        "text.format.schema",
        "at /properties/a",
    ),
    ({"metadata": {"a": 5}}, "metadata.a", "must be a text"),
    ({"metadata": {str(key): "" for key in range(17)}}, "metadata", "has 17 keys; the limit is 16"),
    ({"model": "other"}, "model", "other"),
]


async def test_what_is_refused(http):
    _, client = await http()
    for body, field, why in CASES:
        answer = await client.post(PATH, json={"input": "What?", **body} if body else body)
        error = answer.json()["error"]
        assert answer.status_code == (404 if field == "model" else 400), error
        assert error["param"] == field and why in error["message"], error


async def test_a_stream_that_fails_ends_with_a_failed_response(moved_clock, http):
    _, client = await http(runtime=EndlessRuntime())
    asked = {"input": "What?", "max_output_tokens": NO_END, "stream": True}
    text = ""
    async with client.stream("POST", PATH, json=asked, timeout=None) as response:
        async for piece in response.aiter_text():
            text += piece
            if "output_text.delta" in piece:
                moved_clock.advance(1000)
    *_, before, last = events(text)
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["sequence_number"] == before["sequence_number"] + 1
    error = last["response"]["error"]
    assert error["code"] == "server_error" and error["type"] == "timeout_error"
