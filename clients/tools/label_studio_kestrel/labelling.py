"""Reads a project's labelling configuration, which is XML from the caller.

A document type is refused, so it can name no entity or file.
"""

from __future__ import annotations

from dataclasses import dataclass
from xml.etree import ElementTree

KINDS = {
    "RectangleLabels": "rectanglelabels",
    "KeyPointLabels": "keypointlabels",
    "PolygonLabels": "polygonlabels",
}
"""The controls that the bridge fills, and the type of their regions."""
MOST_CHARACTERS = 256 * 1024
MOST_LABELS = 64
_LONGEST_NAME = 256
"""Characters of the name of an object, of a control, or of a field of a task."""


class RequestRefused(Exception):
    """The request can't be answered. The message is for the caller: field, value, limit, what to do."""


@dataclass(frozen=True, slots=True)
class Control:
    """``kind``: the type of its regions. ``image_field``: the key of a task's data that holds the image.
    ``labels``: the name of an object that the model looks for, and the label that it gets."""

    kind: str
    from_name: str
    to_name: str
    image_field: str
    labels: list[tuple[str, str]]


def read_controls(config: object) -> list[Control]:
    """Returns the controls that have labels and belong to an image. Raises RequestRefused."""
    if not isinstance(config, str) or not config.strip():
        raise RequestRefused("label_config: must be the labelling configuration, as text")
    if len(config) > MOST_CHARACTERS:
        raise RequestRefused(
            f"label_config: has {len(config)} characters, the limit is {MOST_CHARACTERS}"
        )
    if "<!DOCTYPE" in config:
        raise RequestRefused("label_config: has a document type (<!DOCTYPE>); remove it")
    try:
        tags = list(ElementTree.fromstring(config).iter())
    except ElementTree.ParseError as error:
        raise RequestRefused(f"label_config: is not XML: {error}") from None
    except UnicodeEncodeError:
        raise RequestRefused("label_config: is not Unicode text") from None
    images = {_given(tag, "name"): _field(tag) for tag in tags if tag.tag == "Image"}
    controls = [
        Control(
            KINDS[tag.tag],
            _given(tag, "name"),
            to_name := _given(tag, "toName"),
            images.get(to_name, ""),
            [pair for label in tag.iter("Label") for pair in _names(label)],
        )
        for tag in tags
        if tag.tag in KINDS
    ]
    if sum(len(control.labels) for control in controls) > MOST_LABELS:
        raise RequestRefused(f"label_config: has more labels than the limit of {MOST_LABELS}")
    return [control for control in controls if control.image_field and control.labels]


def _field(image: ElementTree.Element) -> str:
    value = _given(image, "value")
    if not value.startswith("$"):
        raise RequestRefused(
            f"label_config: value {value!r} of Image must name a field of the task, like $image"
        )
    return value[1:]


def _names(label: ElementTree.Element) -> list[tuple[str, str]]:
    """What the model looks for, with the label that it gets."""
    value = _given(label, "value")
    names = [name.strip() for name in label.get("predicted_values", "").split(",")]
    return [(_short(label, name), value) for name in names if name] or [(value.strip(), value)]


def _given(tag: ElementTree.Element, name: str) -> str:
    value = tag.get(name, "")
    if not value:
        raise RequestRefused(f"label_config: a tag {tag.tag} has no {name}")
    return _short(tag, value)


def _short(tag: ElementTree.Element, value: str) -> str:
    if len(value) > _LONGEST_NAME:
        raise RequestRefused(
            f"label_config: a tag {tag.tag} has a value of {len(value)} characters, the limit is {_LONGEST_NAME}"
        )
    return value
