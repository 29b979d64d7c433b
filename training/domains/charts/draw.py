"""Charts: drawn now by Pillow, or by a library in Chromium, of charts.zip or held/charts.zip (shoot.py)."""

import random
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

from training.domains.charts import questions as q
from training.domains.charts.sketched import Drawn, Scale, sketch
from training.domains.charts.tables import make_table
from training.domains.drawn import open_drawings
from training.domains.phrasing import absent_object, read
from training.domains.picture import Ask, Box, Mark, Picture, centre, find, in_order, view_scale
from training.scenes.phrases import WAYS

SMALLEST = 10.0, 12.5  # letters that can be read: pixels of the picture, and of the model's view


def draw(rng: random.Random, width: int, height: int, held: bool) -> Picture:
    """By Pillow: no chart is seen twice, and every font of the texts occurs."""
    for _ in range(20):
        table = make_table(rng)
        simple = len(table["series"]) == 1 and table["kind"] != "pie"
        if not held and simple and rng.random() < 0.5:
            continue  # what several series show is harder
        if not held and rng.random() < 0.25:  # nobody can guess such labels by their first letters
            mixed = ["".join(rng.sample(label, len(label))) for label in table["labels"]]
            table["labels"] = mixed if len({*mixed}) == len(mixed) else table["labels"]
        try:
            shown = sketch(rng, table, width, height, held)
        except ValueError:
            continue
        asks = q.ask_about(rng, table, "charts", exact=held)
        asks += [*_places(rng, table, shown, width, "charts"), absent_object(rng)]
        asks += () if held else _places(rng, table, shown, width, "charts")
        marks = _marks(table, shown.boxes, shown.keys)
        return Picture(shown.pixels, asks, marks, shown.characters, complete=False)
    raise RuntimeError(f"no chart fits into {width}x{height}")


def draw_archived(rng: random.Random, width: int, height: int, held: bool) -> Picture:
    archive = open_drawings("held/charts.zip" if held else "charts.zip", "charts.json")
    letters = max(SMALLEST[0], SMALLEST[1] / view_scale(width, height))
    pixels, table, place = archive.place(rng, width, height, letters)
    written = [(text, [place.point(x, y) for x, y in zip(at[::2], at[1::2], strict=True)])
               for text, at in table["texts"]]  # fmt: skip
    boxes = [[place.box(box) for box in row] for row in table["boxes"]]
    pairs = ((c, at) for text, points in written for c, at in zip(text, points, strict=True))
    characters = [(*at, c) for c, at in pairs if c != " "]
    scale = [] if table["kind"] == "pie" else _scale_among(written, 0 if table["lying"] else 1)
    # What stands beside the axis is no value's own number.
    told = Counter(text.split(" ")[-1].replace(",", "") for text, _ in written)
    told -= Counter(text.replace(",", "") for text, _ in scale)
    values = Counter(q.number(v) for s in table["series"] for v in s["values"])
    table = {**table, "numbers": values <= told}
    asks = [*q.ask_about(rng, table, "webcharts", exact=held), absent_object(rng)]
    if table["size"] * place.scale < 0.999 * letters:
        asks = [ask for ask in asks if not ask.spelled]
        return Picture(pixels, asks, complete=False)
    wide, names = 2 * table["size"] * place.scale, [s["name"] for s in table["series"]]
    # The legend's spots are left of its texts.
    firsts = [(t, *at[0]) for t, at in written if t in names and len(names) > 1 and at]
    keys = [(text, (x - wide, y - wide / 4, x, y + wide / 4)) for text, x, y in firsts]
    if boxes:
        shown = Drawn(pixels, boxes, characters, scale, keys)
        for _ in range(1 if held else 2):
            asks += _places(rng, table, shown, width, "webcharts")
    return Picture(pixels, asks, _marks(table, boxes, keys), characters, complete=False)


def _scale_among(written: list[tuple[str, list[Any]]], axis: int) -> Scale:
    """Of a chart's texts, the numbers beside its value axis: most of those that end in one line along it."""
    numbers = [
        (text, at[0], at[-1]) for text, at in written if re.fullmatch(r"\$?[\d,.]+[k%]?", text)
    ]
    ends = [n[2][1 - axis] for n in numbers]
    rows = ([n for n, b in zip(numbers, ends, strict=True) if abs(b - a) < 4] for a in ends)
    found = max(rows, key=len, default=[])
    ticks = [(text, ((a[0] + b[0]) / 2, (a[1] + b[1]) / 2)) for text, a, b in found]
    return sorted(ticks, key=lambda tick: tick[1][axis] * (1 - 2 * axis)) if len(ticks) > 2 else []


def _marks(
    table: dict[str, Any], boxes: list[list[Box]], keys: list[tuple[str, Box]]
) -> list[Mark]:
    """What is drawn and the legend, with the beginnings and ends of label and series that each stands for."""
    several = len(boxes) > 1
    kind = "grouped bar" if table["kind"] == "bar" and several else table["kind"]
    shown, labels = q.labels_are_shown(table), table["labels"]
    of_label = [f"{label[:4]:4}{label[-1]}" if shown else 5 * " " for label in labels]
    ends = [q.extremes(s["values"], kind == "pie") for s in table["series"]]
    of_series = [f"{s['name'][:2]:2}{s['name'][-1]}" if several else "" for s in table["series"]]
    marks = [
        Mark(box, q.EXTREMES[row_ends.index(k)] if k in row_ends else kind, told=label + series)
        for row, series, row_ends in zip(boxes, of_series, ends, strict=False)
        for k, (box, label) in enumerate(zip(row, of_label, strict=True))
    ]
    entries = dict(zip(labels, of_label, strict=True))
    entries |= {
        s["name"]: 5 * " " + told for s, told in zip(table["series"], of_series, strict=True)
    }
    return marks + [Mark(box, "text", told=entries[name]) for name, box in keys]


def _places(
    rng: random.Random, table: dict[str, Any], shown: Drawn, width: int, domain: str
) -> list[Ask]:
    """Where is the bar, the point or the slice of a label? Which value is there, and how is it read?"""
    asks, kind, series = [], table["kind"], rng.randrange(len(shown.boxes))
    noun, skill = {"bar": ("bar", "detect"), "pie": ("slice", "point")}.get(
        kind, ("point", "point")
    )
    boxes, (name, values) = shown.boxes[series], table["series"][series].values()
    many = len(shown.boxes) > 1
    for end, number in zip(q.EXTREMES, q.extremes(values, kind == "pie"), strict=True):
        if number is None:
            continue
        of = f" of {name}" if many else ""
        said = f"the {rng.choice(q.WORDS[end])} {noun}{of}"
        asks.append(find(skill, f"{domain} extreme", said, [boxes[number]]))
        ways = f"Which one has the {{e}} value{of}?|Which {noun}{of} is the {{e}}?"
        label, word = table["labels"][number], q.WORDS[end][0]
        why = read(rng, f"{domain} label reasoned", ways, label, e=word)
        there = said.removeprefix("the "), (centre(boxes[number]),)
        # A slice is named by the legend's spot of its colour.
        spots = [
            (key, (centre(spot),)) for key, spot in shown.keys if kind == "pie" and key == label
        ]
        asks.append(replace(why, skill="reasoning", steps=(there, *spots)))
    number = rng.randrange(len(boxes))
    box, label = boxes[number], table["labels"][number]
    value = q.readable(values[number])
    of = f"{label}, {name}" if many else label
    said = rng.choice((f"the {noun} of {of}", f"{of} {noun}", f"{noun} for {of}"))
    asks.append(find(skill, f"{domain} {noun}", said, [box]))
    in_turn: list[Box] = in_order(boxes, width, centre)
    if not many:
        every = rng.choice((noun, f"{noun}s", f"all {noun}s"))
        asks.append(find(skill, f"{domain} detect", every, in_turn))
    ref = box if kind == "bar" and rng.random() < 0.5 else centre(box)
    asks.append(read(rng, f"{domain} label here", WAYS["label here"], of, (ref,), n=noun))
    if many:  # most wrong values are those of another series
        said = rng.choice((f"{noun}s of {name}", f"the {noun}s of {name}", f"{name} {noun}s"))
        asks.append(find(skill, f"{domain} series", said, in_turn))
        asks.append(read(rng, f"{domain} series here", WAYS["series here"], name, (ref,), n=noun))
    if len(shown.scale) < 2:
        return asks
    asks.append(read(rng, f"{domain} axis", WAYS["axis"], shown.scale[-1][0]))
    tick, (x, y) = rng.choice(shown.scale)
    around = x - 5, y - 5, x + 5, y + 5
    asks.append(find("point", f"{domain} tick", f"{tick} on the axis", [around]))
    x, y = centre(box)
    top = (x, y) if kind != "bar" else (box[2], y) if table["lying"] else (x, box[1])
    at = read(rng, f"{domain} value here", WAYS["value here"], q.number(value), n=noun)
    asks.append(replace(at, refs=((box if kind == "bar" and rng.random() < 0.5 else top),)))
    axis = 0 if table["lying"] else 1
    beside = min(
        pairwise(shown.scale), key=lambda pair: sum(abs(p[axis] - top[axis]) for _, p in pair)
    )
    why = read(rng, f"{domain} value reasoned", WAYS["value reasoned"], q.number(value), o=of)
    steps = ((noun, (top,)), *((text, (place,)) for text, place in beside))
    asks.append(replace(why, skill="reasoning", steps=steps))
    return asks
