"""Charts: drawn now by matplotlib, or by a library in Chromium, of charts.zip or held/charts.zip (shoot.py)."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

from training.domains.charts.plotted import Plotted, plot
from training.domains.charts.questions import ask_about, readable
from training.domains.charts.questions import number as number_text
from training.domains.charts.tables import make_table
from training.domains.drawn import open_drawings
from training.domains.phrasing import absent_object, read
from training.domains.picture import Ask, Box, Mark, Picture, centre, find, in_order


def draw(rng: random.Random, width: int, height: int, held: bool) -> Picture:
    """By matplotlib: no chart is seen twice, and every font of the texts occurs."""
    table = {"library": "matplotlib", **make_table(rng)}
    shown = plot(rng, table, width, height, held)
    asks = ask_about(rng, table, "charts", exact=held)
    asks += [*_places(rng, table, shown, width), absent_object(rng)]
    label = "grouped bar" if table["kind"] == "bar" and len(shown.boxes) > 1 else table["kind"]
    marks = [Mark(box, label) for row in shown.boxes for box in row]
    return Picture(shown.pixels, asks, marks, shown.characters, complete=False)


def draw_archived(rng: random.Random, width: int, height: int, held: bool) -> Picture:
    archive = open_drawings("held/charts.zip" if held else "charts.zip", "charts.json")
    pixels, table, _ = archive.place(rng, width, height)
    asks = [*ask_about(rng, table, "webcharts", exact=held), absent_object(rng)]
    return Picture(pixels, asks, complete=False)


def _places(rng: random.Random, table: dict[str, Any], shown: Plotted, width: int) -> list[Ask]:
    """Where is the bar, the point or the slice of a label? Which value is there, and how is it read?"""
    asks, kind, series = [], table["kind"], rng.randrange(len(shown.boxes))
    noun, skill = (
        {"bar": "bar", "pie": "slice"}.get(kind, "point"),
        "detect" if kind == "bar" else "point",
    )
    boxes, name = shown.boxes[series], table["series"][series]["name"]
    number = rng.randrange(len(boxes))
    box, label = boxes[number], table["labels"][number]
    value = readable(table["series"][series]["values"][number])
    of = f"{label}, {name}" if len(shown.boxes) > 1 else label
    said = rng.choice((f"the {noun} of {of}", f"{of} {noun}", f"{noun} for {of}"))
    asks.append(find(skill, f"charts {noun}", said, [box]))
    if len(shown.boxes) == 1:
        every = rng.choice((noun, f"{noun}s", f"all {noun}s"))
        in_turn: list[Box] = in_order(boxes, width, centre)
        asks.append(find(skill, "charts detect", every, in_turn))
    if len(shown.scale) < 2:
        return asks
    ways = "What is the largest number on the axis?|Where does the axis end?|Up to what value does the axis go?"
    asks.append(read(rng, "charts axis", ways, shown.scale[-1][0]))
    tick, place = rng.choice(shown.scale)
    asks.append(
        find(
            "point",
            "charts tick",
            f"{tick} on the axis",
            [(place[0] - 5, place[1] - 5, place[0] + 5, place[1] + 5)],
        )
    )
    x, y = centre(box)
    top = (x, y) if kind != "bar" else (box[2], y) if table["lying"] else (x, box[1])
    ways = (
        "What is this value?|What value is here?|Which value does this {n} have?|How much is this?"
    )
    at = read(rng, "charts value here", ways, number_text(value), n=noun)
    asks.append(replace(at, refs=((box if kind == "bar" and rng.random() < 0.5 else top),)))
    axis = 0 if table["lying"] else 1
    beside = min(
        pairwise(shown.scale), key=lambda pair: sum(abs(p[axis] - top[axis]) for _, p in pair)
    )
    ways = "What is the value of {o}?|What value has {o}?|How much is {o}?|{o}?|What is {o}?"
    why = read(rng, "charts value reasoned", ways, number_text(value), o=of)
    steps = ((noun, (top,)), *((text, (place,)) for text, place in beside))
    asks.append(replace(why, skill="reasoning", steps=steps))
    return asks
