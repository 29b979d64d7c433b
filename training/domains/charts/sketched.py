"""Charts by Pillow, drawn when they are needed: no chart is seen twice. matplotlib takes ten times as long."""

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageColor, ImageDraw

from training.domains.charts.questions import number
from training.domains.ground import Rgb, hsv, ink_for, luma
from training.domains.picture import Box, Pixels, Point, view_scale
from training.domains.text.fonts import draw_font
from training.domains.text.page import Page, fit, width_of

Scale = list[tuple[str, Point]]
SAMPLES = 2  # of the marks that have slanted edges, a side of a pixel


@dataclass(frozen=True)
class Drawn:
    """boxes: of bars, points or slices by series and label; characters: of all texts; scale: the numbers of the value
    axis; keys: the entries of the legend."""

    pixels: Pixels
    boxes: list[list[Box]]
    characters: list[tuple[float, float, str]]
    scale: Scale
    keys: list[tuple[str, Box]]


class Sketch:
    """A chart in the making. ``frame``: left, top, right and lower edge of the axes in pixels."""

    def __init__(self, rng: random.Random, table: dict[str, Any], page: Page, held: bool) -> None:
        self.rng, self.table, self.page, self.held = rng, table, page, held
        width, height = page.size
        seen = rng.uniform(12.5, rng.choice((16, 20, 28)))  # pixels of the model's view
        self.size = size = max(11, round(seen / view_scale(width, height)))
        self.font = draw_font(rng, held)
        self.ground: Rgb = page.image.getpixel((0, 0))  # type: ignore[assignment]
        self.ink = ink_for(rng, self.ground, 110)
        r, g, b = ((4 * a + b) // 5 for a, b in zip(self.ground, self.ink, strict=True))
        self.faint: Rgb = r, g, b
        colours: list[Rgb] = [ImageColor.getrgb(c)[:3] for c in table["colours"]]
        self.colours = [c for c in colours if abs(luma(c) - luma(self.ground)) > 25]
        self.frame = 0.6 * size, 0.8 * size, width - 0.8 * size, height - 0.6 * size
        self.scale: Scale = []
        self.keys: list[tuple[str, Box]] = []

    def wide(self, text: str) -> float:
        return width_of(text, self.font, self.size)

    def cut(self, left: float = 0, top: float = 0, right: float = 0, bottom: float = 0) -> None:
        """Take these pixels off the frame."""
        x0, y0, x1, y1 = self.frame
        self.frame = x0 + left, y0 + top, x1 - right, y1 - bottom

    def write(
        self, text: str, x: float, y: float, share: float = 0.5, size: int = 0, ink: Rgb | None = None
    ) -> None:  # fmt: skip
        """Text around the height y; ``share`` of it stands left of x."""
        size = size or self.size
        left = x - share * width_of(text, self.font, size)
        self.page.put(left, y + 0.35 * size, text, self.font, size, ink or self.ink)

    def write_turned(self, text: str, x: float, y: float, share: float, degrees: int = 90) -> None:
        """Text that is turned against the clock; ``share`` of it stands before (x, y)."""
        long, size = math.ceil(self.wide(text)) + 4, self.size
        strip = Page(Image.new("L", (long, 2 * size)))
        strip.put(2, 1.35 * size, text, self.font, size, 255)  # type: ignore[arg-type]
        turned = strip.image.rotate(degrees, Image.Resampling.BICUBIC, expand=True)
        cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
        x, y = x - (share - 0.5) * long * cos, y + (share - 0.5) * long * sin  # the middle
        at = round(x - turned.width / 2), round(y - turned.height / 2)
        self.page.image.paste(self.ink, at, turned)
        for a, b, c in strip.characters:
            a, b = a - long / 2, b - size
            self.page.characters.append((x + cos * a + sin * b, y - sin * a + cos * b, c))

    def key(self, names: list[str]) -> None:
        """The legend: right of the axes, below or above them."""
        size, rows = self.size, sum(self.wide(name) + 2.4 * self.size for name in names)
        x0, y0, x1, y1 = self.frame
        below = rows < x1 - x0 and self.rng.random() < 0.6
        high = below and self.rng.random() < 0.4
        if below:
            x0 += self.rng.random() * (x1 - x0 - rows)
            x, y = x0, y0 + 0.5 * size if high else y1 - 0.5 * size
            self.cut(0, 1.7 * size * high, 0, 1.7 * size * (not high))
        else:
            wide = max(map(self.wide, names)) + 1.8 * size
            room = max(0, y1 - y0 - 1.5 * size * len(names))
            x, y = x1 - wide, y0 + size + self.rng.random() * room / 2
            self.cut(0, 0, wide + 0.5 * size)
        for name, colour in zip(names, self.colours, strict=False):
            spot = x, y - 0.4 * size, x + 0.8 * size, y + 0.4 * size
            draw = self.page.pen.ellipse if self.table["smooth"] else self.page.pen.rectangle
            draw(spot, colour)
            self.write(name, x + 1.1 * size, y, 0)
            self.keys.append((name, spot))
            x, y = (x + self.wide(name) + 2.4 * size, y) if below else (x, y + 1.5 * size)

    def axes(self) -> tuple[float, float]:
        """Both axes with their texts; returns the values at the axis' ends."""
        t, size, rng, pen = self.table, self.size, self.rng, self.page.pen
        values, labels = [v for s in t["series"] for v in s["values"]], t["labels"]
        most, least = max(values) * rng.uniform(1.01, 1.15), 0.0
        if t["kind"] != "bar" and rng.random() < 0.3:
            least = min(values) * rng.uniform(0.5, 0.95)
        room = 8 if t["lying"] else (self.frame[3] - self.frame[1]) / (2 * size)
        raw = (most - least) / rng.uniform(2.5, max(4, min(t["ticks"], room)))
        power = 10 ** math.floor(math.log10(raw))
        step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= raw)
        first, last = math.floor(least / step), math.ceil(most / step)
        short = "" if most < 1000 and t["form"] == "k" else t["form"]
        form = {"": "{:g}", ",": "{:,g}", "k": "{:g}k", "%": "{:g}%", "$": "${:,g}"}[short]
        unit = 1000 if short == "k" else 1
        ticks = [(k * step, form.format(round(k * step / unit, 6))) for k in range(first, last + 1)]
        ends = ticks[0][0], ticks[-1][0] if rng.random() < 0.7 else max(most, ticks[-2][0])
        ticks = [tick for tick in ticks if tick[0] <= ends[1]]
        numbers, names = max(self.wide(text) for _, text in ticks), max(map(self.wide, labels))
        below, aside = t["label_axis"], t["value_axis"]
        below, aside = (aside, below) if t["lying"] else (below, aside)
        x0, y0, x1, y1 = self.frame
        if below:
            self.write(below, (x0 + x1) / 2, y1 - 0.5 * size)
        if aside:
            self.write_turned(aside, x0 + 0.5 * size, (y0 + y1) / 2, 0.5)
        left, gap = names if t["lying"] else numbers, rng.uniform(0.3, 0.8) * size
        left += gap + 1.5 * size * bool(aside)
        self.cut(left, 0.5 * size, 0.4 * numbers * t["lying"], 1.5 * size * bool(below))
        x0, y0, x1, y1 = self.frame
        turned = 90 * (not t["lying"] and names > 0.92 * (x1 - x0) / len(labels))
        if not self.held and not t["lying"] and (turned or rng.random() < 0.4):
            turned = rng.choice((90, 90, -90, -90, 30, 45, -45))
        high = abs(math.sin(math.radians(turned)))
        if high % 1:  # slanted, so that the first or the last label leaves the axis
            beyond = names * math.cos(math.radians(turned)) - 0.5 * (x1 - x0) / len(labels)
            beyond = max(0, beyond - left * (turned > 0))
            self.cut(*((beyond, 0, 0) if turned > 0 else (0, 0, beyond)))
        self.cut(bottom=size + gap if not turned else names * high + gap + size * (high < 1))
        x0, y0, x1, y1 = self.frame
        if x1 - x0 < 5 * size or y1 - y0 < 5 * size:
            raise ValueError("no room for the axes")
        grid, thick, out = t["grid"], rng.choice((1, 1, 2)), rng.choice((0, 0.3)) * gap
        for value, text in ticks:
            share = (value - ends[0]) / (ends[1] - ends[0])
            x, y = x0 + share * (x1 - x0), y1 - share * (y1 - y0)
            if grid:
                pen.line((x, y0, x, y1) if t["lying"] else (x0, y, x1, y), self.faint)
            pen.line((x, y1, x, y1 + out) if t["lying"] else (x0 - out, y, x0, y), self.ink)
            at = (x, y1 + gap + 0.5 * size) if t["lying"] else (x0 - gap, y)
            self.write(text, at[0], at[1], 0.5 if t["lying"] else 1)
            middle = at if t["lying"] else (x0 - gap - self.wide(text) / 2, y)
            self.scale.append((text, middle))
        for k, label in enumerate(labels):
            share = (k + 0.5) / len(labels)
            x, y = x0 + share * (x1 - x0), y1 + gap + 0.5 * size * (high < 1)
            if t["lying"]:
                self.write(label, x0 - gap, y0 + share * (y1 - y0), 1)
            elif turned:
                self.write_turned(label, x, y, float(turned > 0), turned)
            else:
                self.write(label, x, y)
        if rng.random() < 0.8:
            pen.line((x0, y0, x0, y1) if t["lying"] else (x0, y1, x1, y1), self.ink, thick)
        if rng.random() < 0.5:
            pen.line((x0, y1, x1, y1) if t["lying"] else (x0, y0, x0, y1), self.ink, thick)
        return ends

    def bars(self, ends: tuple[float, float]) -> list[list[Box]]:
        t, (x0, y0, x1, y1), boxes = self.table, self.frame, list[list[Box]]()
        many, fill = len(t["series"]), self.rng.uniform(0.5, 0.9)
        place = (y1 - y0 if t["lying"] else x1 - x0) / len(t["labels"])
        edge = self.ink if self.rng.random() < 0.15 else None
        for s, (series, colour) in enumerate(zip(t["series"], self.colours, strict=False)):
            boxes.append([])
            for k, value in enumerate(series["values"]):
                share = (value - ends[0]) / (ends[1] - ends[0])
                a = (y0 if t["lying"] else x0) + (k + 0.5 + fill * (s / many - 0.5)) * place
                b = a + place * fill / many - 1
                box = x0, a, x0 + share * (x1 - x0), b
                box = box if t["lying"] else (a, y1 - share * (y1 - y0), b, y1)
                boxes[-1].append(box)
                self.page.pen.rectangle(box, colour, edge)
        self.numbers(boxes, 0.95 * place * fill / many)
        return boxes

    def points(self, ends: tuple[float, float]) -> list[list[Box]]:
        """Of lines and scatter plots."""
        t, (x0, y0, x1, y1), rng = self.table, self.frame, self.rng
        place, thick = (x1 - x0) / len(t["labels"]), rng.uniform(0.06, 0.2) * self.size
        dots, r = t["kind"] == "scatter" or rng.random() < 0.6, thick * rng.uniform(1.2, 2.5)
        large, pen = self.enlarged()
        boxes = list[list[Box]]()
        for series, colour in zip(t["series"], self.colours, strict=False):
            heights = [(v - ends[0]) / (ends[1] - ends[0]) for v in series["values"]]
            at = [(x0 + (k + 0.5) * place, y1 - h * (y1 - y0)) for k, h in enumerate(heights)]
            if t["kind"] == "line":
                line = [(SAMPLES * x, SAMPLES * y) for x, y in at]
                pen.line(line, colour, max(1, round(thick * SAMPLES)), joint="curve")
            for x, y in at if dots else ():
                pen.ellipse(square(x, y, max(2.5, r), SAMPLES), colour)
            boxes.append([square(x, y, max(2.5, r)) for x, y in at])
        self.page.image.paste(large.reduce(SAMPLES))
        t["numbers"] = t["numbers"] and len(boxes) == 1
        self.numbers(boxes, 0.95 * place)
        return boxes

    def numbers(self, boxes: list[list[Box]], room: float) -> None:
        """Write the values beside their marks if all fit."""
        t, size = self.table, self.size
        texts = [number(v) for s in t["series"] for v in s["values"]]
        small = size if t["lying"] else min(fit(text, self.font, size, room) for text in texts)
        t["numbers"] = t["numbers"] and small >= 0.7 * size and (not t["lying"] or room > size)
        marks = [box for row in boxes for box in row]
        for (a, b, c, d), text in zip(marks, texts, strict=True) if t["numbers"] else ():
            if t["lying"]:
                self.write(text, c + 0.3 * size, (b + d) / 2, 0)
            else:
                self.write(text, (a + c) / 2, b - 0.6 * small, size=small)

    def pie(self) -> list[list[Box]]:
        t, size, rng = self.table, self.size, self.rng
        x0, y0, x1, y1 = self.frame
        wide = 0 if t["keyed"] else max(map(self.wide, t["labels"])) + 0.5 * size
        r = 0.5 * min(x1 - x0 - 2 * wide, y1 - y0 - (0 if t["keyed"] else 2 * size))
        if r < 3 * size:
            raise ValueError("no room for a pie")
        cx, cy = x0 + wide + r + rng.random() * (x1 - x0 - 2 * wide - 2 * r), (y0 + y1) / 2
        values, angle, way = t["series"][0]["values"], rng.uniform(0, 360), rng.choice((-1, 1))
        t["numbers"] = t["numbers"] and min(values) * 6 * r > 3 * size * sum(values)
        spots: list[Box] = []
        texts: list[tuple[str, float, float, float, int, Rgb]] = []
        large, pen = self.enlarged()
        edge = self.ground if rng.random() < 0.6 else None
        for value, label, colour in zip(values, t["labels"], self.colours, strict=False):
            end = angle + way * 360 * value / sum(values)
            first, last = sorted((angle, end))
            pen.pieslice(square(cx, cy, r, SAMPLES), first, last, colour, edge, 2)
            x, y = (f(math.radians((angle + end) / 2)) for f in (math.cos, math.sin))
            at = cx + 0.74 * r * x, cy + 0.74 * r * y
            spots.append(square(*at, 4))
            if t["numbers"]:
                ink = (0, 0, 0) if luma(colour) > 127 else (255, 255, 255)
                texts.append((number(value), *at, 0.5, size, ink))
            if not t["keyed"]:
                beside = cx + (r + 0.3 * size) * x, cy + (r + 0.7 * size) * y
                texts.append((label, *beside, 0.5 - 0.5 * x, size, self.ink))
            angle = end
        if t["hole"]:
            pen.ellipse(square(cx, cy, rng.uniform(0.4, 0.58) * r, SAMPLES), self.ground)
        self.page.image.paste(large.reduce(SAMPLES))
        for text in texts:
            self.write(*text)
        return [spots]

    def enlarged(self) -> tuple[Image.Image, ImageDraw.ImageDraw]:
        """The picture so far with SAMPLES pixels a side for one, and a pen."""
        width, height = (SAMPLES * side for side in self.page.size)
        large = self.page.image.resize((width, height), Image.Resampling.NEAREST)
        return large, ImageDraw.Draw(large)


def square(x: float, y: float, r: float, n: float = 1) -> Box:
    return (x - r) * n, (y - r) * n, (x + r) * n, (y + r) * n


def sketch(
    rng: random.Random, table: dict[str, Any], width: int, height: int, held: bool = False
) -> Drawn:
    """The table as a chart of this size in pixels, whose ``numbers`` it corrects; ValueError: it has no room."""
    ground = (255, 255, 255) if rng.random() < 0.5 else hsv(rng, (0, 0.12), (0.88, 1))
    ground = hsv(rng, (0, 0.4), (0.05, 0.2)) if table["dark"] else ground
    s = Sketch(rng, table, Page(Image.new("RGB", (width, height), ground)), held)
    pie, names = table["kind"] == "pie", [series["name"] for series in table["series"]]
    if len(s.colours) < (len(table["labels"]) if pie else len(names)):
        raise ValueError("colours too near to the ground")
    if table["title"]:
        size = fit(table["title"], s.font, round(s.size * rng.uniform(1, 1.5)), 0.95 * width)
        share = rng.choice((0, 0.5, 0.5))
        x0, y0, x1, _ = s.frame
        s.write(table["title"], x0 + share * (x1 - x0), y0 + 0.2 * size, share, size)
        s.cut(top=size * rng.uniform(1.2, 2))
    table["keyed"] = table["hole"] or rng.random() < 0.4
    if pie and table["keyed"]:
        s.key(table["labels"])
    elif len(names) > 1:
        s.key(names)
    boxes = s.pie() if pie else (s.bars if table["kind"] == "bar" else s.points)(s.axes())
    return Drawn(np.asarray(s.page.image), boxes, s.page.characters, s.scale, s.keys)
