"""Overlays: draws the results of a batch on its images, those of an earlier run too."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from kestrel_client import Box, Point
from kestrel_client.drawing.marks import Marks, Outline, labelled

from ..requests.painted import Painter
from .journal import Identity, Journal
from .rows import Row, file_names


class Overlays:
    """Writes an image for each of the ``rows`` into ``folder``. Raises CommandError."""

    def __init__(self, folder: str, rows: list[Row]) -> None:
        target = folder if folder.endswith("/") else f"{folder}/"
        self._folder, self._rows, self._names = Path(folder), rows, file_names(rows)
        self._painter = Painter(target, [row.input for row in rows], report=False)

    def write(self, journal: Journal, again: Collection[Identity]) -> None:
        """Draws the results of the rows in ``again``, and those that the folder lacks."""
        missing = {
            row.identity: row
            for row in self._rows
            if row.identity in again
            or not (self._folder / f"{self._names[row.identity]}.png").exists()
        }
        for line in journal.lines() if missing else ():
            row = missing.get((line["image"], line.get("row")))
            if row is not None and "error" not in line:
                marks = sum((marks_of(task) for task in line["tasks"].values()), Marks())
                self._painter.write(marks, row.input, self._names[row.identity])


def marks_of(task: Mapping[str, Any]) -> Marks:
    """What the result of a task draws, from its plain values (``Result.to_dict``)."""
    match task:
        case {"points": points}:
            return Marks(points=tuple(Point(point["x"], point["y"]) for point in points))
        case {"objects": objects}:
            return Marks(boxes=labelled((_box(o), o["label"], o["score"]) for o in objects))
        case {"segments": segments}:
            outlines = tuple(Outline(s["svg_path"], _box(s["box"])) for s in segments)
            boxes = labelled((_box(s["box"]), s["label"], s["score"]) for s in segments)
            return Marks(outlines=outlines, boxes=boxes)
        case {"question": question, "answers": [{"text": answer, "reasoning": reasoning}, *_]}:
            spans = [] if reasoning is None else reasoning["grounding"]
            points = tuple(Point(**point) for span in spans for point in span["points"])
            return Marks(points=points, text=tuple(filter(None, (question, answer))))
        case {"caption": caption}:
            return Marks(text=(caption,))
    return Marks()  # It failed.


def _box(edges: Mapping[str, float]) -> Box:
    return Box(edges["x_min"], edges["y_min"], edges["x_max"], edges["y_max"])
