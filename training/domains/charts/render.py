"""Draws charts with Pillow and notes where each mark is."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from training.domains.charts.chart import Chart, nice_step
from training.domains.ground import Rgb, luma
from training.domains.picture import Box
from training.domains.text.page import Page, fit, width_of

LEGIBLE = 9  # pixels of the letters; what is smaller can't be asked for


class Pen(NamedTuple):
    """Writes on a page with one font, size and ink."""

    page: Page
    font: str
    size: int
    ink: Rgb

    def write(
        self, text: str, x: float, y: float, share: float = 0, shift: float = 0,
        *, size: int = 0, ink: Rgb | None = None,
    ) -> None:  # fmt: skip
        """Text whose baseline is y. share: how much of it stands left of x + shift."""
        size = size or self.size
        left = x - share * width_of(text, self.font, size) + shift if share else x
        self.page.put(left, y, text, self.font, size, ink or self.ink)

    def legend(
        self, names: Sequence[str], colours: Sequence[tuple[str, Rgb]], x: float, y: float
    ) -> None:
        size = self.size
        for name, (_, rgb) in zip(names, colours, strict=True):
            square = (x, y + 0.15 * size, x + 0.8 * size, y + 0.95 * size)
            self.page.pen.rectangle(square, rgb)
            self.write(name, x + 1.2 * size, y + 0.9 * size)
            y += 1.4 * size


def _axes(pen: Pen, rng: random.Random, c: Chart, plot: Box, across: bool = False) -> float:
    """Draw the value axis; returns the value at its end. across: values run to the right."""
    page, _, size, ink = pen
    x0, y0, x1, y1 = plot
    top = max(max(row) for row in c.values)
    step = nice_step(top * 1.02)
    end = math.ceil(top * 1.02 / step) * step
    places = max(0, -math.floor(math.log10(step) + 1e-9)) if step % 1 else 0
    places = max(places, 1) if step % 1 else 0
    if step == 0.25 or (step < 1 and round(step * 100) % 10):
        places = 2
    grid = rng.random() < 0.6
    faint: Rgb = tuple((3 * g + i) // 4 for g, i in zip((255, 255, 255), ink, strict=True))  # type: ignore[assignment]
    for k in range(round(end / step) + 1):
        c.end = f"{k * step:.{places}f}"
        if across:
            x = x0 + (x1 - x0) * k * step / end
            if grid:
                page.pen.line((x, y0, x, y1), faint)
            pen.write(c.end, x, y1 + 1.25 * size, 0.5)
        else:
            y = y1 - (y1 - y0) * k * step / end
            if grid:
                page.pen.line((x0, y, x1, y), faint)
            pen.write(c.end, x0, y + 0.35 * size, 1, -0.4 * size)
    page.pen.line((x0, y1, x1, y1), ink)
    if rng.random() < 0.7:
        page.pen.line((x0, y0, x0, y1), ink)
    return end


def _label_size(c: Chart, font: str, size: int, side: float) -> int:
    """Of the categories below the axis, each in a place of ``side`` pixels."""
    small = min(fit(t, font, size, side * 0.96) for t in c.categories)
    if small < LEGIBLE:
        raise ValueError("no room for the labels")
    return small


def _bars(pen: Pen, rng: random.Random, c: Chart, plot: Box) -> None:
    page, font, size, ink = pen
    across = c.kind == "bar" and rng.random() < 0.3
    x0, y0, x1, y1 = plot
    n, m = len(c.categories), len(c.series)
    if across:
        names = max(width_of(t, font, size) for t in c.categories)
        x0 = min(x0 - 2 * size + names, x0 + 0.4 * (x1 - x0))
        x1 -= 1.5 * size
        plot = (x0, y0, x1, y1)
    end = _axes(pen, rng, c, plot, across)
    side = (y1 - y0 if across else x1 - x0) / n
    small = size if across else _label_size(c, font, size, side)
    fill = rng.uniform(0.5, 0.85)
    c.boxes = [[] for _ in range(m)]
    for k, name in enumerate(c.categories):
        middle = (y0 if across else x0) + (k + 0.5) * side
        for s in range(m):
            a = middle + side * fill * (s / m - 0.5)
            b = a + side * fill / m - (1 if m > 1 else 0)
            length = c.values[s][k] / end
            box = (a, y1 - length * (y1 - y0), b, y1)
            if across:
                box = (x0, a, x0 + length * (x1 - x0), b)
            page.pen.rectangle(box, c.colours[s][1], ink if rng.random() < 0.1 else None)
            c.boxes[s].append(box)
            text = c.say(c.values[s][k])
            own = fit(text, font, size, side * (fill if m == 1 else fill / m) * 1.1)
            if c.shown and across:
                pen.write(text, box[2] + 3, (a + b) / 2 + 0.35 * size)
            elif c.shown and own >= 8:
                pen.write(text, (a + b) / 2, box[1] - 3, 0.5, size=own)
            else:
                c.shown = False
        if across:
            pen.write(name, x0, middle + 0.35 * small, 1, -5, size=small)
        else:
            pen.write(name, middle, y1 + 1.2 * small, 0.5, size=small)


def _lines(pen: Pen, rng: random.Random, c: Chart, plot: Box) -> None:
    page, font, size, _ = pen
    end = _axes(pen, rng, c, plot)
    x0, y0, x1, y1 = plot
    n = len(c.categories)
    side = (x1 - x0) / n
    small = _label_size(c, font, size, side)
    dots = rng.random() < 0.7
    thick = rng.randint(1, 4)
    for row, (_, rgb) in zip(c.values, c.colours, strict=True):
        points = [(x0 + (k + 0.5) * side, y1 - v / end * (y1 - y0)) for k, v in enumerate(row)]
        page.pen.line(points, rgb, thick, joint="curve")
        r = thick + 2
        c.boxes.append([(x - r, y - r, x + r, y + r) for x, y in points])
        for box in c.boxes[-1] if dots else []:
            page.pen.ellipse(box, rgb)
        for (x, y), v in zip(points, row, strict=True) if c.shown and len(c.values) == 1 else []:
            pen.write(c.say(v), x, y - r - 3, 0.5, size=small)
    c.shown = c.shown and len(c.values) == 1
    for k, name in enumerate(c.categories):
        pen.write(name, x0 + (k + 0.5) * side, y1 + 1.2 * small, 0.5, size=small)


def _pie(pen: Pen, rng: random.Random, c: Chart, plot: Box) -> None:
    page, font, size, _ = pen
    x0, y0, x1, y1 = plot
    c.shown = True
    total = sum(c.values[0])
    shares = [max(2, round(100 * v / total)) for v in c.values[0]]
    shares[shares.index(max(shares))] += 100 - sum(shares)
    c.values, c.places = [[float(s) for s in shares]], 0
    wide = max(width_of(t, font, size) for t in c.categories) + 2 * size
    beside = rng.random() < 0.6
    room = x1 - x0 - (wide if beside else 2 * wide)
    r = 0.46 * min(room, y1 - y0 - (0 if beside else 3 * size))
    if r < 3 * size:
        raise ValueError("no room for a pie")
    cx, cy = x0 + (r if beside else wide + r), (y0 + y1) / 2
    start = rng.uniform(0, 360)
    hole = rng.uniform(0.4, 0.6) if rng.random() < 0.25 else 0.0
    c.boxes = [[]]
    for (_, rgb), share, name in zip(c.colours, shares, c.categories, strict=True):
        end = start + 3.6 * share
        page.pen.pieslice((cx - r, cy - r, cx + r, cy + r), start, end, rgb, (255, 255, 255))
        angle = math.radians((start + end) / 2)
        px, py = cx + 0.72 * r * math.cos(angle), cy + 0.72 * r * math.sin(angle)
        c.boxes[0].append((px - 4, py - 4, px + 4, py + 4))
        label = f"{share}%"
        own = min(size, fit(label, font, size, 0.9 * r * math.radians(3.6 * share)))
        if own >= 8:
            light = (255, 255, 255) if luma(rgb) < 140 else (0, 0, 0)
            pen.write(label, px, py + 0.35 * own, 0.5, size=own, ink=light)
        else:
            c.shown = False
        if not beside:
            right = math.cos(angle) >= 0
            tx, ty = cx + 1.08 * r * math.cos(angle), cy + 1.08 * r * math.sin(angle) + 0.35 * size
            pen.write(name, tx, ty, 0 if right else 1)
        start = end
    if hole:
        inner = hole * r
        page.pen.ellipse((cx - inner, cy - inner, cx + inner, cy + inner), (255, 255, 255))
    if beside:
        pen.legend(c.categories, c.colours, x1 - wide, cy - 0.7 * size * len(shares))
        c.legend = True


def _scatter(pen: Pen, rng: random.Random, c: Chart, plot: Box) -> None:
    x0, y0, x1, y1 = plot
    n = rng.randint(3, 20)
    rise = rng.choice((-1, 0, 1))
    top = max(c.values[0])
    spots: list[tuple[float, float]] = []
    r = rng.randint(3, 6)
    for _ in range(8 * n):
        t = rng.uniform(0.03, 0.97)
        v = 0.5 + rise * (t - 0.5) * 0.85 + rng.gauss(0, 0.05) if rise else rng.uniform(0.05, 0.95)
        x, y = x0 + t * (x1 - x0), y1 - min(max(v, 0.04), 0.96) * (y1 - y0)
        if len(spots) < n and all(math.dist((x, y), s) > 2.3 * r for s in spots):
            spots.append((x, y))
    c.values = [[top]]
    _axes(pen, rng, c, plot)
    pen.page.pen.line((x0, y0, x0, y1), pen.ink)
    c.boxes = [[(x - r, y - r, x + r, y + r) for x, y in spots]]
    for box in c.boxes[0]:
        pen.page.pen.ellipse(box, c.colours[0][1])
    c.categories = [str(rise)]


RENDER = {"bar": _bars, "grouped bar": _bars, "line": _lines, "pie": _pie, "scatter": _scatter}
