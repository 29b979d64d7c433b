"""Boxes and points in chat completions: asked for by text and by JSON Schema, over the fake runtime."""

import copy
import json
from typing import Any

import pytest

from kestrel_engine import InvalidRequest
from kestrel_grpc.http.dialects.grounding import wanted_places
from kestrel_grpc.http.fields import Fields
from tests.http.conftest import data_url
from tests.http.dialects.test_openai import ASKED, chunks, user

BOX = {"type": "array", "items": {"type": "integer"}, "minItems": 4, "maxItems": 4}
LABEL = {"type": "string"}


def items(place: str = "bbox_2d", **more: Any) -> dict[str, Any]:
    properties = {place: BOX, "label": LABEL, **more}
    return {"type": "object", "properties": properties, "required": [place, "label"]}


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "found", "schema": schema}}


def listed(place: str = "bbox_2d", **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items(place, **more)}


def around(each: dict[str, Any], name: str = "objects") -> dict[str, Any]:
    return {"type": "object", "properties": {name: each}, "required": [name]}


async def content(client: Any, text: str, schema: dict[str, Any] | None, **more: Any) -> Any:
    asked = {**ASKED, "messages": [user(text, data_url(60, 40))], **more}
    if schema is not None:
        asked["response_format"] = form(schema)
    response = await client.post("/v1/chat/completions", json=asked)
    assert response.status_code == 200, response.text
    return json.loads(response.json()["choices"][0]["message"]["content"])


async def places(client: Any, skill: str, **fields: Any) -> Any:
    asked = {"image_url": data_url(60, 40), **fields}
    return (await client.post(f"/v1/{skill}", json=asked)).json()


async def test_each_form_has_its_order_and_scale(http):
    _, client = await http()
    boxes = (await places(client, "detect", object="dot"))["objects"]
    points = (await places(client, "point", object="dot"))["points"]
    assert boxes and points
    for schema in (listed("bbox_2d"), around(listed("bbox_2d"))):
        found = await content(client, "Detect: dot", schema)
        found = found if isinstance(found, list) else found["objects"]
        assert found == [
            {
                "bbox_2d": [
                    round(60 * box["x_min"]),
                    round(40 * box["y_min"]),
                    round(60 * box["x_max"]),
                    round(40 * box["y_max"]),
                ],
                "label": "dot",
            }
            for box in boxes
        ]
    edges = ("y_min", "x_min", "y_max", "x_max")
    assert await content(client, "dot", listed("box_2d", score={"type": "number"})) == [
        {"box_2d": [round(1000 * box[e]) for e in edges], "label": "dot", "score": box["score"]}
        for box in boxes
    ]
    assert await content(client, "Find the dot.", around(listed("point_2d"), "points")) == {
        "points": [
            {"point_2d": [round(60 * p["x"]), round(40 * p["y"])], "label": "dot"} for p in points
        ]
    }
    assert await content(client, "dot", listed("point", confidence={})) == [
        {
            "point": [round(1000 * p["y"]), round(1000 * p["x"])],
            "label": "dot",
            "confidence": p["score"],
        }
        for p in points
    ]


async def test_the_labels_of_a_schema_are_the_objects(http):
    _, client = await http()
    names = ["red circle", "dot"]
    found = await content(
        client, "Find all shapes.", around(listed(label={"type": "string", "enum": names}))
    )
    several = await places(client, "detect", objects=names)
    labels = [name["object"] for name in several["results"] for _ in name["objects"]]
    assert [each["label"] for each in found["objects"]] == labels and set(labels) == set(names)
    one = await content(client, "Find it.", listed(label={"const": "dot"}))
    assert {each["label"] for each in one} == {"dot"}


async def test_a_stream_and_a_system_text_change_nothing(http):
    _, client = await http()
    schema = around(listed("box_2d"))
    whole = await content(client, "Find every dot in the image.", schema)
    system = {"role": "system", "content": "Return boxes as JSON."}
    messages = [system, user("Find every dot in the image.", data_url(60, 40))]
    asked = {**ASKED, "messages": messages, "response_format": form(schema), "stream": True}
    streamed = chunks((await client.post("/v1/chat/completions", json=asked)).text)
    assert json.loads(streamed[1]["choices"][0]["delta"]["content"]) == whole


async def test_the_longest_list_limits_the_objects(http):
    _, client = await http()
    assert len(await content(client, "dot", {**listed(), "maxItems": 1})) == 1


async def test_a_schema_without_places_stays_a_constraint(http):
    _, client = await http()
    schema = around({"enum": [3]}, "n") | {"additionalProperties": False}
    assert await content(client, "Detect the dot", schema, max_tokens=40) == {"n": 3}


def wanted(text: str, schema: Any):
    return wanted_places(text, Fields({"response_format": form(schema)}).inner("response_format"))


def test_references_as_pydantic_writes_them():
    schema = {
        "$defs": {"Found": items()},
        "properties": {"objects": {"type": "array", "items": {"$ref": "#/$defs/Found"}}},
        "required": ["objects"],
        "type": "object",
    }
    found = wanted("Find all the red cars in this picture!", schema)
    assert (found.names, found.place, found.around) == (("red cars",), "bbox_2d", "objects")
    loop = copy.deepcopy(schema)
    loop["$defs"]["Found"] = {"$ref": "#/$defs/Found"}
    assert wanted("Find a car", loop) is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("red car", "red car"),
        ("Detect: red car", "red car"),
        ("Please locate all of the red cars on the photo.", "red cars"),
        ("Where is the door?", "door"),
        ("find", "find"),
        ("The finder in the image", "The finder"),
        ("find " * 3, "find find"),
        ("!" * 30_000 + " " * 30_000 + "x", "!" * 30_000 + " x"),
    ],
)
def test_the_name_of_the_object(text, name):
    assert wanted(text, listed()).names == (name,)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "array"},
        {"type": "array", "items": [1, 2]},
        {"type": "array", "items": {"properties": 3}},
        {"type": "object", "properties": {"a": None, "b": {"items": {"properties": {"x": {}}}}}},
        {"$ref": "#/a/b"},
        {"$ref": 7, "properties": []},
        {"type": "array", "items": {"$ref": "https://x/y"}},
    ],
)
def test_other_schemas_ask_for_no_places(schema):
    assert wanted("a", schema) is None


@pytest.mark.parametrize(
    ("text", "schema", "problem"),
    [
        ("Point: a", listed(), "has bbox_2d, but the message asks to point"),
        ("a", {"type": "array", "items": {**items(), "required": ["hue"]}}, "requires 'hue'"),
        ("a", {**around(listed()), "required": ["objects", "total"]}, "requires 'total'"),
    ],
)
def test_what_cannot_be_given_is_refused(text, schema, problem):
    with pytest.raises(InvalidRequest, match=problem) as caught:
        wanted(text, schema)
    assert caught.value.field == "response_format.json_schema.schema"


async def test_an_invalid_name_is_an_error_of_the_schema(http):
    _, client = await http()
    schema = listed(label={"enum": ["dot", " "]})
    asked = {**ASKED, "messages": [user("a", data_url())], "response_format": form(schema)}
    response = await client.post("/v1/chat/completions", json=asked)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"] == "response_format.json_schema.schema" and "' '" in error["message"]
    asked = {**ASKED, "messages": [user("Detect: a", data_url())]}
    asked["response_format"] = {"type": "json_object"}
    error = (await client.post("/v1/chat/completions", json=asked)).json()["error"]
    assert error["param"] == "response_format" and "must be text for boxes" in error["message"]
