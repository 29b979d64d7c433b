"""Counts of tokens in Anthropic's and OpenAI's shapes: what the same conversation then uses."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http.conftest import data_url

ANTHROPIC, OPENAI = "/v1/messages/count_tokens", "/v1/responses/input_tokens"


async def used(client: Any, messages: list[dict[str, Any]], **others: Any) -> int:
    body = {"model": "moondream2", "messages": messages, "max_tokens": 1, **others}
    answer = (await client.post("/v1/chat/completions", json=body)).json()
    return int(answer["usage"]["prompt_tokens"])


async def test_the_count_is_the_usage_of_the_same_conversation(http):
    served, client = await http()
    url = data_url()
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image_url", "image_url": url}]},
        {"role": "assistant", "content": "A dot."},
        {"role": "user", "content": "And its colour?"},
    ]
    source = {"type": "base64", "media_type": "image/jpeg", "data": url.partition(",")[2]}
    anthropic = {
        "model": "moondream2",
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "image", "source": source}]},
            *chat[2:],
        ],
    }
    openai = {
        "model": "moondream2",
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_image", "image_url": url}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "A dot."}]},
            {"type": "message", **chat[3]},
        ],
    }
    counted = await client.post(ANTHROPIC, json=anthropic)
    assert not served.runtime.plans, "nothing is computed"
    expected = await used(client, chat)
    assert counted.json() == {"input_tokens": expected}
    counted = await client.post(OPENAI, json=openai)
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": expected}
    # With reasoning, and from a text alone.
    expected = await used(client, chat, reasoning_effort="high")
    thinking = {"type": "enabled", "budget_tokens": 1024}
    counted = await client.post(ANTHROPIC, json={**anthropic, "thinking": thinking})
    assert counted.json() == {"input_tokens": expected}
    counted = await client.post(OPENAI, json={**openai, "reasoning": {"effort": "high"}})
    assert counted.json()["input_tokens"] == expected
    expected = await used(client, [{"role": "user", "content": "Why?"}])
    counted = await client.post(OPENAI, json={"input": "Why?"})
    assert counted.json()["input_tokens"] == expected


CASES: list[tuple[str, dict[str, Any], str, str]] = [
    (ANTHROPIC, {}, "messages", "must hold a user message"),
    (ANTHROPIC, {"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", "must be"),
    (ANTHROPIC, {"messages": [], "tools": [{}]}, "tools", "call no tools"),
    (
        ANTHROPIC,
        {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
        "messages[0].content[0].type",
        "must be text or image, got 'document'",
    ),
    (
        ANTHROPIC,
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
        "messages[0].content[0].source.type",
        "must be base64 or url, got 'file'",
    ),
    (ANTHROPIC, {"thinking": {"type": "on"}}, "thinking.type", "must be one of"),
    (ANTHROPIC, {"system": [{"type": "image", "source": {"type": "base64", "data": "Qk0="}}]},
     "system", "only user messages"),
    (ANTHROPIC, {"messages": [{"role": "user", "content": "a"}], "model": "other"},
     "model", "other"),
    (OPENAI, {}, "input", "must hold a user message"),
    (OPENAI, {"input": 5}, "input", "must be a string or a list of messages"),
    (OPENAI, {"input": [{"type": "function_call"}]}, "input[0].type", "must be message"),
    (OPENAI, {"input": "a", "previous_response_id": "r"}, "previous_response_id", "stores no"),
    (OPENAI, {"input": "a", "reasoning": {"effort": "huge"}}, "reasoning.effort", "must be one of"),
    (
        OPENAI,
        {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
        "input[0].content[0].type",
        "must be text or image_url",
    ),
]  # fmt: skip


@pytest.mark.parametrize("path, body, field, why", CASES)
async def test_what_is_refused(http, path, body, field, why):
    _, client = await http()
    answer = await client.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == (404 if field == "model" else 400), error
    assert error["param"] == field and why in error["message"], error
