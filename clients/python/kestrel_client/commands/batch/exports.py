"""Writes the results of a batch in the formats of other tools: CSV, Parquet, COCO and YOLO.

All of them are made from the lines of the journal when the batch ends, so they are whole after an interruption too. The
library supervision writes COCO and YOLO as well, but brings OpenCV, SciPy and Matplotlib, and holds all images at once.
"""

from __future__ import annotations

import csv
import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kestrel_client import DetectedBox, ImageSize
from kestrel_client.drawing.marks import Outline
from kestrel_client.values.results.exports import outlines_to_coco, to_coco

from ..files import escaped, json_text
from ..parser import CommandError

Line = dict[str, Any]


class Export(NamedTuple):
    """A format and the file or folder to write."""

    write: Callable[[Iterable[Line], Path], None]
    path: Path


def parse_export(text: str) -> Export:
    """Reads FILE.csv, FILE.parquet, coco:FILE or yolo:FOLDER. Raises CommandError."""
    kind, colon, name = text.partition(":")
    if colon and kind in ("coco", "yolo") and name:
        return Export(write_coco if kind == "coco" else write_yolo, Path(name))
    path = Path(text)
    if path.suffix.lower() == ".csv":
        return Export(write_csv, path)
    if path.suffix.lower() == ".parquet":
        if importlib.util.find_spec("pyarrow") is None:
            raise CommandError(f"--export {text!r} needs pyarrow: pip install pyarrow")
        return Export(write_parquet, path)
    raise CommandError(
        f"--export {text!r}: must be FILE.csv, FILE.parquet, coco:FILE or yolo:FOLDER"
    )


def write_csv(lines: Iterable[Line], path: Path) -> None:
    """A row for each image. Texts are columns as they are; results with coordinates are JSON."""
    rows, columns = _table(lines)
    with path.open("w", encoding="utf-8", newline="") as opened:
        writer = csv.DictWriter(opened, columns)
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(lines: Iterable[Line], path: Path) -> None:
    """The same columns as `write_csv`, all texts but ``row``."""
    import pyarrow
    import pyarrow.parquet

    rows, columns = _table(lines)
    kinds = {"row": pyarrow.int64()}
    schema = pyarrow.schema([(name, kinds.get(name, pyarrow.string())) for name in columns])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), path)


def _table(lines: Iterable[Line]) -> tuple[list[Line], list[str]]:
    """Rows and the names of their columns."""
    rows = [_flat(line) for line in lines]
    return rows, list(dict.fromkeys(name for row in rows for name in row))


def write_coco(lines: Iterable[Line], path: Path) -> None:
    """The format of COCO's object detection: boxes in pixels, with scores; outlines as polygons; points as keypoints.

    https://cocodataset.org/#format-data
    """
    images, annotations = list[Line](), list[Line]()
    categories: dict[str, int] = {}
    for line in lines:
        size = _size(line)
        if size is None:
            continue
        image_id = len(images) + 1
        images.append(
            {"id": image_id, "file_name": line["image"], "width": size.width, "height": size.height}
        )
        for name in _names(line):
            categories.setdefault(name, len(categories) + 1)
        for found in _objects(line):
            annotation = _annotation(found, size, image_id, categories)
            annotations.append({**annotation, "id": len(annotations) + 1})
    whole = {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": number, "name": name} for name, number in categories.items()],
    }
    path.write_text(json_text(whole), encoding="utf-8")


def write_yolo(lines: Iterable[Line], path: Path) -> None:
    """A folder as Ultralytics' YOLO reads it: ``labels/NAME.txt`` with a line ``class x y width height`` for each box,
    centre and size as fractions of the image, and ``data.yaml`` with the names of the classes.

    https://docs.ultralytics.com/datasets/detect/
    """
    labels = path / "labels"
    labels.mkdir(parents=True, exist_ok=True)
    classes: dict[str, int] = {}
    files: dict[str, str] = {}
    for line in lines:
        if _size(line) is None:
            continue
        stem = Path(line["image"].partition("?")[0]).stem or "image"
        if files.setdefault(stem, line["image"]) != line["image"]:
            raise CommandError(
                f"--export yolo:{path}: {files[stem]!r} and {line['image']!r} would have the same file of labels"
            )
        rows = []
        for name in _names(line):
            classes.setdefault(name, len(classes))
        for found in _objects(line):
            box = _box(found)
            if box is not None:
                centre = (box.x_min + box.x_max) / 2, (box.y_min + box.y_max) / 2
                values = (*centre, box.width, box.height)
                numbers = " ".join(f"{value:.6f}" for value in values)
                rows.append(f"{classes[box.label]} {numbers}")
        (labels / f"{stem}.txt").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    names = "".join(
        f"  {n}: {json.dumps(name, ensure_ascii=False)}\n" for name, n in classes.items()
    )
    (path / "data.yaml").write_text(f"path: .\nnames:\n{names}", encoding="utf-8")


def _flat(line: Line) -> Line:
    flat: Line = {name: line[name] for name in ("row",) if name in line}
    flat["image"] = escaped(line["image"])
    flat["error"] = json.dumps(line["error"], ensure_ascii=False) if "error" in line else ""
    for key, result in line.get("tasks", {}).items():
        text = next((result[name] for name in ("answer", "caption") if name in result), None)
        if text is None:
            kept = ("error", "objects", "points", "segments")
            shown = {name: result[name] for name in kept if name in result}
            text = json.dumps(shown, ensure_ascii=False)
        flat[key] = text
    return flat


def _size(line: Line) -> ImageSize | None:
    size = line.get("image_size")
    return None if size is None else ImageSize(size["width"], size["height"])


def _names(line: Line) -> Iterator[str]:
    """The names that the tasks look for."""
    for result in line["tasks"].values():
        yield from (search["object"] for search in result.get("searches", ()))


def _objects(line: Line) -> Iterator[Line]:
    """What the tasks found: points, boxes and segments."""
    for result in line["tasks"].values():
        for kind in ("points", "objects", "segments"):
            yield from result.get(kind, ())


def _box(found: Line) -> DetectedBox | None:
    """The box of an object; None for a point."""
    edges = found.get("box", found)
    if "x_min" not in edges:
        return None
    corners = (edges["x_min"], edges["y_min"], edges["x_max"], edges["y_max"])
    return DetectedBox(*corners, found["label"], found["score"])


def _annotation(found: Line, size: ImageSize, image_id: int, categories: dict[str, int]) -> Line:
    box = _box(found)
    if box is None:
        x, y = found["x"] * size.width, found["y"] * size.height
        return {
            "image_id": image_id,
            "category_id": categories[found["label"]],
            "keypoints": [x, y, 2],
            "num_keypoints": 1,
            "bbox": [x, y, 0.0, 0.0],  # Many programs read the box of every annotation.
            "area": 0.0,
            "iscrowd": 0,
            "score": found["score"],
        }
    if "svg_path" in found:
        outlined = [(box, Outline(found["svg_path"], box))]
        return outlines_to_coco(outlined, categories, size, image_id)[0]
    return to_coco([box], categories, size, image_id)[0]
