"""Annotations in COCO's form as examples: for each image, the boxes of each of its categories.

Categories that an image names in ``neg_category_ids``, as in LVIS, are taught as absent. Boxes with ``iscrowd`` make
their category unusable for their image.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...types.requests import is_number
from .examples import Boxed, Edges, Example, boxes_left_to_right


def read_coco(file: Path) -> list[tuple[str, str, Example]]:
    """Returns where each example stands, the name of its image, and the example. Raises ConfigError, which names the
    entry and its field."""
    try:
        fields = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError("data", file.name, f"is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(
            "data", file.name, "must be an object with images, annotations, categories"
        )
    names = _by_id(fields, "categories", "name", file)
    images = _by_id(fields, "images", "file_name", file)
    boxes: dict[tuple[Any, Any], list[Edges]] = {}
    crowded = set()
    entries = {entry["id"]: entry for entry in _entries(fields, "images", file)}
    for index, entry in enumerate(_entries(fields, "annotations", file)):
        where = f"{file.name} annotations[{index}]"
        image, category = (
            _known(entry, "image_id", images, where),
            _known(entry, "category_id", names, where),
        )
        if entry.get("iscrowd"):
            crowded.add((image, category))
        boxes.setdefault((image, category), []).append(_box(entry, entries[image], where))
    for image, entry in entries.items():
        absent = entry.get("neg_category_ids", [])
        where = f"{file.name} images: id {image!r}"
        if not isinstance(absent, list):
            raise ConfigError("data", where, "neg_category_ids must be a list")
        for category in absent:
            _known({"neg_category_ids": category}, "neg_category_ids", names, where)
            boxes.setdefault((image, category), [])
    return [
        (
            f"{file.name} images: id {image!r}",
            images[image],
            Boxed(names[category], boxes_left_to_right(own)),
        )
        for (image, category), own in boxes.items()
        if (image, category) not in crowded
    ]


def _entries(fields: Mapping[str, Any], key: str, file: Path) -> list[dict[str, Any]]:
    entries = fields.get(key)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError("data", file.name, f"{key} must be a list of objects")
    return entries


def _by_id(fields: Mapping[str, Any], key: str, wanted: str, file: Path) -> dict[Any, str]:
    """The text ``wanted`` of each entry of ``key``, by its id."""
    found: dict[Any, str] = {}
    for index, entry in enumerate(_entries(fields, key, file)):
        where, number, text = f"{file.name} {key}[{index}]", entry.get("id"), entry.get(wanted)
        if not isinstance(number, (int, str)):
            raise ConfigError("data", where, "id must be a whole number or a text")
        if number in found:
            raise ConfigError("data", where, f"id {number!r} occurs twice")
        if not isinstance(text, str) or not text.strip():
            raise ConfigError("data", where, f"{wanted} must be a text that is not empty")
        found[number] = text
    return found


def _known(entry: Mapping[str, Any], field: str, known: Mapping[Any, str], where: str) -> Any:
    value = entry.get(field)
    if not isinstance(value, (int, str)) or value not in known:
        raise ConfigError("data", where, f"{field} {str(value)[:100]!r} is the id of no entry")
    return value


def _box(entry: Mapping[str, Any], image: Mapping[str, Any], where: str) -> Edges:
    """The box as fractions of the image, cut off at its edges. Raises ConfigError."""
    size = image.get("width"), image.get("height")
    if not all(is_number(side) and side > 0 for side in size):
        raise ConfigError("data", where, f"its image {image['id']!r} has no width and height")
    box = entry.get("bbox")
    if not isinstance(box, list) or len(box) != 4 or not all(map(is_number, box)):
        raise ConfigError("data", where, "bbox must have 4 numbers: x, y, width, height")
    (across, down), (x, y, width, height) = size, box
    edges = (x / across, y / down, (x + width) / across, (y + height) / down)
    x0, y0, x1, y1 = (min(max(edge, 0.0), 1.0) for edge in edges)
    if x0 >= x1 or y0 >= y1:
        raise ConfigError("data", where, f"bbox {str(box)[:100]} has no area within the image")
    return x0, y0, x1, y1
