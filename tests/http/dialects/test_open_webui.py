"""Open WebUI's calls, as its source makes them (backend/open_webui/routers/openai.py and ollama.py), over the fake
runtime. The program itself is a web application of hundreds of packages, so the calls are repeated here."""

import json
from typing import Any

from tests.http.conftest import data_url
from tests.http.dialects.test_openai import chunks, user

HEADERS = {
    "X-OpenWebUI-User-Name": "A%20Name",
    "X-OpenWebUI-User-Id": "17",
    "X-OpenWebUI-User-Email": "a@example.org",
    "X-OpenWebUI-User-Role": "user",
    "X-OpenWebUI-Chat-Id": "5",
}
IMAGE = data_url()


async def test_a_connection_of_openais_kind(http):
    served, client = await http()
    client.headers.update({**HEADERS, "Authorization": "Bearer any"})
    (model,) = (await client.get("/v1/models")).json()["data"]
    assert model["id"] == served.engine.info.model and model["object"] == "model"
    first = user("What is it?", IMAGE)
    asked: dict[str, Any] = {
        "model": model["id"],
        "messages": [{"role": "system", "content": "Be brief."}, first],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 12,
        "temperature": 0,
    }
    *pieces, last, usage = chunks((await client.post("/v1/chat/completions", json=asked)).text)
    text = "".join(piece["choices"][0]["delta"]["content"] for piece in pieces)
    assert text and last["choices"][0]["finish_reason"] and usage["usage"]["total_tokens"] > 0
    asked["messages"] += [{"role": "assistant", "content": text}, user("And its colour?")]
    assert chunks((await client.post("/v1/chat/completions", json=asked)).text)
    # The title of the conversation, its tags and the next questions are asked of the same model.
    content = "### Task:\nGenerate a concise, 3-5 word title.\nUSER: What is it?\nASSISTANT: A dot."
    title = {
        "model": model["id"],
        "messages": [{"role": "user", "content": content}],
        "stream": False,
        "max_completion_tokens": 50,
    }
    body = (await client.post("/v1/chat/completions", json=title)).json()
    assert body["choices"][0]["message"]["content"]


async def test_a_connection_of_ollamas_kind(http):
    served, client = await http()
    client.headers.update(HEADERS)
    assert (await client.get("/api/version")).json()["version"].count(".") == 2
    (model,) = (await client.get("/api/tags")).json()["models"]
    assert model["model"] == served.engine.info.model
    (loaded,) = (await client.get("/api/ps")).json()["models"]
    assert loaded["name"] == model["name"] and loaded["expires_at"]
    message = {"role": "user", "content": "What is it?", "images": [IMAGE.partition(",")[2]]}
    asked = {
        "model": model["model"],
        "messages": [{"role": "system", "content": "Be brief."}, message],
        "options": {"temperature": 0, "num_predict": 12, "num_ctx": 2048},
        "stream": True,
        "keep_alive": "5m",
        "format": None,
        "tools": None,
    }
    response = await client.post("/api/chat", json=asked)
    assert response.headers["content-type"] == "application/x-ndjson"
    *pieces, final = [json.loads(line) for line in response.text.splitlines()]
    assert "".join(piece["message"]["content"] for piece in pieces)
    assert final["done"] and final["eval_count"] > 0 and final["total_duration"] > 0
