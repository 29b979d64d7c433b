"""Ollama's interface over the fake runtime."""

import base64
import json
from typing import Any

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from tests.http.conftest import data_url, question_with_stop

IMAGE = data_url().partition(",")[2]
ASKED: dict[str, Any] = {
    "model": "moondream:latest",
    "prompt": "What?",
    "images": [IMAGE],
    "options": {"temperature": 0, "num_predict": 12},
}


async def test_a_stream_is_the_default_and_joins_to_the_whole(http):
    _, client = await http()
    whole = (await client.post("/api/generate", json={**ASKED, "stream": False})).json()
    assert whole["done"] and whole["eval_count"] > 0 and whole["total_duration"] > 0
    response = await client.post("/api/generate", json=ASKED)
    assert response.headers["content-type"] == "application/x-ndjson"
    *pieces, final = [json.loads(line) for line in response.text.splitlines()]
    assert "".join(piece["response"] for piece in pieces) == whole["response"]
    assert not any(piece["done"] for piece in pieces)
    assert (
        final["done"] and final["response"] == "" and final["done_reason"] == whole["done_reason"]
    )


async def test_stop_ends_the_text(http):
    _, client = await http()
    asked = {**ASKED, "stream": False}

    async def ask(question: str) -> str:
        body = (await client.post("/api/generate", json={**asked, "prompt": question})).json()
        return str(body["response"])

    asked["prompt"], text, stop = await question_with_stop(ask)
    asked["options"] = {**ASKED["options"], "stop": [stop]}
    body = (await client.post("/api/generate", json=asked)).json()
    assert body["response"] == text[: text.index(stop)] and body["done_reason"] == "stop"


async def test_a_format_gives_json(http):
    _, client = await http()
    asked = {**ASKED, "stream": False, "format": {"enum": ["dot", "line"]}}
    body = (await client.post("/api/generate", json=asked)).json()
    assert json.loads(body["response"]) in ("dot", "line")
    body = (await client.post("/api/generate", json={**asked, "format": "json"})).json()
    assert body["response"].startswith("{")


async def test_chat_is_generate_with_messages(http):
    _, client = await http()
    whole = (await client.post("/api/generate", json={**ASKED, "stream": False})).json()
    message = {"role": "user", "content": "What?", "images": [IMAGE]}
    asked = {"model": ASKED["model"], "options": ASKED["options"]}
    asked |= {"messages": [message], "stream": False}
    chat = (await client.post("/api/chat", json=asked)).json()
    assert chat["message"] == {"role": "assistant", "content": whole["response"]}
    asked["messages"] = [{"role": "system", "content": "Be brief."}, message]
    longer = (await client.post("/api/chat", json=asked)).json()
    assert longer["prompt_eval_count"] > chat["prompt_eval_count"]


async def test_several_images_are_all_in_the_prompt(http):
    _, client = await http()
    one = (await client.post("/api/generate", json={**ASKED, "stream": False})).json()
    asked = {**ASKED, "images": [IMAGE, IMAGE], "stream": False}
    two = (await client.post("/api/generate", json=asked)).json()
    assert two["prompt_eval_count"] == one["prompt_eval_count"] + 81


async def test_errors_have_ollamas_form(http):
    _, client = await http()
    cases: list[tuple[str, dict[str, Any], int, str]] = [
        ("generate", {**ASKED, "model": "llava"}, 404, "llava"),
        ("generate", {**ASKED, "images": ["!!"]}, 400, "images[0]"),
        ("generate", {**ASKED, "images": [IMAGE, "!!"]}, 400, "images[1]"),
        ("generate", {**ASKED, "format": "xml"}, 400, "format"),
        ("generate", {**ASKED, "format": {"type": "x"}}, 400, "format: Invalid type: x"),
        ("generate", {**ASKED, "options": {"stop": ["x", 3]}}, 400, "options.stop[1]"),
        ("generate", {**ASKED, "options": {"temperature": -1}}, 400, "options.temperature"),
        ("chat", {"messages": [{"role": "assistant", "content": "x"}]}, 400, "messages: must hold"),
        ("show", {"model": "llava"}, 404, "llava"),
        ("pull", {"model": "llava"}, 404, "there is no path '/api/pull'"),
    ]
    for path, body, status, part in cases:
        response = await client.post(f"/api/{path}", json=body)
        assert response.status_code == status, response.text
        assert part in response.json()["error"], response.text


async def test_models_and_version(http):
    served, client = await http()
    name = served.engine.info.model
    tags = (await client.get("/api/tags")).json()
    assert [model["name"] for model in tags["models"]] == [name]
    shown = (await client.post("/api/show", json={"model": "moondream"})).json()
    assert "vision" in shown["capabilities"]
    assert (await client.get("/api/version")).json()["version"]
    loaded = (await client.post("/api/generate", json={"model": name})).json()
    assert loaded["done_reason"] == "load"


async def test_thinking_is_the_reasoning(http):
    served, client = await http()
    options = {"temperature": 0, "num_predict": 8}
    message = {"role": "user", "content": "What?", "images": [IMAGE]}
    request = pb.QueryRequest(images=[{"encoded": base64.b64decode(IMAGE)}])
    request.query.question, request.query.reasoning = "What?", True
    request.query.sampling.temperature, request.query.max_tokens = 0, 8
    (expected,) = (await served.vision.Query(request)).answers
    assert expected.reasoning.text
    for think in (True, "low", "medium", "high"):
        asked = {"messages": [message], "options": options, "think": think, "stream": False}
        chat = (await client.post("/api/chat", json=asked)).json()
        assert chat["message"] == {
            "role": "assistant",
            "content": expected.text,
            "thinking": expected.reasoning.text,
        }
    asked = {**ASKED, "options": options, "think": "high"}
    lines = (await client.post("/api/generate", json=asked)).text.splitlines()
    pieces = [json.loads(line) for line in lines]
    assert "".join(each.get("thinking", "") for each in pieces) == expected.reasoning.text
    assert "".join(each["response"] for each in pieces) == expected.text
    for think in (False, None):
        asked = {"messages": [message], "options": options, "think": think, "stream": False}
        chat = (await client.post("/api/chat", json=asked)).json()
        assert "thinking" not in chat["message"]
    shown = (await client.post("/api/show", json={"model": "moondream"})).json()
    assert "thinking" in shown["capabilities"]
