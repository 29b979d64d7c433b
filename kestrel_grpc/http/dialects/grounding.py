"""Boxes and points in chat completions: how a request asks for them, and the JSON that answers it.

A request asks by its text (``Detect: OBJECT`` or ``Point: OBJECT`` as the whole last message), or by a JSON Schema
whose items have one of the properties of _PLACES. The skills ``detect`` and ``point`` find the objects, and the answer
consists of their results. So the model writes no numbers as text, and every object has a score.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import orjson

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import InvalidRequest, RuntimeFailure

from ...services.messages.task_fields import fault_of
from ..fields import Fields

_COMMAND = re.compile(r"\s*(detect|point)\s*:\s*(.+)", re.IGNORECASE | re.DOTALL)
_LEADING = re.compile(
    r"(?:please )?(?:detect|find|locate|point (?:at|to)|where (?:is|are)) (?:(?:all|every|each|any|of|the|an?) )*",
    re.IGNORECASE,
)
_TRAILING = re.compile(r" (?:in|on) (?:the|this) (?:image|picture|photo)$", re.IGNORECASE)
_SCORES = ("score", "confidence")
_SCHEMA = ("response_format", "json_schema", "schema")
_MOST_REFERENCES = 8

_Size = common_pb2.ImageSize


def _pixels(values: Sequence[float], size: _Size) -> list[int]:
    """x and y in turn, in pixels of the upright image."""
    sides = (size.width, size.height) * 2
    return [round(value * side) for value, side in zip(values, sides, strict=False)]


def _thousandths(values: Sequence[float], size: _Size) -> list[int]:
    """y and x in turn, in thousandths of the image's sides."""
    return [round(1000 * values[place ^ 1]) for place in range(len(values))]


_PLACES: Mapping[str, tuple[str, Callable[[Sequence[float], _Size], list[int]]]] = {
    "bbox_2d": ("detect", _pixels),
    "box_2d": ("detect", _thousandths),
    "point_2d": ("point", _pixels),
    "point": ("point", _thousandths),
}
"""The properties that hold a place, each with its skill. ``bbox_2d`` and ``point_2d`` are those of Qwen2.5-VL,
``box_2d`` and ``point`` those of Gemini."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The places that a request asks for.

    ``names``: of the objects. ``place``, ``score``: names of an item's properties; ``score`` may be "". ``around``: the
    property of the root object that holds the list; "" for a list alone. ``most``: the most objects of each name.
    """

    names: tuple[str, ...]
    place: str
    has_label: bool = True
    score: str = "score"
    around: str = ""
    most: int | None = None

    @property
    def skill(self) -> str:
        return _PLACES[self.place][0]

    def request(self) -> pb.DetectRequest | pb.PointRequest:
        """A request for the objects, without image and settings."""
        if self.skill == "detect":
            task = pb.DetectTask(objects=self.names, max_objects=self.most)
            return pb.DetectRequest(detect=task)
        return pb.PointRequest(point=pb.PointTask(objects=self.names, max_objects=self.most))

    def text(self, response: pb.DetectResponse | pb.PointResponse) -> str:
        """The answer, as JSON. Raises InvalidRequest or RuntimeFailure if the search for a name has failed."""
        for search in response.searches:
            if search.HasField("error"):
                fault = fault_of(search.error)
                message = f"{search.object!r}: {fault.message}"
                if fault.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]:
                    raise InvalidRequest(_SCHEMA, message)
                raise RuntimeFailure(message)
        size, convert = response.info.images[0].size, _PLACES[self.place][1]
        items: list[dict[str, Any]] = []
        for found in response.detections:
            item: dict[str, Any] = {self.place: convert(_numbers(found), size)}
            if self.has_label:
                item["label"] = found.label
            if self.score:
                item[self.score] = found.score
            items.append(item)
        return orjson.dumps({self.around: items} if self.around else items).decode()


def _numbers(found: pb.Detection) -> Sequence[float]:
    if found.HasField("point"):
        return (found.point.x, found.point.y)
    return (found.box.x_min, found.box.y_min, found.box.x_max, found.box.y_max)


def wanted_places(text: str, form: Fields) -> Wanted | None:
    """The places that a request asks for; None if it asks for none. ``text``: of the last message, without system text.
    ``form``: the request's ``response_format``. Raises InvalidRequest."""
    command = _COMMAND.fullmatch(text)
    kind = form.text("type", "text")
    if kind == "json_schema":
        wanted = _by_schema(form.inner("json_schema").inner("schema").values, text, command)
        if wanted is not None:
            return wanted
    if command is None:
        return None
    if kind != "text":
        names = ", ".join(_PLACES)
        raise InvalidRequest(
            "response_format",
            f"must be text for boxes and points, or a JSON Schema for a list of items with one of {names}",
        )
    return Wanted(
        (command[2].strip(),), "bbox_2d" if command[1].lower() == "detect" else "point_2d"
    )


def _by_schema(schema: dict[str, Any], text: str, command: re.Match[str] | None) -> Wanted | None:
    """None if the schema has no list of items with a place. Raises InvalidRequest."""
    root = _resolved(schema, schema)
    lists = {"": root} if root.get("type") == "array" else _properties(root)
    for around, each in lists.items():
        listed = _resolved(each, schema)
        item = _resolved(listed.get("items"), schema)
        has = _properties(item)
        place = next((name for name in _PLACES if name in has), None)
        if place is None:
            continue
        skill = _PLACES[place][0]
        if command is not None and command[1].lower() != skill:
            raise InvalidRequest(
                _SCHEMA, f"has {place}, but the message asks to {command[1].lower()}"
            )
        _check_required(root if around else {}, (around,), place)
        _check_required(item, (place, "label", *_SCORES), place)
        label = _resolved(has.get("label"), schema)
        most = listed.get("maxItems")
        return Wanted(
            (command[2].strip(),) if command is not None else _names(label) or (_phrase(text),),
            place,
            has_label="label" in has,
            score=next((name for name in _SCORES if name in has), ""),
            around=around,
            most=most if isinstance(most, int) and 1 <= most < 2**31 else None,
        )
    return None


def _resolved(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """The schema that a reference like ``#/$defs/Name`` stands for. Empty if that is not an object."""
    for _ in range(_MOST_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for part in reference.removeprefix("#/").split("/"):
            schema = schema.get(part) if isinstance(schema, dict) else None
    return schema if isinstance(schema, dict) else {}


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def _check_required(schema: dict[str, Any], known: Sequence[str], place: str) -> None:
    """Raises InvalidRequest if the answer needs a property that no skill gives."""
    required = schema.get("required")
    for name in required if isinstance(required, list) else ():
        if name not in known:
            raise InvalidRequest(
                _SCHEMA,
                f"requires {name!r} beside {place}; the server gives only {', '.join(filter(None, known))}",
            )


def _names(label: dict[str, Any]) -> tuple[str, ...]:
    """The names that the property ``label`` allows; empty for any text."""
    given = label.get("enum", [label["const"]] if "const" in label else [])
    names = [name for name in given if isinstance(name, str)] if isinstance(given, list) else []
    return tuple(dict.fromkeys(names))


def _phrase(text: str) -> str:
    """The name of the object in a sentence like "Find all red cars in the image."."""
    plain = " ".join(text.split()).rstrip(" .?!")
    plain = _TRAILING.sub("", plain)
    begun = _LEADING.match(plain)
    return plain if begun is None else plain[begun.end() :] or plain
