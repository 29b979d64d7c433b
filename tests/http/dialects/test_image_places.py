"""An image that cannot be read is named as the caller wrote it."""

import base64

import pytest

from tests.http.conftest import data_url

GOOD, BAD = data_url(), "data:image/png;base64," + base64.b64encode(b"no image").decode()
PLAIN = [url.partition(",")[2] for url in (GOOD, BAD)]
URLS = [{"type": "image_url", "image_url": {"url": url}} for url in (GOOD, BAD)]
INPUTS = [{"type": "input_image", "image_url": url} for url in (GOOD, BAD)]
SOURCES = [
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    for data in PLAIN
]


def talk(*contents):
    answer = {"role": "assistant", "content": "Yes."}
    users = [
        {"role": "user", "content": [*each, {"type": "text", "text": "What?"}]} for each in contents
    ]
    return [turn for user in users for turn in (user, answer)][:-1]  # fmt: skip


BOXES = {
    "type": "text",
    "text": 'Detect the dots as JSON: [{"bbox_2d": [x1, y1, x2, y2], "label": "dot"}]',
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        ("/v1/chat/completions", {"messages": talk([URLS[1]])}, "messages[0].content[0].image_url"),
        (
            "/v1/chat/completions",
            {"messages": talk([URLS[0]], [URLS[0], URLS[1]])},
            "messages[2].content[1].image_url",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [BOXES, URLS[1]]}]},
            "messages[0].content[1].image_url",
        ),
        ("/v1/responses", {"input": talk([INPUTS[1]])}, "input[0].content[0].image_url"),
        (
            "/v1/messages",
            {"messages": talk([SOURCES[0]], [SOURCES[1]]), "max_tokens": 5, "model": "moondream"},
            "messages[2].content[0].source.data",
        ),
        ("/api/generate", {"prompt": "What?", "images": PLAIN}, "images[1]"),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "What?", "images": PLAIN}]},
            "messages[0].images[1]",
        ),
        ("/v1/query", {"question": "What?", "image_url": BAD}, "image_url"),
    ],
)
async def test_the_place_of_a_broken_image(http, path, fields, place, stream):
    _, client = await http()
    response = await client.post(path, json={**fields, "stream": stream})
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert response.status_code == 400 and message.startswith(f"{place}: "), response.text
