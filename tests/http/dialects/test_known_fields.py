"""Unknown fields: those that hold an image or choose a fine-tune are refused, others are logged once."""

import logging
from typing import Any

import pytest

from kestrel_engine import InvalidRequest
from kestrel_grpc.http.dialects import known_fields, messages, responses
from kestrel_grpc.http.fields import Fields
from kestrel_grpc.http.known_fields import KnownFields
from tests.code_blocks import ROOT
from tests.http.conftest import data_url

IMAGE = data_url()
QUERY: dict[str, Any] = {"question": "What?", "settings": {"max_tokens": 5}}
USER: dict[str, Any] = {"role": "user", "content": "What?"}
CHAT: dict[str, Any] = {"messages": [USER], "max_tokens": 5}
OLLAMA: dict[str, Any] = {"stream": False, "options": {"num_predict": 5}}
PARTS = [{"type": "text", "text": "What?"}]
ADAPTER = "there is no adapter 'mine'"

WRONG: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    "/v1/query": [
        ({"image": IMAGE}, "image", "send the image as image_url"),
        ({"imageUrl": IMAGE}, "imageUrl", "send the image as image_url"),
        ({"images": [IMAGE]}, "images", "image_url"),
        ({"file": "a.jpg"}, "file", "image_url"),
        ({"media": IMAGE}, "media", "image_url"),
        ({"inputs": [{"data": IMAGE}]}, "inputs", "image_url"),
        ({"data": "x" * 3000}, "data", "image_url"),
        ({"peft_model": "mine"}, "peft_model", "settings.adapter"),
        ({"settings": {"maxTokens": 1}}, "settings.maxTokens", "did you mean max_tokens?"),
        ({"variant": "mine"}, "variant", ADAPTER),
        ({"adapter": "mine"}, "adapter", ADAPTER),
        ({"settings": {"adapter": "mine"}}, "settings.adapter", ADAPTER),
        ({"settings": {"variant": "mine"}}, "settings.variant", ADAPTER),
        ({"model": "moondream3-preview/mine@1"}, "model", "there is no adapter 'mine@1'"),
        ({"fine_tune": "mine"}, "fine_tune", "settings.adapter"),
        ({"temperature": None}, "", ""),
        ({"temperature": 0}, "temperature", "put it into settings"),
        ({"temprature": 0}, "temprature", "did you mean temperature? temperature: is a setting"),
        ({"messges": [USER]}, "messges", "did you mean messages? messages: use /v1/chat/comp"),
        ({"max_tokens": 1}, "max_tokens", "put it into settings"),
        ({"object": "dot"}, "object", "is not a field of /v1/query"),
        ({"messages": [USER]}, "messages", "/v1/chat/completions"),
        ({"resoning": True}, "resoning", "did you mean reasoning?"),
        ({"settings": {"temprature": 1}}, "settings.temprature", "did you mean temperature?"),
        ({"settings": {"max_token": 1}}, "settings.max_token", "did you mean max_tokens?"),
        ({"settings": {"min_score": 0.5}}, "settings.min_score", "is not a setting of this skill"),
        ({"settings": {"tiles": {"rows": 2}}}, "settings.tiles", "is not a setting of this skill"),
        ({"settings": {"max_objects": None}}, "", ""),
        ({"settings": {"xyz": None}}, "settings.xyz", "is unknown; known: adapter, frequency_penalty, max_"),
    ],
    "/v1/detect": [
        ({"object": "dot", "spatial_refs": [[0, 0]]}, "spatial_refs", "not a field of /v1/detect"),
        (
            {"object": "dot", "image_url": IMAGE, "settings": {"tiles": {"row": 2}}},
            "settings.tiles.row",
            "did you mean rows?",
        ),
    ],
    "/v1/gaze": [
        ({"eyes": [[0.5, 0.5]]}, "eyes", "send eye or face"),
        ({"faces": []}, "", ""),
        ({"object": "dot"}, "object", "is not a field of /v1/gaze"),
    ],
    "/v1/chat/completions": [
        ({"images": [IMAGE]}, "images", "as parts of a message"),
        ({"image_url": IMAGE}, "image_url", "as parts of a message"),
        ({"adapter": "mine"}, "adapter", "in model, as MODEL/ADAPTER"),
        ({"lora": "mine"}, "lora", "in model, as MODEL/ADAPTER"),
        ({"settings": {"adapter": "mine"}}, "settings", "belong beside model"),
        ({"extra_body": {"top_k": 1}}, "extra_body", "belong beside model"),
        ({"guided_json": {}}, "", ""),
        ({"guided_json": {"type": "object"}}, "guided_json", "response_format"),
        ({"prompt": "What?"}, "prompt", "use messages"),
        ({"temprature": 1}, "temprature", "did you mean temperature?"),
        ({"maxTokens": 1}, "maxTokens", "did you mean max_tokens?"),
        ({"top-p": 1}, "top-p", "did you mean top_p?"),
        ({"topp": 0}, "topp", "did you mean top_p?"),
        ({"mdoel": "x"}, "mdoel", "did you mean model?"),
        ({"models": ["x"], "mode": "chat"}, "", ""),
        ({"respnse_format": {"type": "json_object"}}, "respnse_format", "did you mean response_format?"),
        ({"reasoning_effort": "much"}, "reasoning_effort", "must be one of none, minimal"),
        ({"messages": [{**USER, "context": {"intent": "x" * 3000}}]}, "", ""),
        ({"messages": [{**USER, "images": [IMAGE]}]}, "messages[0].images", "as parts"),
        ({"messages": [{**USER, "image_url": IMAGE}]}, "messages[0].image_url", "as parts"),
        (
            {"messages": [{**USER, "content": [{**PARTS[0], "image_url": {"url": IMAGE}}]}]},
            "messages[0].content[0].image_url",
            "as parts",
        ),
        (
            {"messages": [{**USER, "content": [*PARTS, {"type": "image", "image": IMAGE}]}]},
            "messages[0].content[1].type",
            "must be text or image_url",
        ),
        (
            {"messages": [{**USER, "content": [*PARTS, {"type": "file", "file": {}}]}]},
            "messages[0].content[1].type",
            "must be text or image_url",
        ),
    ],
    "/v1/completions": [
        ({"max_tokns": 0}, "max_tokns", "did you mean max_tokens?"),
        ({"sead": 1}, "", ""),
        ({"sede": 1}, "sede", "did you mean seed?"),
    ],
    "/v1/responses": [
        ({"max_output_token": 1}, "max_output_token", "did you mean max_output_tokens?"),
        ({"intructions": "a"}, "intructions", "did you mean instructions?"),
    ],
    "/v1/messages": [
        ({"stop_sequence": ["a"]}, "stop_sequence", "did you mean stop_sequences?"),
        ({"sytem": "a"}, "sytem", "did you mean system?"),
    ],
    "/api/generate": [
        ({"image": IMAGE}, "image", "send images as images"),
        ({"image_url": IMAGE}, "image_url", "send images as images"),
        ({"adapter": "mine"}, "adapter", "in model"),
        ({"options": {"adapter": "mine"}}, "options.adapter", "in model"),
        ({"settings": {"temperature": 1}}, "settings", "belong into options"),
        ({"temperature": 0}, "temperature", "put it into options"),
        ({"options": {"num_perdict": 5}}, "options.num_perdict", "did you mean num_predict?"),
        ({"raw": True}, "raw", "one form of prompt"),
        ({"suffix": "b"}, "suffix", "leave it out"),
        ({"messages": [USER]}, "messages", "use /api/chat"),
        ({"promt": "a"}, "promt", "did you mean prompt?"),
        ({"think": "much"}, "think", "must be true, false or one of low, medium, high"),
    ],
    "/api/chat": [
        ({"images": [IMAGE]}, "images", "within a message"),
        ({"prompt": "What?"}, "prompt", "use messages"),
        ({"messages": [{**USER, "image": IMAGE}]}, "messages[0].image", "send images as images"),
        ({"tools": [{"a": 1}]}, "tools", "call no tools"),
        ({"template": "{{ .Prompt }}"}, "template", "one form of prompt"),
    ],
}  # fmt: skip
VALID = {
    "/v1/query": QUERY,
    "/v1/detect": {},
    "/v1/gaze": {"image_url": IMAGE},
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "What?", "max_tokens": 5},
    "/v1/responses": {"input": "What?", "max_output_tokens": 5},
    "/v1/messages": {**CHAT, "model": "moondream"},
    "/api/generate": {**OLLAMA, "prompt": "What?"},
    "/api/chat": {**OLLAMA, "messages": [USER]},
}


@pytest.mark.parametrize("path", WRONG)
async def test_a_field_that_matters_is_refused(http, path: str):
    """Without a field, the request is valid."""
    _, client = await http()
    for fields, name, part in WRONG[path]:
        response = await client.post(path, json={**VALID[path], **fields})
        if not name:
            assert response.status_code == 200, response.text
            continue
        assert response.status_code in (400, 404), (fields, response.text)
        error = response.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert message.startswith(f"{name}: ") and part in message, message
        assert isinstance(error, str) or error.get("param", name) == name


async def test_images_under_other_names_are_seen(http):
    """``image_url`` as a text, and the parts of OpenAI's Responses interface."""
    _, client = await http()
    counts = set()
    for kind, url in (
        ("image_url", {"url": IMAGE}),
        ("image_url", IMAGE),
        ("input_image", IMAGE),
        ("input_image", {"url": IMAGE, "detail": "low"}),
    ):
        text = {"type": "input_text" if kind == "input_image" else "text", "text": "What?"}
        parts = [{"type": kind, "image_url": url, "detail": "auto"}, text]
        asked = {**CHAT, "messages": [{"role": "user", "content": parts}]}
        body = (await client.post("/v1/chat/completions", json=asked)).json()
        counts.add(body["usage"]["prompt_tokens"])
    assert len(counts) == 1 and counts.pop() > 81


async def test_other_fields_are_ignored_and_logged_once(http, caplog):
    _, client = await http()
    caplog.set_level(logging.INFO, "kestrel_grpc.http.known_fields")
    for path, fields in (
        ("/v1/query", {"made_up_a": 1, "made_up_none": None}),
        ("/v1/chat/completions", {"made_up_b": 1, "user": "me", "store": False}),
        ("/api/generate", {"made_up_c": 1, "keep_alive": 5}),
        ("/api/generate", {"options": {"num_predict": 5, "made_up_d": 1, "num_ctx": 4096}}),
    ):
        for _ in range(2):
            response = await client.post(path, json={**VALID[path], **fields})
            assert response.status_code == 200, response.text
    records = [each for each in caplog.records if each.name == "kestrel_grpc.http.known_fields"]
    logged = [record.getMessage() for record in records]
    assert logged == [
        "the field 'made_up_a' of /v1/query is ignored",
        "the field 'made_up_b' of completions is ignored",
        "the field 'made_up_c' of /api/generate is ignored",
        "the field 'made_up_d' of options is ignored",
    ]


def test_the_page_lists_what_the_tables_hold():
    page = (ROOT / "docs/use/http.md").read_text()
    modules = {**vars(known_fields), **vars(messages), **vars(responses)}
    tables = [each for each in modules.values() if isinstance(each, KnownFields)]
    for module in (
        known_fields.MOONDREAM,
        known_fields.CHAT_PARTS,
        messages.BLOCKS,
        messages.SOURCES,
    ):
        tables += module.values()
    for table in tables:
        missing = {name for name in table.honoured if f"`{name}`" not in page}
        assert not missing, (table.where, missing)


def test_many_unknown_fields_fill_no_log(caplog, monkeypatch):
    """What holds an image is still refused."""
    monkeypatch.setattr("kestrel_grpc.http.known_fields._logged", set())
    caplog.set_level(logging.INFO, "kestrel_grpc.http.known_fields")
    known_fields.CHAT.check(Fields({"my_image": "", "image_file": []}))
    known_fields.CHAT.check(Fields({f"made_up_{number}": 1 for number in range(1000)}))
    assert len(caplog.records) == 100
    for name, value in (
        ("my_image", "x"),
        ("image_file", "x"),
        ("made_up_1", IMAGE),
        ("made_up_999", IMAGE),
    ):
        with pytest.raises(InvalidRequest, match="is not read here"):
            known_fields.CHAT.check(Fields({name: value}))
    # What others have sent hides no typing error.
    with pytest.raises(InvalidRequest, match="did you mean temperature"):
        known_fields.CHAT.check(Fields({"temprature": 0}))
