"""Each keyword of JSON Schema is enforced or refused by name, and formats let no invalid text pass."""

import datetime
import ipaddress
import json
import random
import re
import uuid
from urllib.parse import urlsplit

import pytest

from kestrel_engine.skills.constraints import grammar_text, schemas
from kestrel_engine.skills.constraints.formats import PATTERNS
from kestrel_engine.types.constraint import Constraint

BYTES = grammar_text.new_tokenizer([bytes([byte]) for byte in range(256)] + [b""], 256)


def compiled(schema):
    text = schema if isinstance(schema, str) else json.dumps(schema)
    constraint = Constraint("json_schema", text)
    assert grammar_text.problem(constraint, BYTES) == ""
    return grammar_text.new_matcher(BYTES, grammar_text.lark_of(constraint))


def problem(schema):
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return grammar_text.problem(Constraint("json_schema", text), BYTES)


def allowed(matcher):
    bits = int.from_bytes(matcher.compute_bitmask(), "little")
    return [byte for byte in range(257) if bits >> byte & 1]


def accepts(matcher, text):
    matcher = matcher.deep_copy()
    for byte in text.encode():
        if byte not in allowed(matcher):
            return False
        matcher.consume_token(byte)
    return 256 in allowed(matcher)


def drawn(matcher, rng, most=80):
    """A text that the matcher accepts, drawn byte by byte; None if it has not ended after ``most`` bytes."""
    matcher, text = matcher.deep_copy(), b""
    while len(text) < most:
        choices = allowed(matcher)
        if 256 in choices and (len(choices) == 1 or rng.random() < 0.3):
            return text.decode()
        # Rare bytes as often as frequent ones.
        kinds = sorted(
            {chr(byte).isalpha() + 2 * chr(byte).isdigit() for byte in choices if byte < 256}
        )
        kind = rng.choice(kinds)
        byte = rng.choice(
            [b for b in choices if b < 256 and chr(b).isalpha() + 2 * chr(b).isdigit() == kind]
        )
        matcher.consume_token(byte)
        text += bytes([byte])
    return None


def quoted(text):
    return json.dumps(text)


@pytest.mark.parametrize("keyword", sorted(schemas.REFUSED))
def test_keywords_that_cannot_be_enforced_are_refused_by_name(keyword):
    told = problem({"type": "object", "properties": {"a": {keyword: {"type": "string"}}}})
    assert told.startswith(f"at /properties/a/{keyword}: this keyword cannot be enforced")


def test_values_that_restrict_nothing_are_accepted():
    assert accepts(compiled({"type": "array", "uniqueItems": False}), "[1,1]")
    assert accepts(compiled({"type": "string", "nullable": False}), '""')


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"minimun": 1}, "at /minimun: is not a keyword of JSON Schema; did you mean minimum?"),
        ({"items": {"unique": True}}, "at /items/unique: is not a keyword"),
        (
            {"anyOf": [{"type": "string", "format": "foo"}]},
            "at /anyOf/0/format: 'foo' is not known",
        ),
        (
            {"type": "string", "format": "unknown"},
            "at /format: 'unknown' is not known; known: date",
        ),
        ({"type": "string", "format": "int32"}, "at /format: 'int32' is not known"),
        (
            {"$ref": "http://example.com/a"},
            "at /$ref: 'http://example.com/a' is not in this schema",
        ),
        ({"$schema": "http://example.com/a"}, "at /$schema: 'http://example.com/a' is not known"),
        ({"x-guidance": {"lenient": True}}, "at /x-guidance: options of the library cannot be set"),
        ({"multipleOf": 0}, "at /multipleOf: must be a number above 0"),
        ({"multipleOf": -2}, "at /multipleOf: must be a number above 0"),
        ({"multipleOf": None}, "at /multipleOf: must be a number above 0"),
        ({"minProperties": 2}, "at /minProperties: 2 cannot be enforced"),
        (
            {"oneOf": [{"type": "integer"}, {"type": "number"}]},
            "oneOf: the alternatives must exclude",
        ),
        (
            {"allOf": [{"type": "integer", "multipleOf": 65537}, {"multipleOf": 65539}]},
            "multipleOf: the values in this schema are too large",
        ),
        ('{"a": 1, "a": 2}', "has the name 'a' twice"),
        ('{"minimum": NaN}', "is not JSON: NaN is not a number"),
        ('{"minimum": 1e999}', "has the number 1e999"),
        ('{"const": 0.12345678901234567890123}', "has the number 0.12345678901234567890123"),
        (r'{"const": "\ud800"}', "lone surrogate"),
        ('{"items":' * 400 + "{}" + "}" * 400, "nested too deeply"),
    ],
)
def test_what_is_refused(schema, words):
    assert words in problem(schema)


@pytest.mark.parametrize("number", [2**53 + 1, -(2**53) - 1, 2**63, 1e300])
def test_numbers_beyond_what_is_exact_are_refused(number):
    limit = "cannot be enforced exactly; the limit is 2^53"
    for keyword in ("const", "minimum", "maximum", "exclusiveMinimum", "multipleOf"):
        told = problem({"properties": {"id": {"type": "number", keyword: number}}})
        assert told.startswith(f"at /properties/id/{keyword}: ") and limit in told
    assert limit in problem({"enum": ["a", {"b": [number]}]})


def test_the_largest_exact_number_is_enforced():
    matcher = compiled({"type": "integer", "minimum": 2**53 - 1, "maximum": 2**53})
    assert [accepts(matcher, str(2**53 + n)) for n in (-2, -1, 0, 1)] == [False, True, True, False]


def test_whole_numbers_may_be_written_with_a_point():
    matcher = compiled(
        '{"type": "array", "items": {"type": "integer"}, "minItems": 2.0, "maxItems": 2e0}'
    )
    assert [accepts(matcher, text) for text in ("[1]", "[1,2]", "[1,2,3]")] == [False, True, False]
    matcher = compiled('{"type": "string", "minLength": 1.0, "maxLength": 2.0}')
    assert [accepts(matcher, text) for text in ('""', '"a"', '"abc"')] == [False, True, False]
    assert accepts(compiled('{"const": 5.0}'), "5")


def test_formats_of_numbers():
    matcher = compiled({"type": "integer", "format": "int32", "minimum": 0})
    texts = ("-1", "0", str(2**31 - 1), str(2**31))
    assert [accepts(matcher, text) for text in texts] == [False, True, True, False]
    assert accepts(compiled({"type": "number", "format": "double"}), "-1.5")
    assert not accepts(compiled({"type": "integer", "format": "int64"}), str(2**53 + 1))


FORMATS = {
    "date": (
        ["2024-02-29", "2000-02-29", "0001-12-31"],
        ["2023-02-29", "1900-02-29", "2023-04-31", "0000-01-01", "2023-13-01", "2023-00-10", "2023-1-1"],
    ),
    "time": (
        ["23:59:59Z", "00:00:00.5+23:59", "12:00:00-00:00"],
        ["12:00:60Z", "23:59:60Z", "24:00:00Z", "12:60:00Z", "12:00:00", "12:00:00+24:00", "12:00Z"],
    ),
    "date-time": (
        ["2024-02-29T12:00:00Z"],
        ["2023-02-29T12:00:00Z", "2023-02-28T12:00:60Z", "2023-02-28 12:00:00Z", "2023-02-28"],
    ),
    "duration": (
        ["P1Y2M3DT4H5M6S", "PT1H", "P2W", "P1D"],
        ["P", "PT", "P1YT", "P1H", "P1Y2D", "P1W2D", "PT1H6S", "P1.5D"],
    ),
    "email": (
        ["a.b+c@example.com"],
        ["a@b", ".a@b.c", "a.@b.c", "a..b@c.d", "a@-b.c", "a@b-.c", "a b@c.d"],
    ),
    "hostname": (
        ["a", "xn.example.com", "a-b.c1"], ["-a", "a-", "a..b", "a.", "a_b", "a" * 64, "a--b"]
    ),
    "ipv4": (["0.0.0.0", "255.255.255.255"], ["256.1.1.1", "01.1.1.1", "1.1.1", "1.1.1.1.1"]),
    "ipv6": (
        ["::", "::1", "1::", "1:2:3:4:5:6:7:8", "fe80::1:2"],
        ["1:2", ":1", "1::2::3", ":::", "1:2:3:4:5:6:7:8:9", "12345::"],
    ),
    "uuid": (
        ["123e4567-e89b-12d3-a456-426614174000"],
        ["123e4567e89b12d3a456426614174000", "123e4567-e89b-12d3-a456-42661417400g"],
    ),
    "uri": (
        ["http://a/b?c#d", "urn:a:b", "mailto:a@b.c", "http://[::1]:80/", "http://a%20b"],
        ["a", "//a/b", "http://a b", "http://[::1", "http://a%2", "1a:b", "http://a:99999/", "http://a|b"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PATTERNS)
def test_a_format_takes_valid_texts_only(name):
    matcher = compiled({"type": "string", "format": name})
    valid, invalid = FORMATS[name]
    assert [text for text in valid if not accepts(matcher, quoted(text))] == []
    assert [text for text in invalid if accepts(matcher, quoted(text))] == []
    rng = random.Random(name)
    texts = [text for _ in range(60) if (text := drawn(matcher, rng))]
    assert len(texts) > 10
    for text in texts:
        check_format(name, json.loads(text))


def check_format(name, text):
    match name:
        case "date":
            datetime.date.fromisoformat(text)
        case "time":
            datetime.datetime.fromisoformat(f"2000-01-01T{clipped(text)}")
        case "date-time":
            datetime.datetime.fromisoformat(clipped(text))
        case "ipv4" | "ipv6":
            assert f"ipv{ipaddress.ip_address(text).version}" == name
        case "uuid":
            uuid.UUID(text)
        case "uri":
            assert urlsplit(text).scheme and urlsplit(text).port is not OSError
        case "hostname":
            assert len(text) <= 253 and all(0 < len(label) < 64 for label in text.split("."))
        case "email":
            local, domain = text.split("@")
            assert 0 < len(local) <= 64 and len(domain) <= 253


def clipped(text):
    """With 6 digits of a second at most, as many as Python takes."""
    return re.sub(r"(\.[0-9]{6})[0-9]+", r"\1", text)


def test_a_format_beside_a_pattern_and_a_length():
    matcher = compiled({"type": "string", "format": "email", "pattern": "^a", "maxLength": 5})
    texts = ("a@b.c", "b@b.c", "ab@b.c", "a@b")
    assert [accepts(matcher, quoted(text)) for text in texts] == [True, False, False, False]


ENFORCED = [
    {
        "type": "array",
        "prefixItems": [{"const": 1}],
        "items": {"enum": ["a", None]},
        "minItems": 2,
        "maxItems": 3,
    },
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [{"type": "integer"}],
        "additionalItems": False,
    },
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "patternProperties": {"^b": {"const": 1}},
        "additionalProperties": False,
    },
    {
        "type": "object",
        "additionalProperties": {"type": "boolean"},
        "minProperties": 1,
        "maxProperties": 2,
    },
    {"type": "string", "minLength": 1, "maxLength": 3, "pattern": "^[ab]+$"},
    {"type": "number", "exclusiveMinimum": 0.1, "maximum": 3.5, "multipleOf": 0.25},
    {"type": "integer", "minimum": -5, "exclusiveMaximum": 5, "multipleOf": 3},
    {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "boolean"}}},
    {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
    {"enum": [1.5, -0.25, 100.0, "a\nb", [1, {"b": None}], True]},
]


@pytest.mark.parametrize("schema", ENFORCED, ids=lambda schema: " ".join(schema)[:40])
def test_texts_drawn_from_a_schema_are_valid(schema):
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    matcher, rng = compiled(schema), random.Random(str(schema))
    texts = [text for _ in range(60) if (text := drawn(matcher, rng))]
    assert len(texts) > 10
    for text in texts:
        validator.validate(json.loads(text))


def test_every_enforced_keyword_is_tried():
    names = set(re.findall(r'"(\$?\w+)":', json.dumps(ENFORCED)))
    assert schemas.ENFORCED - names == {"format"}
