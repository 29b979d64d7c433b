"""Image budgets in the dialects: OpenAI's ``detail`` and ``max_crops``, settings of Moondream, options of Ollama."""

from typing import Any

import pytest

from tests.http.conftest import data_url

URL = data_url(1600, 400)
"""Four tiles, the limit of the fake model."""
LIMIT = "must be from 1 to 4, the model's own limit"
BELOW = "must be in [1, 2147483647], got"


def chat(image: dict[str, Any], text: str = "What?", **fields: Any) -> dict[str, Any]:
    content = [image, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **fields}


def part(detail: str | None = None) -> dict[str, Any]:
    given = {"url": URL} if detail is None else {"url": URL, "detail": detail}
    return {"type": "image_url", "image_url": given}


@pytest.mark.parametrize(
    "text", ["What?", "Detect every cat. Answer with JSON: bbox_2d and label."]
)
async def test_openai(http, text):
    _, client = await http()
    for image, fields, crops in (
        (part(), {}, 5),
        (part("low"), {}, 1),
        (part("high"), {}, 5),
        (part("auto"), {}, 5),
        ({"type": "input_image", "image_url": URL, "detail": "low"}, {}, 1),
        (part(), {"max_crops": 2}, 3),
        (part("low"), {"max_crops": 2}, 1),
        (part("high"), {"max_crops": 1}, 1),
    ):
        body = (await client.post("/v1/chat/completions", json=chat(image, text, **fields))).json()
        assert body["usage"]["prompt_tokens_details"]["num_crops"] == crops
        assert body["usage"]["prompt_tokens_details"]["image_tokens"] == 81


async def test_openai_images_of_one_request_have_details_of_their_own(http):
    _, client = await http()
    content = [part("low"), part("high"), {"type": "text", "text": "Which?"}]
    asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "max_crops": 2}
    body = (await client.post("/v1/chat/completions", json=asked)).json()
    assert body["usage"]["prompt_tokens_details"]["num_crops"] == 1 + 3


async def test_openai_names_what_is_wrong(http):
    _, client = await http()
    for image, fields, param, why in (
        (part("lowest"), {}, "messages[0].content[0].image_url.detail", "must be one of low, high"),
        (part(), {"max_crops": 5}, "max_crops", f"is 5; {LIMIT}"),
        (part(), {"max_crops": 0}, "max_crops", f"{BELOW} 0"),
        (part(), {"max_crops": 2**31}, "max_crops", f"{BELOW} 2147483648"),
        (part(), {"max_crops": "2"}, "max_crops", "must be a whole number, got a string"),
        (part(), {"max_crops": 1.5}, "max_crops", "must be a whole number, got 1.5"),
    ):
        response = await client.post("/v1/chat/completions", json=chat(image, **fields))
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == param
        assert error["message"].startswith(f"{param}: {why}")


@pytest.mark.parametrize("path", ["query", "caption", "point", "detect", "segment"])
async def test_moondream(http, path):
    _, client = await http()

    async def ask(budget: Any, **others: Any) -> Any:
        settings = {"max_crops": budget, **others}
        asked = {"image_url": URL, "settings": settings}
        asked |= {"question": "What?"} if path == "query" else {}
        asked |= {"object": "cat"} if path in ("point", "detect", "segment") else {}
        return await client.post(f"/v1/{path}", json=asked)

    for budget, crops in ((None, 5), (2, 3), (1, 1)):
        answer = (await ask(budget, region=[0, 0, 1, 1])).json()
        assert answer["metrics"]["num_crops"] == crops
    for budget, why in ((5, f"is 5; {LIMIT}"), (0, f"{BELOW} 0"), (True, "must be a whole")):
        error = (await ask(budget)).json()["error"]
        assert error["param"] == "settings.max_crops"
        assert error["message"].startswith(f"settings.max_crops: {why}")


async def test_moondream_needs_an_image_for_a_budget(http):
    _, client = await http()
    asked = {"question": "What?", "settings": {"max_crops": 1}}
    error = (await client.post("/v1/query", json=asked)).json()["error"]
    assert error["message"] == "settings.max_crops: needs image_url"
    asked = {"question": "What?", "image_url": URL, "settings": {"max_crop": 1}}
    error = (await client.post("/v1/query", json=asked)).json()["error"]
    assert error["message"] == "settings.max_crop: is unknown; did you mean max_crops?"


async def test_anthropic(http):
    _, client = await http()
    source = {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
    asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "max_crops": 2}
    assert (await client.post("/v1/messages", json=asked)).json()["usage"]["num_crops"] == 3
    events = (await client.post("/v1/messages", json={**asked, "stream": True})).text
    assert events.count('"num_crops":3') == 2  # At the start and at the end.


@pytest.mark.parametrize("path", ["generate", "chat"])
async def test_ollama(http, path):
    _, client = await http()
    encoded = URL.partition(",")[2]

    async def ask(budget: int | None) -> Any:
        options = {"num_predict": 2, "max_crops": budget}
        asked: dict[str, Any] = {"options": options, "stream": False}
        if path == "generate":
            asked |= {"prompt": "What?", "images": [encoded]}
        else:
            asked |= {"messages": [{"role": "user", "content": "What?", "images": [encoded]}]}
        return (await client.post(f"/api/{path}", json=asked)).json()

    assert [(await ask(budget))["num_crops"] for budget in (None, 2, 1)] == [5, 3, 1]
    assert (await ask(5))["error"] == f"options.max_crops: is 5; {LIMIT}"
    assert (await ask(-1))["error"] == f"options.max_crops: {BELOW} -1"
