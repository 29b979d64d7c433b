"""OpenAI's /v1/completions over the fake runtime."""

import asyncio
from typing import Any

from tests.engine.fakes import never_ends
from tests.engine.options.test_stop_strings import says
from tests.fake_runtime import FakeRuntime
from tests.http.dialects.test_openai import chunks
from tests.service.conftest import LIMITS, NO_END, EndlessRuntime
from tests.waiting import until

ASKED: dict[str, Any] = {"model": "moondream2", "temperature": 0, "max_tokens": 12}


async def complete(client: Any, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/completions", json={**ASKED, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


async def test_each_prompt_of_a_list_has_its_answer_in_order(http):
    _, client = await http()
    prompts = ["Why?", "What is it?", "And how many of them are there?"]
    alone = [await complete(client, prompt=prompt) for prompt in prompts]
    body = await complete(client, prompt=prompts)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    texts = [choice["text"] for choice in body["choices"]]
    assert texts == [each["choices"][0]["text"] for each in alone] and all(texts)
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert body["usage"][key] == sum(each["usage"][key] for each in alone)
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["choices"][0].keys() == {"index", "text", "logprobs", "finish_reason"}
    message = {"role": "user", "content": prompts[1]}
    asked = {**ASKED, "messages": [message]}
    chat = (await client.post("/v1/chat/completions", json=asked)).json()
    assert chat["choices"][0]["message"]["content"] == texts[1]


async def test_log_probabilities_are_lists(http):
    _, client = await http(runtime=FakeRuntime(LIMITS, says("größer 🐞. ")))
    asked = {"max_tokens": 24, "prompt": "What?"}
    chat = {**ASKED, "max_tokens": 24, "messages": [{"role": "user", "content": "What?"}]}
    chat |= {"logprobs": True, "top_logprobs": 2}
    found = (await client.post("/v1/chat/completions", json=chat)).json()
    expected = found["choices"][0]["logprobs"]["content"]
    [choice] = (await complete(client, logprobs=2, **asked))["choices"]
    lists = choice["logprobs"]
    assert lists.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert lists["token_logprobs"] == [token["logprob"] for token in expected]
    for name, top, token in zip(lists["tokens"], lists["top_logprobs"], expected, strict=True):
        assert top[name] == token["logprob"] and len(top) == 2
        assert list(top.values()) == [each["logprob"] for each in token["top_logprobs"]]
    named = zip(lists["tokens"], lists["text_offset"], strict=True)
    whole = [(name, offset) for name, offset in named if not name.startswith("bytes:")]
    assert [name for name, _ in whole[:5]] == ["g", "r", "e", "r", " "]
    for name, offset in whole:
        assert choice["text"][offset : offset + len(name)] == name
    parts = [name for name in lists["tokens"] if name.startswith("bytes:")]
    assert parts[:3] == [r"bytes:\xc3", r"bytes:\xb6", r"bytes:\xc3"]
    [plain] = (await complete(client, logprobs=0, **asked))["choices"]
    assert plain["logprobs"] == {**lists, "top_logprobs": None}
    [none] = (await complete(client, **asked))["choices"]
    assert none["logprobs"] is None and none["text"] == choice["text"]
    body = {**ASKED, **asked, "logprobs": 2, "stream": True}
    streamed = chunks((await client.post("/v1/completions", json=body)).text)
    joined: dict[str, list[Any]] = {key: [] for key in lists}
    for chunk in streamed:
        for key, values in (chunk["choices"][0]["logprobs"] or {}).items():
            joined[key] += values
    assert joined == lists


async def test_an_empty_answer_has_empty_lists(http):
    _, client = await http(runtime=FakeRuntime(LIMITS, lambda fed: 0))
    empty: dict[str, Any] = {"tokens": [], "token_logprobs": [], "text_offset": []}
    [choice] = (await complete(client, prompt="What?", logprobs=2))["choices"]
    assert choice == {
        "index": 0,
        "text": "",
        "finish_reason": "stop",
        "logprobs": {**empty, "top_logprobs": None},
    }
    body = {**ASKED, "prompt": "What?", "logprobs": 2, "stream": True}
    [chunk] = chunks((await client.post("/v1/completions", json=body)).text)
    assert chunk["choices"][0]["logprobs"] == choice["logprobs"]
    [plain] = (await complete(client, prompt="What?"))["choices"]
    assert plain["logprobs"] is None


async def test_several_samples_of_several_prompts(http):
    _, client = await http()
    asked: dict[str, Any] = {"temperature": 1, "seed": 3, "n": 2}
    body = await complete(client, prompt=["Why?", "How?"], **asked)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    for at, prompt in ((0, "Why?"), (2, "How?")):
        own = await complete(client, prompt=prompt, **asked)
        texts = [choice["text"] for choice in own["choices"]]
        assert [choice["text"] for choice in body["choices"][at : at + 2]] == texts


async def test_a_stream_joins_to_the_whole(http):
    _, client = await http()
    whole = await complete(client, prompt="Why?")
    asked = {**ASKED, "prompt": ["Why?"], "stream": True}
    asked["stream_options"] = {"include_usage": True}
    *pieces, last, usage = chunks((await client.post("/v1/completions", json=asked)).text)
    text = "".join(piece["choices"][0]["text"] for piece in pieces)
    assert text == whole["choices"][0]["text"]
    assert last["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert usage["usage"] == whole["usage"] | usage["usage"] and usage["choices"] == []


async def test_errors_name_the_field(http):
    _, client = await http()
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({}, "prompt", "must be 1 to 256 texts, got 0"),
        ({"prompt": []}, "prompt", "got 0"),
        ({"prompt": ["x"] * 257}, "prompt", "got 257"),
        ({"prompt": " "}, "prompt", "must not be empty"),
        ({"prompt": ["a", ""]}, "prompt[1]", "must not be empty"),
        ({"prompt": ["a", 3]}, "prompt[1]", "must be a string"),
        ({"prompt": [1, 2]}, "prompt", "takes no token ids"),
        ({"prompt": [[1], [2]]}, "prompt", "takes no token ids"),
        ({"prompt": {}}, "prompt", "must be a string or a list"),
        ({"prompt": ["a", "b"], "stream": True}, "prompt", "one text in a stream, got 2"),
        ({"prompt": "a", "n": 2, "stream": True}, "n", "must be 1 in a stream"),
        ({"prompt": "a", "n": 17}, "n", "17 is not in [1, 16]"),
        ({"prompt": "a", "echo": True}, "echo", "must be false"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "must be from 0 to 20, got 21"),
        ({"prompt": "a", "logprobs": "3"}, "logprobs", "must be a whole number"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "is not supported"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format", "not"),
        ({"prompt": "a", "best_of": 3}, "best_of", "equal to n"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "must be in [1,"),
        ({"prompt": "a", "stop": ["", 3]}, "stop[1]", "must be a string"),
        ({"prompt": "a", "reasoning": True}, "reasoning", "/v1/chat/completions"),
        ({"prompt": "a", "images": ["x"]}, "images", "/v1/chat/completions"),
        ({"prompt": "x " * 3000}, "prompt", ""),
        ({"prompt": ["a", "x " * 3000, "b"]}, "prompt[1]", ""),
        ({"prompt": ["x" * 40000]}, "prompt[0]", "32767"),
        ({"prompt": ["a", "b"], "temperature": 99}, "temperature", ""),
    ]
    for fields, param, part in cases:
        response = await client.post("/v1/completions", json={**ASKED, **fields})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), (fields, error)
        assert part in error["message"], error
    response = await client.post("/v1/completions", json={"prompt": "a", "model": "gpt"})
    assert response.status_code == 404


async def test_the_first_error_ends_the_other_prompts(http):
    runtime = FakeRuntime(LIMITS, never_ends, cost=lambda plan: 0.02)
    served, client = await http(runtime=runtime)
    prompts = ["Why?", "How?", "x " * 3000]
    response = await client.post(
        "/v1/completions", json={**ASKED, "max_tokens": 200, "prompt": prompts}
    )
    assert response.status_code == 400, response.text
    assert served.engine.num_requests == 0


async def test_a_client_that_disconnects_cancels_all_prompts(http):
    served, client = await http(runtime=EndlessRuntime())
    asked = {**ASKED, "max_tokens": NO_END, "prompt": ["Why?"] * 8}
    sending = asyncio.create_task(client.post("/v1/completions", json=asked))
    for wanted in (8, 0):
        await until(lambda wanted=wanted: served.engine.num_requests == wanted)
        sending.cancel()
