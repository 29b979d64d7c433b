"""Overlays: draws the results of a batch on its images, those of an earlier run too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kestrel_client import AnalyzeResult, Box, Point
from kestrel_client.drawing.marks import Marks, Outline, labelled
from kestrel_client.images.images import ImageInput
from kestrel_client.values.results.showing import draw_marks

from ..requests.painted import Painter
from .journal import Journal
from .rows import Row, file_names

if TYPE_CHECKING:
    import PIL.Image


@dataclass(frozen=True)
class _Stored:
    """A result as the journal has it, which draws itself like the SDK's."""

    marks: Marks
    source: ImageInput

    def draw(self, image: ImageInput | None = None) -> PIL.Image.Image:
        return draw_marks(self.marks, image, self.source)


class Overlays:
    """Writes an image for each of the ``rows`` into ``folder``. Raises CommandError."""

    def __init__(self, folder: str, rows: list[Row]) -> None:
        target = folder if folder.endswith("/") else f"{folder}/"
        self._folder, self._rows, self._names = Path(folder), rows, file_names(rows)
        self._painter = Painter(target, [row.input for row in rows], report=False)

    def write(self, row: Row, result: AnalyzeResult) -> None:
        self._painter.write(result, row.input, self._names[row.identity])

    def write_finished(self, journal: Journal) -> None:
        """Draws the results that the journal has and the folder lacks."""
        missing = {
            row.identity: row
            for row in self._rows
            if row.identity in journal.done
            and not (self._folder / f"{self._names[row.identity]}.png").exists()
        }
        for line in journal.lines() if missing else ():
            row = missing.get((line["image"], line.get("row")))
            if row is not None and "error" not in line:
                marks = sum((_marks(task) for task in line["tasks"].values()), Marks())
                stored = _Stored(marks, row.source)
                self._painter.write(stored, row.input, self._names[row.identity])


def _marks(task: Mapping[str, Any]) -> Marks:
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
