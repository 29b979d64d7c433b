"""Schemas that require themselves without end are refused at the reference, and others are not."""

import pytest

from kestrel_engine.skills.constraints import endless
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
    # What one part requires is defined in another one.
    "/allOf/1/properties/b/$ref": {"type": "object", "allOf": [{"required": ["b"]}, {"properties": {"b": ROOT}}]},
    "/properties/c/$ref": an_object(c=ROOT) | {"allOf": [{"allOf": [{"required": ["c"]}]}]},
    "/allOf/0/properties/d/$ref": {"allOf": [{"properties": {"d": ROOT}}, {"type": "object"}], "required": ["d"]},
    "/$defs/p/properties/e/$ref": an_object("e", e={"$ref": "#/$defs/o"})
    | {"$defs": {"o": {"$ref": "#/$defs/p", "required": ["e"]}, "p": an_object(e=ROOT)}},
    "/properties/f/$ref": an_object(f=ROOT) | {"anyOf": [{"required": ["f"]}, {"required": ["f", "g"]}]},
    "/anyOf/0/properties/g/$ref": {
        "type": "object", "required": ["g"],
        "anyOf": [{"properties": {"g": ROOT}}, {"properties": {"g": {"type": "array", "items": ROOT, "minItems": 1}}}],
    },
    "/properties/h/$ref": an_object("h", h=ROOT) | {"anyOf": [{"type": "object"}, NULL]},
    "/allOf/0/patternProperties/^i/$ref": {
        "type": "object", "allOf": [{"patternProperties": {"^i": ROOT}}, {"required": ["ij"]}],
    },
    "/allOf/1/items/$ref": {"type": "array", "allOf": [{"minItems": 2}, {"items": ROOT}]},
    "/allOf/1/additionalProperties/$ref": {
        "type": "object", "allOf": [{"minProperties": 1}, {"additionalProperties": ROOT}],
    },
    "/properties/j/$ref": {
        "type": ["object", "array"], "properties": {"j": ROOT}, "required": ["j"], "items": ROOT, "minItems": 1,
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
        {"type": "object", "allOf": [{"required": ["b"]}, {"properties": {"a": ROOT}}]},
        an_object(a=ROOT) | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"required": ["a"], "properties": {"a": ROOT}, "anyOf": [{"type": "object"}, NULL]},
        an_object("a") | {"anyOf": [{"properties": {"a": ROOT}}, {"properties": {"a": NULL}}]},
        {
            "anyOf": [ROOT, {"$ref": "#/$defs/a"}, NULL],
            "$defs": {"a": {"anyOf": [ROOT, {"type": "integer"}]}},
        },
        {
            "type": "object",
            "allOf": [{"required": ["a"]}, {"patternProperties": {"^(a|b)$": ROOT}}],
        },
        {"type": ["object", "array"], "properties": {"j": ROOT}, "required": ["j"], "items": ROOT},
        {"type": "object", "allOf": [{"minProperties": 1}, {"properties": {"a": ROOT}}]},
        {"type": "number", "anyOf": [{"type": "integer"}, an_object("a", a=ROOT)]},
    ],
)
def test_what_ends(schema):
    assert endless_place(schema) is None


@pytest.mark.parametrize("count", [3, 40, 400])
def test_many_choices(count):
    """Beyond some number, not all are tried together."""
    choices = [
        {"anyOf": [an_object(**{f"a{i}": ROOT}), an_object(**{f"b{i}": ROOT})]}
        for i in range(count)
    ]
    assert endless_place({"allOf": choices}) is None
    endless = {
        "type": "object",
        "properties": {"a": ROOT, "b": {"allOf": choices}},
        "required": ["a"],
    }
    assert endless_place(endless) == "/properties/a/$ref" or count == 400


def test_items_of_many_values_count_as_steps(monkeypatch):
    """Each of 100 values has 1000 items."""
    read = []
    member = endless._member
    monkeypatch.setattr(endless, "_member", lambda *each: read.append(each) or member(*each))
    values = {
        f"v{i}": {
            "$ref": "#/$defs/items",
            "properties": {"next": {"$ref": f"#/$defs/v{(i + 1) % 100}"}},
        }
        for i in range(100)
    }
    items = {"prefixItems": [{}] * 1000}
    assert endless_place({"$ref": "#/$defs/v0", "$defs": {**values, "items": items}}) is None
    assert len(read) < 60_000
