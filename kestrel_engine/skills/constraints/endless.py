"""Finds the part of a schema that requires itself without end, so that no finite text matches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from .circles import Part, closing
from .schemas import escaped, parts

_KINDS = ("", "object", "array")
_SAME_VALUE = ("/anyOf/", "/oneOf/", "/allOf/")
_DEFINITIONS = ("/$defs/", "/definitions/")
_MOST_PARTS = 50_000
"""Beyond them, nothing is looked for."""


@dataclass(slots=True, eq=False)
class _Part(Part):
    """``kind``: object or array, if its values are of no other type; "" if of any type; None otherwise."""

    place: str
    schema: Mapping[str, Any]
    kind: str | None


_Make = Callable[[str, Mapping[str, Any], "str | None"], _Part]


def endless_place(schema: Mapping[str, Any]) -> str | None:
    """The JSON pointer of the reference that closes a circle of requirements; None if every part ends."""
    part = closing(_parts_of(schema))
    return f"{part.place}/$ref" if part is not None else None


def _parts_of(schema: Mapping[str, Any]) -> list[_Part]:
    """The parts that a text may reach; none if they are too many."""
    known: dict[tuple[int, str | None], _Part] = {}
    found: list[_Part] = []

    def make(place: str, inner: Mapping[str, Any], above: str | None) -> _Part:
        own = _kind_of(inner)
        key = id(inner), own or (above if own == "" else None)
        if key not in known:
            known[key] = _Part(place, inner, key[1])
            found.append(known[key])
        return known[key]

    make("", schema, "")
    for part in found:  # It grows meanwhile.
        if len(found) > _MOST_PARTS:
            return []
        if "const" not in part.schema and "enum" not in part.schema:
            part.needs.extend(_needs(part, schema, make))
    return found


def _kind_of(schema: Mapping[str, Any]) -> str | None:
    """As _Part.kind, by the schema alone."""
    several = schema.get("allOf")
    said = [each for each in [schema, *(several if isinstance(several, list) else ())] if each]
    types = (each.get("type") for each in said if isinstance(each, Mapping))
    kind = next((each for each in types if each is not None), "")
    if isinstance(kind, list):
        kind = kind[0] if len(kind) == 1 else None
    return kind if kind in _KINDS else None


def _needs(part: _Part, whole: Mapping[str, Any], make: _Make) -> Iterator[list[_Part]]:
    schema, inside = part.schema, dict[str, _Part]()
    if (target := _target(whole, schema.get("$ref"))) is not None:
        part.refers = True
        yield [make(schema["$ref"][1:], target, part.kind)]
    for pointer, inner in parts(schema):
        if isinstance(inner, Mapping) and not pointer.startswith(_DEFINITIONS):
            is_same = pointer.startswith(_SAME_VALUE)
            inside[pointer] = make(part.place + pointer, inner, part.kind if is_same else "")
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        if isinstance(branches, list) and branches:
            if all(isinstance(each, Mapping) for each in branches):
                yield [inside[f"/{key}/{index}"] for index in range(len(branches))]
    for pointer, inner_part in inside.items():
        if pointer.startswith("/allOf/"):
            yield [inner_part]
    if part.kind == "object":
        yield from _of_object(schema, inside)
    elif part.kind == "array":
        yield from _of_array(schema, inside)


def _of_object(schema: Mapping[str, Any], inside: Mapping[str, _Part]) -> Iterator[list[_Part]]:
    required, named = schema.get("required"), schema.get("properties")
    names = required if isinstance(required, list) else []
    for name in names:
        if isinstance(named, Mapping) and name in named:
            pointer = f"/properties/{escaped(name)}"
        else:
            pointer = "" if schema.get("patternProperties") else "/additionalProperties"
        if pointer in inside:
            yield [inside[pointer]]
    if schema.get("minProperties") and not names and schema.get("additionalProperties") is not None:
        kinds = ("/properties/", "/patternProperties/", "/additionalProperties")
        options = [each for pointer, each in inside.items() if pointer.startswith(kinds)]
        if options and schema["additionalProperties"] is not True:
            yield options


def _of_array(schema: Mapping[str, Any], inside: Mapping[str, _Part]) -> Iterator[list[_Part]]:
    key = "prefixItems" if "prefixItems" in schema else "items"
    first, least = schema.get(key), schema.get("minItems")
    count = len(first) if isinstance(first, list) else 0
    least = least if isinstance(least, int) else 0
    pointers = [f"/{key}/{index}" for index in range(min(least, count))]
    if least > count:
        pointers.append("/additionalItems" if isinstance(schema.get("items"), list) else "/items")
    yield from ([inside[pointer]] for pointer in pointers if pointer in inside)


def _target(whole: Mapping[str, Any], reference: object) -> Mapping[str, Any] | None:
    """What a JSON pointer names; None if that is no object."""
    if not isinstance(reference, str) or reference[:1] != "#":
        return None
    found: Any = whole
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        key = int(name) if isinstance(found, list) and name.isdecimal() else name
        try:
            found = found[key]
        except (LookupError, TypeError):
            return None
    is_pointer = reference == "#" or reference.startswith("#/")
    return found if is_pointer and isinstance(found, Mapping) else None
