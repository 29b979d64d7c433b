"""Labels in COCO's form: the boxes of each image by category, and the categories that it names as absent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from .errors import ConfigError
from .types.requests import Edges, is_number

Id: TypeAlias = int | str


@dataclass(frozen=True, slots=True)
class CocoImage:
    """``where``: the image's place in the file, for errors. ``name``: of its file. ``boxes``: by category, as fractions
    of the image, cut off at its edges. ``crowded``: categories of ``boxes`` that are unusable, because a box of them
    has ``iscrowd``. ``absent``: what ``neg_category_ids`` names, as in LVIS; None without this field."""

    where: str
    name: str
    absent: tuple[Id, ...] | None
    boxes: dict[Id, list[Edges]] = field(default_factory=dict)
    crowded: set[Id] = field(default_factory=set)


class CocoLabels:
    """The labels of ``file``. ``setting``: the name of the setting that names it. ``categories``: their names, by id.
    Raises ConfigError, which names the entry and its field."""

    def __init__(self, file: Path, setting: str) -> None:
        self._file, self._setting = file, setting
        try:
            self._fields = json.loads(file.read_bytes())
        except OSError as error:
            raise self._error("", f"cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise self._error("", f"is not JSON: {error}") from None
        if not isinstance(self._fields, dict):
            raise self._error("", "must be an object with images, annotations, categories")
        self.categories = self._texts("categories", "name")
        names = self._texts("images", "file_name")
        entries = {entry["id"]: entry for entry in self._entries("images")}
        found = {number: self._image(names[number], entry) for number, entry in entries.items()}
        for index, entry in enumerate(self._entries("annotations")):
            where = f"annotations[{index}]"
            number = self._known(entry, "image_id", names, where)
            category = self._known(entry, "category_id", self.categories, where)
            if entry.get("iscrowd"):
                found[number].crowded.add(category)
            box = self._box(entry, entries[number], where)
            found[number].boxes.setdefault(category, []).append(box)
        self.images = tuple(found.values())

    def _image(self, name: str, entry: Mapping[str, Any]) -> CocoImage:
        where = f"images: id {entry['id']!r}"
        absent = entry.get("neg_category_ids")
        if absent is not None:
            if not isinstance(absent, list):
                raise self._error(where, "neg_category_ids must be a list")
            for category in absent:
                known = {"neg_category_ids": category}
                self._known(known, "neg_category_ids", self.categories, where)
        return CocoImage(
            f"{self._file.name} {where}", name, None if absent is None else tuple(absent)
        )

    def _entries(self, key: str) -> list[dict[str, Any]]:
        entries = self._fields.get(key)
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise self._error("", f"{key} must be a list of objects")
        return entries

    def _texts(self, key: str, wanted: str) -> dict[Id, str]:
        """The text ``wanted`` of each entry of ``key``, by its id."""
        found: dict[Id, str] = {}
        for index, entry in enumerate(self._entries(key)):
            where, number, text = f"{key}[{index}]", entry.get("id"), entry.get(wanted)
            if not isinstance(number, (int, str)):
                raise self._error(where, "id must be a whole number or a text")
            if number in found:
                raise self._error(where, f"id {number!r} occurs twice")
            if not isinstance(text, str) or not text.strip():
                raise self._error(where, f"{wanted} must be a text that is not empty")
            found[number] = text
        return found

    def _known(
        self, entry: Mapping[str, Any], name: str, known: Mapping[Id, str], where: str
    ) -> Id:
        value = entry.get(name)
        if not isinstance(value, (int, str)) or value not in known:
            raise self._error(where, f"{name} {str(value)[:100]!r} is the id of no entry")
        return value

    def _box(self, entry: Mapping[str, Any], image: Mapping[str, Any], where: str) -> Edges:
        size = image.get("width"), image.get("height")
        if not all(is_number(side) and side > 0 for side in size):
            raise self._error(where, f"its image {image['id']!r} has no width and height")
        box = entry.get("bbox")
        if not isinstance(box, list) or len(box) != 4 or not all(map(is_number, box)):
            raise self._error(where, "bbox must have 4 numbers: x, y, width, height")
        (across, down), (x, y, width, height) = size, box
        edges = (x / across, y / down, (x + width) / across, (y + height) / down)
        x0, y0, x1, y1 = (min(max(edge, 0.0), 1.0) for edge in edges)
        if x0 >= x1 or y0 >= y1:
            raise self._error(where, f"bbox {str(box)[:100]} has no area within the image")
        return x0, y0, x1, y1

    def _error(self, where: str, limit: str) -> ConfigError:
        return ConfigError(self._setting, f"{self._file.name} {where}".rstrip(), limit)
