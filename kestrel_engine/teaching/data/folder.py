"""Reads a folder of labelled images: data.jsonl, or annotations.json in COCO's form. An error names line and field.

Every path must stay within the folder, also where it is a link.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...adapters.references import shortened
from ...coco_labels import CocoLabels, Id
from ...errors import ConfigError
from ...types.requests import Edges, is_number
from .examples import (
    BoxExample,
    Example,
    Point,
    PointExample,
    QuestionExample,
    TaughtImage,
    boxes_left_to_right,
    left_to_right,
)

JSONL_NAME = "data.jsonl"
COCO_NAME = "annotations.json"
MAX_FILE_BYTES = 1 << 30
MAX_LINE_BYTES = 1 << 20
MAX_EXAMPLES = 1_000_000
MAX_TEXT_BYTES = 32 * 1024 - 1
MAX_OBJECTS = 150
"""Objects of one example. A request finds no more by default."""
_FORMS = (
    '{"image", "question", "answer"}, {"image", "object", "points"} or {"image", "object", "boxes"}'
)


def read_folder(folder: Path) -> list[TaughtImage]:
    """Returns the images of a folder with their examples, in the order in which the file names them.

    Raises ConfigError, which names the file, the line and the field.
    """
    if not folder.is_dir():
        raise ConfigError("data", str(folder), "is not a folder")
    lines, coco = folder / JSONL_NAME, folder / COCO_NAME
    if lines.is_file() and coco.is_file():
        raise ConfigError(
            "data", str(folder), f"has both {JSONL_NAME} and {COCO_NAME}; keep one of them"
        )
    if not lines.is_file() and not coco.is_file():
        raise ConfigError("data", str(folder), f"has neither {JSONL_NAME} nor {COCO_NAME}")
    file = lines if lines.is_file() else coco
    if file.stat().st_size > MAX_FILE_BYTES:
        raise ConfigError("data", str(file), f"has more than {MAX_FILE_BYTES} bytes")
    labelled = _read_lines(lines) if file == lines else _read_coco(coco)
    found: dict[Path, list[Example]] = {}
    for where, name, example in labelled:
        path = _image_path(folder, name, where)
        found.setdefault(path, []).append(example)
    if not found:
        raise ConfigError("data", str(file), "holds no example")
    return [TaughtImage(path, tuple(examples)) for path, examples in found.items()]


def _image_path(folder: Path, name: str, where: str) -> Path:
    """Returns the image's file. Raises ConfigError if it is not a file within the folder."""
    try:
        path = (folder / name).resolve()
        inside = path.is_relative_to(folder.resolve())
        is_file = inside and path.is_file()
    except (OSError, ValueError):  # ValueError: a null byte
        inside = is_file = False
    if not inside:
        raise ConfigError(
            "data", where, f"image {shortened(name)} must be a file within the folder"
        )
    if not is_file:
        raise ConfigError("data", where, f"image {shortened(name)} is not a file of the folder")
    return path


def _read_coco(file: Path) -> list[tuple[str, str, Example]]:
    """As ``_read_lines``. Categories that an image names as absent are taught as absent. Those with a crowd are not
    taught for their image."""
    labels = CocoLabels(file, "data")
    found: list[tuple[str, str, Example]] = []
    for image in labels.images:
        absent: dict[Id, list[Edges]] = {
            each: [] for each in image.absent or () if each not in image.boxes
        }
        found += [
            (image.where, image.name, BoxExample(labels.categories[each], boxes_left_to_right(own)))
            for each, own in {**image.boxes, **absent}.items()
            if each not in image.crowded
        ]
    return found


def _read_lines(file: Path) -> list[tuple[str, str, Example]]:
    """Returns where each example stands, the name of its image, and the example."""
    found: list[tuple[str, str, Example]] = []
    with file.open("rb") as opened:
        number = 0
        while line := opened.readline(MAX_LINE_BYTES + 1):
            number += 1
            where = f"{file.name} line {number}"
            if len(line) > MAX_LINE_BYTES:
                raise ConfigError("data", where, f"has more than {MAX_LINE_BYTES} bytes")
            if not line.strip():
                continue
            if len(found) == MAX_EXAMPLES:
                raise ConfigError("data", where, f"is past the limit of {MAX_EXAMPLES} examples")
            found.append(_parsed(line, where))
    return found


def _parsed(line: bytes, where: str) -> tuple[str, str, Example]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError("data", where, f"is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError("data", where, f"must be an object: {_FORMS}")
    kinds = {
        frozenset({"image", "question", "answer"}): _answered,
        frozenset({"image", "object", "points"}): _pointed,
        frozenset({"image", "object", "boxes"}): _boxed,
    }
    make = kinds.get(frozenset(fields))
    if make is None:
        names = ", ".join(sorted(map(shortened, fields))[:8]) or "none"
        raise ConfigError("data", where, f"has the fields {names}; expected {_FORMS}")
    return where, _text(fields, "image", where), make(fields, where)


def _answered(fields: Mapping[str, Any], where: str) -> Example:
    return QuestionExample(_text(fields, "question", where), _text(fields, "answer", where))


def _pointed(fields: Mapping[str, Any], where: str) -> Example:
    points: list[Point] = []
    for index, value in enumerate(_list(fields, "points", where)):
        x, y = _fractions(value, 2, f"points[{index}]", "[x, y]", where)
        points.append((x, y))
    return PointExample(_text(fields, "object", where), left_to_right(points))


def _boxed(fields: Mapping[str, Any], where: str) -> Example:
    boxes: list[Edges] = []
    for index, value in enumerate(_list(fields, "boxes", where)):
        name = f"boxes[{index}]"
        x0, y0, x1, y1 = _fractions(value, 4, name, "[x_min, y_min, x_max, y_max]", where)
        if x0 >= x1 or y0 >= y1:
            raise ConfigError("data", where, f"{name} needs x_min < x_max and y_min < y_max")
        boxes.append((x0, y0, x1, y1))
    return BoxExample(_text(fields, "object", where), boxes_left_to_right(boxes))


def _text(fields: Mapping[str, Any], name: str, where: str) -> str:
    value = fields[name]
    if not isinstance(value, str) or not value.strip():
        raise ConfigError("data", where, f"{name} must be a text that is not empty")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise ConfigError("data", where, f"{name} is not valid Unicode") from None
    if size > MAX_TEXT_BYTES:
        raise ConfigError(
            "data", where, f"{name} has {size} UTF-8 bytes, the limit is {MAX_TEXT_BYTES}"
        )
    return value if name == "image" else value.strip()


def _list(fields: Mapping[str, Any], name: str, where: str) -> list[Any]:
    value = fields[name]
    if not isinstance(value, list):
        raise ConfigError("data", where, f"{name} must be a list")
    if len(value) > MAX_OBJECTS:
        raise ConfigError("data", where, f"{name} has {len(value)} entries, the limit is 150")
    return value


def _fractions(value: Any, count: int, name: str, form: str, where: str) -> list[float]:
    if not isinstance(value, list) or len(value) != count:
        raise ConfigError("data", where, f"{name} must be {form}")
    for each in value:
        if not is_number(each) or not 0 <= each <= 1:
            raise ConfigError("data", where, f"{name}: {shortened(each)} is not a number in [0, 1]")
    return [float(each) for each in value]
