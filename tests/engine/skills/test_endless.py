"""Schemas that require themselves without end are refused at the reference, and others are not."""

import pytest

from kestrel_engine.skills.constraints.endless import endless_place

ROOT = {"$ref": "#"}
NULL = {"type": "null"}


def an_object(*required, **properties):
    return {"type": "object", "properties": properties, "required": list(required)}


ENDLESS = {
    "/$ref": ROOT,
    "/properties/a/$ref": an_object("a", a=ROOT),
    "/properties/a/anyOf/0/$ref": an_object("a", a={"anyOf": [ROOT, ROOT]}),
    "/properties/a/items/$ref": an_object("a", a={"type": "array", "items": ROOT, "minItems": 1}),
    "/prefixItems/1/$ref": {"type": "array", "prefixItems": [NULL, ROOT], "minItems": 2},
    "/items/1/$ref": {"type": ["array"], "items": [NULL, ROOT], "minItems": 2},
    "/allOf/1/properties/a/$ref": {"allOf": [{"type": "object"}, an_object("a", a=ROOT)]},
    "/additionalProperties/$ref": {"type": "object", "additionalProperties": ROOT, "required": ["a"]},
    "/patternProperties/a/$ref": {
        "type": "object", "patternProperties": {"a": ROOT}, "additionalProperties": False, "minProperties": 1,
    },
    # Two that require each other, behind a property that may be left out.
    "/$defs/m~1n/properties/y/$ref": an_object(x={"$ref": "#/$defs/l"})
    | {"$defs": {"l": an_object("x", x={"$ref": "#/$defs/m~1n"}), "m/n": an_object("y", y={"$ref": "#/$defs/l"})}},
}  # fmt: skip


@pytest.mark.parametrize("place", ENDLESS)
def test_the_place_that_has_no_end(place):
    assert endless_place(ENDLESS[place]) == place


@pytest.mark.parametrize(
    "schema",
    [
        an_object(a=ROOT),
        an_object("a", a={"anyOf": [ROOT, NULL]}),
        an_object("a", a={"type": "array", "items": ROOT}),
        an_object("a", a={"type": "array", "prefixItems": [NULL, ROOT], "minItems": 1}),
        {**an_object("a", a=ROOT), "type": ["object", "null"]},
        {"properties": {"a": ROOT}, "required": ["a"]},
        {"type": "object", "additionalProperties": ROOT},
        {**an_object("a", a=ROOT), "enum": [{"a": 1}]},
        {**an_object(a=NULL), "$defs": {"unused": an_object("x", x={"$ref": "#/$defs/unused"})}},
        an_object("a", a={"$ref": "#/nowhere"}),
    ],
)
def test_what_ends(schema):
    assert endless_place(schema) is None
