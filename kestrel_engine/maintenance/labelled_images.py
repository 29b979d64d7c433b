"""Reads images with labelled objects: annotations in COCO's form, and a folder of image files.

Owns the questions that are asked about the images: which object, and where it is.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError

Edges = tuple[float, float, float, float]
"""x_min, y_min, x_max, y_max as fractions of the image."""


@dataclass(frozen=True, slots=True)
class Question:
    """An object to find in an image, and the boxes of all such objects; none if it is absent."""

    name: str
    boxes: tuple[Edges, ...]


@dataclass(frozen=True, slots=True)
class LabelledImage:
    """A file and the questions about it."""

    path: Path
    questions: tuple[Question, ...]


def read_coco(
    annotations: Path, folder: Path, *, absent: int = 1, seed: int = 0
) -> list[LabelledImage]:
    """Returns the images of a COCO file, with a question for each of their categories.

    ``absent``: questions about absent objects for each image. They are drawn with ``seed`` from the image's
    ``neg_category_ids`` if it has them, as in LVIS, else from all categories that the image has no box of. Boxes with
    ``iscrowd`` make their category unusable for their image. Raises ConfigError, which names the file or the entry.
    """
    fields = _read(annotations)
    names = {
        entry["id"]: str(entry["name"]) for entry in _entries(fields, "categories", annotations)
    }
    boxes: dict[Any, dict[Any, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
    crowded: set[tuple[Any, Any]] = set()
    for entry in _entries(fields, "annotations", annotations):
        key = entry.get("image_id"), entry.get("category_id")
        if key[1] not in names:
            raise _invalid(annotations, f"an annotation has the unknown category_id {key[1]!r}")
        if entry.get("iscrowd"):
            crowded.add(key)
        boxes[key[0]][key[1]].append(_box(entry, annotations))
    rng = random.Random(seed)
    found = []
    for image in _entries(fields, "images", annotations):
        number = image["id"]
        size = (image.get("width"), image.get("height"))
        if not all(isinstance(side, (int, float)) and side > 0 for side in size):
            raise _invalid(annotations, f"image {number!r} has no width and height")
        present = boxes.get(number, {})
        questions = [
            Question(names[category], tuple(_fractions(box, size) for box in own))
            for category, own in present.items()
            if (number, category) not in crowded
        ]
        others = image.get("neg_category_ids", [c for c in names if c not in present])
        others = [category for category in others if category in names and category not in present]
        chosen = rng.sample(others, min(absent, len(others)))
        questions += [Question(names[category], ()) for category in chosen]
        path = folder / str(image.get("file_name", ""))
        if not path.is_file():
            raise ConfigError("images", str(folder), f"has no file {image.get('file_name')!r}")
        found.append(LabelledImage(path, tuple(questions)))
    return found


def _read(path: Path) -> Mapping[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("annotations", str(path), f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise _invalid(path, f"is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise _invalid(path, "is not an object with images, annotations and categories")
    return fields


def _entries(fields: Mapping[str, Any], key: str, path: Path) -> Sequence[Mapping[str, Any]]:
    entries = fields.get(key)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise _invalid(path, f"{key!r} must be a list of objects")
    needed = {"categories": ("id", "name"), "images": ("id",)}.get(key, ())
    for entry in entries:
        for name in needed:
            if name not in entry:
                raise _invalid(path, f"an entry of {key!r} has no {name!r}")
    return entries


def _box(entry: Mapping[str, Any], path: Path) -> list[float]:
    box = entry.get("bbox")
    if (
        not isinstance(box, list)
        or len(box) != 4
        or not all(isinstance(number, (int, float)) for number in box)
    ):
        raise _invalid(path, f"an annotation has no bbox of 4 numbers, but {box!r}")
    return box


def _fractions(box: Sequence[float], size: Sequence[Any]) -> Edges:
    x, y, width, height = box
    across, down = size
    return x / across, y / down, (x + width) / across, (y + height) / down


def _invalid(path: Path, why: str) -> ConfigError:
    return ConfigError("annotations", str(path), why)
