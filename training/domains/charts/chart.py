"""A chart as data: made-up categories, series, values and colours."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from training.domains.ground import Rgb
from training.domains.picture import Box
from training.domains.text import words as w

_NAMED: tuple[tuple[str, Rgb], ...] = (
    ("blue", (31, 119, 180)), ("orange", (255, 127, 14)), ("green", (44, 160, 44)), ("red", (214, 39, 40)),
    ("purple", (148, 103, 189)), ("brown", (140, 86, 75)), ("pink", (227, 119, 194)), ("gray", (127, 127, 127)),
    ("olive", (150, 150, 34)), ("cyan", (23, 190, 207)), ("yellow", (240, 205, 40)), ("navy", (20, 40, 110)),
    ("teal", (0, 128, 120)), ("black", (30, 30, 30)),
)  # fmt: skip
_MEASURES = (
    "Sales Revenue Profit Visitors Users Temperature Rainfall Population Votes Output Exports Orders Cost Points Speed "
    "Energy Downloads Members Tickets Yield"
).split()
_UNITS = ("", "", "", " (%)", " (kg)", " (USD)", " (k)", " (mm)", " (h)")


@dataclass
class Chart:
    """kind: bar, grouped bar, line, pie or scatter; values: [series][category]; shown: the marks bear their values."""

    kind: str
    title: str
    categories: list[str]
    series: list[str]
    values: list[list[float]]
    colours: list[tuple[str, Rgb]]
    places: int
    shown: bool = False
    boxes: list[list[Box]] = field(default_factory=list)
    legend: bool = False
    end: str = ""  # the largest number on the axis

    def say(self, value: float) -> str:
        return f"{value:.{self.places}f}"


def _categories(rng: random.Random, n: int) -> list[str]:
    u = rng.random()
    if u < 0.15:
        start = rng.randint(1980, 2025)
        return [str(start + i) for i in range(n)]
    if u < 0.3 and n <= 12:
        start = rng.randint(0, 12 - n)
        return [m[:3] for m in w.MONTHS[start : start + n]]
    if u < 0.4:
        return [chr(65 + i) for i in range(n)]
    if u < 0.5:
        return rng.sample(w.GOODS, n)
    words = {rng.choice(w.dictionary())[:9].capitalize() for _ in range(4 * n)}
    return rng.sample(sorted(words), n)


def nice_step(top: float) -> float:
    """A step of the value axis."""
    raw = top / 5
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw)


def draw_data(rng: random.Random, kind: str) -> Chart:
    share = 1 if kind == "grouped bar" else 0.4
    several = kind in ("grouped bar", "line") and rng.random() < share
    fewest, most_of = (3, 10) if kind == "line" else (2, 6 if several or kind == "pie" else 10)
    n = min(rng.randint(fewest, most_of) for _ in range(rng.choice((1, 2))))  # rather few
    m = rng.randint(2, 3) if several else 1
    top = 10 ** rng.uniform(0.7, 3.5)
    step = nice_step(top)
    unit = step / rng.choice((2, 5, 10, 20))
    places = max(0, -math.floor(math.log10(unit) + 1e-9)) if unit < 1 else 0
    unit = round(unit, places) or 10**-places
    most = int(top / unit)
    if kind == "line" and rng.random() < 0.6:  # a walk, so that there are trends
        slope = rng.uniform(-0.12, 0.12)
        values = []
        for _ in range(m):
            at, row = rng.uniform(0.3, 0.7), []
            for _ in range(n):
                row.append(round(min(max(at, 0.03), 1) * most) * unit)
                at += slope + rng.gauss(0, 0.06)
            values.append(row)
    else:
        values = [
            [rng.randint(max(1, most // 25), most) * unit for _ in range(n)] for _ in range(m)
        ]
    title = f"{rng.choice(_MEASURES)}{rng.choice(_UNITS)}"
    if rng.random() < 0.5:
        title = f"{title} {rng.choice(('by', 'per', 'in', 'of'))} {rng.choice(w.dictionary()).capitalize()}"
    names = [rng.choice(w.dictionary())[:9].capitalize() for _ in range(9)]
    names = list(dict.fromkeys(names))[:m]
    count = n if kind == "pie" else m
    colours = rng.sample(_NAMED, count)
    categories, shown = _categories(rng, n), rng.random() < 0.45
    return Chart(kind, title, categories, names, values, colours, places, shown)
