"""Charts of libraries: of charts.zip or held/charts.zip (shoot.py makes them), or drawn now by matplotlib."""

from __future__ import annotations

import random
from typing import Any

from training.domains.drawn import open_drawings
from training.domains.phrasing import off_topic
from training.domains.picture import Ask, Box, Mark, Picture, centre, find, in_order
from training.domains.webcharts.plotted import plot
from training.domains.webcharts.questions import ask_about
from training.domains.webcharts.tables import make_table

PLOTTED = 0.7
"""The share that is drawn now: the charts of the archive are few, and a model would learn them by heart."""


def draw(rng: random.Random, width: int, height: int, held: bool) -> Picture:
    boxes: list[list[Box]] = []
    if not held and rng.random() < PLOTTED:
        table = {"library": "matplotlib", **make_table(rng)}
        pixels, boxes = plot(rng, table, width, height)
    else:
        archive = open_drawings("held/charts.zip" if held else "charts.zip", "charts.json")
        pixels, table, _ = archive.place(rng, width, height)
    asks = ask_about(rng, table, exact=held) + _places(rng, table, boxes, width)
    if rng.random() < 0.2:
        asks.append(off_topic(rng))
    label = "grouped bar" if table["kind"] == "bar" and len(boxes) > 1 else table["kind"]
    marks = [Mark(box, label) for row in boxes for box in row]
    return Picture(pixels, asks, marks, complete=False)


def _places(
    rng: random.Random, table: dict[str, Any], boxes: list[list[Box]], width: int
) -> list[Ask]:
    """Where is the bar or the point of a label?"""
    if len(boxes) != 1:
        return []
    label, box = rng.choice(list(zip(table["labels"], boxes[0], strict=True)))
    if table["kind"] != "bar":
        return [find("point", "webcharts point", f"the point of {label}", [box])]
    said = rng.choice((f"the bar of {label}", f"{label} bar", f"bar for {label}"))
    every = rng.choice(("bar", "bars", "all bars"))
    return [
        find("detect", "webcharts detect", said, [box]),
        find("detect", "webcharts detect", every, in_order(boxes[0], width, centre)),
    ]
