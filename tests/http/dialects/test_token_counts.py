"""Counts of tokens in Anthropic's and OpenAI's shapes: what the same conversation then uses."""

from typing import Any

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
        "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}, *chat[2:]],
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
    # A search for boxes has a prompt of its own.
    asked = [{"role": "user", "content": [{"type": "text", "text": "Detect: dot"}]}]
    asked[0]["content"].insert(0, {"type": "image_url", "image_url": url})
    counted = await client.post(OPENAI, json={"input": asked})
    assert counted.json()["input_tokens"] == await used(client, asked)
