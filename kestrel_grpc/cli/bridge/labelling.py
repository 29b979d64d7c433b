"""Reads a project's labelling configuration, which is XML from the caller.

expat reads it without a tree, and a document type is refused, so it can name no entity or file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from xml.parsers import expat

KINDS = {
    "RectangleLabels": "rectanglelabels",
    "KeyPointLabels": "keypointlabels",
    "PolygonLabels": "polygonlabels",
}
"""The controls that the bridge fills, and the type of their regions."""
MOST_CHARACTERS = 256 * 1024
MOST_LABELS = 64
_MOST_DEPTH = 64
_LONGEST_NAME = 256
"""Characters of the name of an object, of a control, or of a field of a task."""


class RequestRefused(Exception):
    """The request can't be answered. The message is for the caller: field, value, limit, what to do."""


@dataclass(slots=True)
class Control:
    """``kind``: the type of its regions. ``image_field``: the key of a task's data that holds the image."""

    kind: str
    from_name: str
    to_name: str
    image_field: str = ""
    labels: list[tuple[str, str]] = field(default_factory=list)
    """The name of an object that the model looks for, and the label that it gets."""


class _Reader:
    def __init__(self) -> None:
        self.controls: list[Control] = []
        self.images: dict[str, str] = {}
        self._open: list[Control | None] = []
        self._num_labels = 0

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        if len(self._open) == _MOST_DEPTH:
            raise RequestRefused(f"label_config: is nested deeper than the limit of {_MOST_DEPTH}")
        control = self._open[-1] if self._open else None
        if tag in KINDS:
            from_name, to_name = (_given(tag, attributes, name) for name in ("name", "toName"))
            control = Control(KINDS[tag], from_name, to_name)
            self.controls.append(control)
        elif tag == "Image":
            name, value = (_given(tag, attributes, name) for name in ("name", "value"))
            if not value.startswith("$"):
                raise RequestRefused(
                    f"label_config: value {value!r} of Image {name!r} must name a field of the task, like $image"
                )
            self.images[name] = value[1:]
        elif tag == "Label" and control is not None:
            label = _given(tag, attributes, "value")
            asked = attributes.get("predicted_values", "").split(",")
            names = [name.strip() for name in asked if name.strip()] or [label]
            self._num_labels += len(names)
            if self._num_labels > MOST_LABELS:
                raise RequestRefused(
                    f"label_config: has more labels than the limit of {MOST_LABELS}"
                )
            control.labels += [(_short(tag, name), label) for name in names]
        self._open.append(control)

    def end(self, _: str) -> None:
        self._open.pop()

    def refuse_doctype(self, *_: object) -> None:
        raise RequestRefused("label_config: has a document type (<!DOCTYPE>); remove it")


def _given(tag: str, attributes: dict[str, str], name: str) -> str:
    value = attributes.get(name, "")
    if not value:
        raise RequestRefused(f"label_config: a tag {tag} has no {name}")
    return _short(tag, value)


def _short(tag: str, value: str) -> str:
    if len(value) > _LONGEST_NAME:
        raise RequestRefused(
            f"label_config: a tag {tag} has a value of {len(value)} characters, the limit is {_LONGEST_NAME}"
        )
    return value


def read_controls(config: object) -> list[Control]:
    """Returns the controls that have labels and belong to an image. Raises RequestRefused."""
    if not isinstance(config, str) or not config.strip():
        raise RequestRefused("label_config: must be the labelling configuration, as text")
    if len(config) > MOST_CHARACTERS:
        raise RequestRefused(
            f"label_config: has {len(config)} characters, the limit is {MOST_CHARACTERS}"
        )
    reader = _Reader()
    parser = expat.ParserCreate("utf-8")
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.StartDoctypeDeclHandler = reader.refuse_doctype
    try:
        parser.Parse(config.encode(), True)
    except expat.ExpatError as error:
        why = expat.ErrorString(error.code)
        raise RequestRefused(f"label_config: is not XML: {why}, line {error.lineno}") from None
    except UnicodeEncodeError:
        raise RequestRefused("label_config: is not Unicode text") from None
    for control in reader.controls:
        control.image_field = reader.images.get(control.to_name, "")
    return [control for control in reader.controls if control.image_field and control.labels]
