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
MOST_CHARACTERS = 64 * 1024
MOST_LABELS = 64


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
    if not isinstance(config, str) or not 0 < len(config) <= MOST_CHARACTERS:
        raise RequestRefused(
            f"label_config: must be the labelling configuration, a text of at most {MOST_CHARACTERS} characters"
        )
    if "<!DOCTYPE" in config:
        raise RequestRefused("label_config: has a document type (<!DOCTYPE>); remove it")
    try:
        tags = list(ElementTree.fromstring(config).iter())
    except (ElementTree.ParseError, UnicodeEncodeError) as error:
        raise RequestRefused(f"label_config: is not XML: {error}") from None
    images = {_given(tag, "name"): _given(tag, "value") for tag in tags if tag.tag == "Image"}
    controls = []
    for tag in tags:
        if tag.tag in KINDS:
            name, to_name = _given(tag, "name"), _given(tag, "toName")
            labels = [pair for label in tag.iter("Label") for pair in _names(label)]
            field = images.get(to_name, "").removeprefix("$")
            controls.append(Control(KINDS[tag.tag], name, to_name, field, labels))
    if sum(len(control.labels) for control in controls) > MOST_LABELS:
        raise RequestRefused(f"label_config: has more labels than the limit of {MOST_LABELS}")
    return [control for control in controls if control.image_field and control.labels]


def _names(label: ElementTree.Element) -> list[tuple[str, str]]:
    """What the model looks for, with the label that it gets."""
    value = _given(label, "value")
    names = [name.strip() for name in label.get("predicted_values", "").split(",")]
    return [(name, value) for name in names if name] or [(value.strip(), value)]


def _given(tag: ElementTree.Element, name: str) -> str:
    if value := tag.get(name):
        return value
    raise RequestRefused(f"label_config: a tag {tag.tag} has no {name}")
