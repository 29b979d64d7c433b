"""Every dialect reads base64 as other programs write it."""

import base64
from typing import Any

import pytest

from tests.http.conftest import data_url

DATA = base64.b64decode(data_url().partition(",")[2])
DATA += b"\0" * (len(DATA) % 3 == 0)  # So that the text needs padding.
TEXT = base64.b64encode(DATA).decode()
FORMS = [
    TEXT.rstrip("="),
    base64.encodebytes(DATA).decode(),
    base64.urlsafe_b64encode(DATA).decode() + "\n",
    "data:image/jpeg; BASE64," + TEXT,
]


@pytest.mark.parametrize(
    "path", ["query", "chat/completions", "responses", "messages", "generate", "chat"]
)
async def test_base64(http, path: str):
    _, client = await http()
    whole: Any = None
    for form in (TEXT, *FORMS):
        parts = [{"type": "image_url", "image_url": {"url": form}}, {"type": "text", "text": "A?"}]
        settings = {"temperature": 0, "max_tokens": 5}
        options = {"temperature": 0, "num_predict": 5}
        message = {"role": "user", "content": "A?", "images": [form]}
        seen = {"type": "input_image", "image_url": form}
        block = {"type": "image", "source": {"type": "base64", "data": form}}
        asked: dict[str, Any] = {
            "query": {"image_url": form, "question": "A?", "settings": settings},
            "chat/completions": {"messages": [{"role": "user", "content": parts}], **settings},
            "responses": {
                "input": [{"role": "user", "content": [seen]}],
                "temperature": 0,
                "max_output_tokens": 5,
            },
            "messages": {"messages": [{"role": "user", "content": [block]}], **settings},
            "generate": {"prompt": "A?", "images": [form], "options": options, "stream": False},
            "chat": {"messages": [message], "options": options, "stream": False},
        }[path]
        root = "/api/" if path in ("generate", "chat") else "/v1/"
        response = await client.post(root + path, json=asked)
        assert response.status_code == 200, response.text
        body = response.json()
        keys = ("answer", "choices", "response", "message", "content", "output")
        told = next(body[key] for key in keys if key in body)
        if "output" in body:
            told = told[0]["content"]
        whole = whole or told
        assert told == whole
