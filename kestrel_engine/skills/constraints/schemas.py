"""JSON Schemas as the library enforces them: checks each keyword, so that none is ignored in silence.

docs/use/schemas.md has the table. The library ignores keywords that it does not know, rounds numbers beyond 2^53, and
has formats that let invalid texts pass.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from decimal import Decimal
from typing import Any

from .formats import MAX_LENGTHS, PATTERNS, RANGES

ENFORCED = frozenset(
    "$ref const enum type anyOf oneOf allOf items additionalItems prefixItems minItems maxItems properties "
    "additionalProperties patternProperties required minProperties maxProperties minLength maxLength pattern format "
    "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split()
)
ANNOTATIONS = frozenset(
    "$anchor $comment $defs $id $schema contentEncoding contentMediaType default definitions deprecated description "
    "discriminator example examples externalDocs id readOnly title writeOnly xml".split()
)
"""Keywords that restrict no value by the standards (JSON Schema, OpenAPI). So do keywords that begin with "x-"."""
REFUSED = frozenset(
    "$dynamicAnchor $dynamicRef $recursiveAnchor $recursiveRef $vocabulary contains contentSchema dependencies "
    "dependentRequired dependentSchemas disallow divisibleBy else extends if maxContains minContains not nullable "
    "propertyNames then unevaluatedItems unevaluatedProperties uniqueItems".split()
)
"""Keywords that the library cannot enforce."""
_WITHOUT_EFFECT = {"uniqueItems": False, "nullable": False}
"""Values of refused keywords that restrict nothing."""
_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_DIALECTS = frozenset(
    f"json-schema.org/{name}/schema"
    for name in ("draft-04", "draft-06", "draft-07", "draft/2019-09", "draft/2020-12")
)
_LARGEST = 2**53
"""Whole numbers up to this one are exact in the library."""

_TOO_DEEP = "is nested too deeply"
_MOST_DEPTH = 120
"""Parts of a JSON pointer. The library reads 127 levels."""

_SUBSCHEMAS = ("items", "additionalItems", "additionalProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")


def read_schema(text: str) -> dict[str, Any]:
    """The schema in ``text``, in the words of the library. Raises ValueError naming the place."""
    try:
        schema = json.loads(
            text, object_pairs_hook=_object, parse_float=_float, parse_constant=_constant
        )
    except json.JSONDecodeError as error:
        raise ValueError(
            f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from error
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    if not isinstance(schema, dict):
        raise ValueError("must be a JSON object")
    waiting: list[tuple[str, dict[str, Any]]] = [("", schema)]
    multiples: set[Decimal] = set()
    combines = False
    while waiting:
        place, part = waiting.pop()
        if place.count("/") > _MOST_DEPTH:
            raise ValueError(_TOO_DEEP)
        _check(place, part)
        combines |= not part.keys().isdisjoint(("allOf", "anyOf", "oneOf", "$ref"))
        if "multipleOf" in part:
            multiples.add(Decimal(repr(part["multipleOf"])))
        inner = ((place + pointer, each) for pointer, each in parts(part))
        waiting += [(pointer, each) for pointer, each in inner if isinstance(each, dict)]
    if combines and multiples:
        _check_multiples(multiples)
    try:
        json.dumps(schema, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("has a text with a lone surrogate") from error
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    return schema


def parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside ``schema``, each with its JSON pointer."""
    for key in _SUBSCHEMAS:
        if key in schema and not isinstance(schema[key], list):
            yield f"/{key}", schema[key]
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            for index, inner in enumerate(schema[key]):
                yield f"/{key}/{index}", inner
    for key in _MAPS:
        if isinstance(schema.get(key), Mapping):
            for name, inner in schema[key].items():
                yield f"/{key}/{escaped(name)}", inner


def _check(place: str, schema: dict[str, Any]) -> None:
    """Checks the keywords of ``schema`` itself, and rewrites them in the library's words. Raises ValueError."""
    for key in list(schema):
        _check_keyword(f"{place}/{escaped(key)}", key, schema)
    for key in _NUMBERS:
        if key in schema:
            _check_exact(f"{place}/{key}", schema[key])
    for key in ("const", "enum"):
        if key in schema:
            _check_values(f"{place}/{key}", schema[key])
    for key in _COUNTS:
        value = schema.get(key)
        if isinstance(value, float) and value.is_integer():
            schema[key] = int(value)
    multiple = schema.get("multipleOf", 1)
    if not (_is_number(multiple) and multiple > 0):
        raise ValueError(f"at {place}/multipleOf: must be a number above 0")
    least, required = schema.get("minProperties"), schema.get("required")
    if isinstance(least, int) and least > 1:
        names = set(map(str, required)) if isinstance(required, list) else set()
        if least > len(names):
            raise ValueError(
                f"at {place}/minProperties: {least} cannot be enforced, because names may repeat; "
                "list the properties under required, or lower it to 1"
            )
    _rewrite_format(place, schema)


def _check_keyword(place: str, key: str, schema: dict[str, Any]) -> None:
    value = schema[key]
    if key in REFUSED:
        if key in _WITHOUT_EFFECT and value is _WITHOUT_EFFECT[key]:
            del schema[key]
            return
        advice = 'list "null" under type' if key == "nullable" else "leave it out"
        raise ValueError(f"at {place}: this keyword cannot be enforced; {advice}")
    if key == "x-guidance":
        raise ValueError(f"at {place}: options of the library cannot be set; leave it out")
    if key == "$ref" and not (isinstance(value, str) and value.startswith("#")):
        raise ValueError(f"at {place}: {value!r} is not in this schema; a reference begins with #")
    if key == "$schema":
        name = str(value).removeprefix("https://").removeprefix("http://").rstrip("#")
        if name not in _DIALECTS:
            raise ValueError(
                f"at {place}: {value!r} is not known; known: drafts 4, 6, 7, 2019-09 and 2020-12"
            )
    if key not in ENFORCED and key not in ANNOTATIONS and not key.startswith("x-"):
        near = difflib.get_close_matches(key, [*ENFORCED, *ANNOTATIONS], n=1)
        hint = f"did you mean {near[0]}?" if near else 'leave it out, or begin its name with "x-"'
        raise ValueError(f"at {place}: is not a keyword of JSON Schema; {hint}")


def _rewrite_format(place: str, schema: dict[str, Any]) -> None:
    name = schema.get("format")
    if name is None:
        return
    del schema["format"]
    if isinstance(name, str) and name in PATTERNS:
        pattern = f"^(?:{PATTERNS[name]})$"
        if "pattern" in schema:
            others = schema.get("allOf", [])
            schema["allOf"] = [*others, {"pattern": pattern}] if isinstance(others, list) else None
        else:
            schema["pattern"] = pattern
        if name in MAX_LENGTHS:
            limit = schema.get("maxLength")
            least = MAX_LENGTHS[name]
            schema["maxLength"] = min(limit, least) if isinstance(limit, int) else least
    elif isinstance(name, str) and name in RANGES and schema.get("type") in ("integer", "number"):
        for key, bound, choose in zip(
            ("minimum", "maximum"), RANGES[name] or (), _CHOICES, strict=False
        ):
            limit = schema.get(key)
            schema[key] = choose(limit, bound) if _is_number(limit) else bound
    else:
        raise ValueError(
            f"at {place}/format: {name!r} is not known; known: {', '.join(sorted(PATTERNS))}, and for numbers "
            f"{', '.join(RANGES)}"
        )


_CHOICES: tuple[Callable[..., Any], ...] = (max, min)


def _check_values(place: str, value: Any) -> None:
    """Checks the numbers in the value of const or enum."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
        else:
            _check_exact(place, each)


def _check_exact(place: str, value: object) -> None:
    if _is_number(value) and abs(value) > _LARGEST:  # type: ignore[arg-type]
        raise ValueError(
            f"at {place}: {value} cannot be enforced exactly; the limit is 2^53 = {_LARGEST}; use a string instead"
        )


def _check_multiples(multiples: set[Decimal]) -> None:
    """The library combines values of multipleOf as whole numbers of 32 bits, without a check."""
    if len(multiples) <= 2:
        largest = max(math.prod(_scaled((one, other))) for one in multiples for other in multiples)
    else:
        scaled = _scaled(multiples)
        largest = math.lcm(*scaled) * max(scaled)
    if largest >= 2**32:
        raise ValueError("multipleOf: the values in this schema are too large to be combined")


def _scaled(numbers: Collection[Decimal]) -> list[int]:
    """The numbers times the least power of ten that makes them whole."""
    exponents = [int(number.normalize().as_tuple().exponent) for number in numbers]
    return [int(number.scaleb(-min(0, *exponents))) for number in numbers]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"has the name {twice[:60]!r} twice in one object")
    return found


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or Decimal(text) != Decimal(repr(value)):
        raise ValueError(f"has the number {text[:40]}, which no 64-bit number has exactly")
    return value


def _constant(text: str) -> float:
    raise ValueError(f"is not JSON: {text} is not a number")


def escaped(name: str) -> str:
    """A name in a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")
