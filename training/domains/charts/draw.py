"""Charts: drawn now by matplotlib, or by a library in Chromium, of charts.zip or held/charts.zip (shoot.py)."""

from __future__ import annotations

import random
from typing import Any

from training.domains.charts.plotted import Plotted, plot
from training.domains.charts.questions import ask_about
from training.domains.charts.tables import make_table
from training.domains.drawn import open_drawings
from training.domains.phrasing import absent_object, off_topic, read
from training.domains.picture import Ask, Box, Mark, Picture, centre, find, in_order


def draw(rng: random.Random, width: int, height: int, held: bool) -> Picture:
    """By matplotlib: no chart is seen twice, and every font of the texts occurs."""
    table = {"library": "matplotlib", **make_table(rng)}
    shown = plot(rng, table, width, height, held)
    asks = ask_about(rng, table, "charts", exact=held)
    asks += _places(rng, table, shown, width)
    label = "grouped bar" if table["kind"] == "bar" and len(shown.boxes) > 1 else table["kind"]
    marks = [Mark(box, label) for row in shown.boxes for box in row]
    return Picture(shown.pixels, _some(rng, asks), marks, shown.characters, complete=False)


def draw_archived(rng: random.Random, width: int, height: int, held: bool) -> Picture:
    archive = open_drawings("held/charts.zip" if held else "charts.zip", "charts.json")
    pixels, table, _ = archive.place(rng, width, height)
    asks = ask_about(rng, table, "webcharts", exact=held)
    return Picture(pixels, _some(rng, asks), complete=False)


def _some(rng: random.Random, asks: list[Ask]) -> list[Ask]:
    return [*asks, off_topic(rng) if rng.random() < 0.2 else absent_object(rng)]


def _places(rng: random.Random, table: dict[str, Any], shown: Plotted, width: int) -> list[Ask]:
    """Where is the bar, the point or the slice of a label? Where does the axis end?"""
    asks, kind = [], table["kind"]
    if len(shown.boxes) == 1:
        label, box = rng.choice(list(zip(table["labels"], shown.boxes[0], strict=True)))
        noun = {"bar": "bar", "pie": "slice"}.get(kind, "point")
        said = rng.choice((f"the {noun} of {label}", f"{label} {noun}", f"{noun} for {label}"))
        asks.append(find("detect" if kind == "bar" else "point", f"charts {noun}", said, [box]))
        every = rng.choice((noun, f"{noun}s", f"all {noun}s"))
        boxes: list[Box] = in_order(shown.boxes[0], width, centre)
        asks.append(find("detect" if kind == "bar" else "point", "charts detect", every, boxes))
    if shown.end:
        ways = "What is the largest number on the axis?|Where does the axis end?|Up to what value does the axis go?"
        asks.append(read(rng, "charts axis", ways, shown.end))
    return asks
