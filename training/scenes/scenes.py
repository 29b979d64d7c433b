"""Scenes as plain data, and the rules for random scenes.

Sizes are in pixels of the image. "The view" means the model's view (``View``): the tiled
stretch and the global crop. Every rule that keeps questions fair refers to the view.
"""

from __future__ import annotations

import colorsys
import math
import random
from dataclasses import dataclass
from functools import cached_property

from kestrel_engine.preprocess.crops import select_tiling
from kestrel_engine.types.model_config import VisionConfig
from training.scenes.shapes import DEFAULT_TILT, LIMB, QUARTERS, TILT, geometry, unit_bounds
from training.scenes.vocabulary import COLOUR_RANGES, COLOURS, HELD_OUT, MEASURED_COLOURS, SHAPES

Rgb = tuple[float, float, float]
Box = tuple[float, float, float, float]

MAX_OBJECTS = 12
MIN_VIEW_PX = 24.0  # shorter side of an object in the tiled view
MIN_GLOBAL_PX = 18.0  # and in the global crop
MAX_FRACTION = 0.45  # longest side as a share of the image's
MAX_OVERLAP = 0.2  # of the smaller bounding box
MIN_STROKE_PX = 2.4  # an outline's stroke in the tiled view
MIN_PERIOD_PX = 7.0  # of stripes, likewise
MIN_CONTRAST = 0.3  # RGB distance to the background, colours in 0..1
CENTRE_GAP = 0.022  # least difference of two centres' x, as a share of the width
MIN_SIZE_RATIO = 1.15  # "largest" and "bigger" need this much
TINY = VisionConfig(enc_patch_size=14, crop_size=252, overlap_margin=2, max_crops=6)


@dataclass(frozen=True)
class View:
    """An image's size, and the pixels of the tiled view and of the global crop per image pixel, x and y."""

    width: int
    height: int
    tiled_scale: tuple[float, float]
    global_scale: tuple[float, float]

    @classmethod
    def of(cls, width: int, height: int) -> View:
        window, side = TINY.crop_window, TINY.crop_size
        down, across = (window * (n - 1) + side for n in select_tiling(width, height, TINY))
        return cls(width, height, (across / width, down / height), (side / width, side / height))


def _sides(box: Box) -> tuple[float, float]:
    return box[2] - box[0], box[3] - box[1]


@dataclass(frozen=True)
class Shape:
    """One object. ``angle`` in radians; ``rgb2`` fills the gaps of stripes; ``stroke`` and ``period`` in pixels."""

    kind: int
    colour: int
    style: int
    cx: float
    cy: float
    radius: float
    angle: float
    rgb: Rgb
    rgb2: Rgb
    stroke: float
    period: float

    @cached_property
    def box(self) -> Box:
        """x0, y0, x1, y1 in image pixels."""
        x0, y0, x1, y1 = unit_bounds(self.kind, self.angle)
        r = self.radius
        return self.cx + r * x0, self.cy + r * y0, self.cx + r * x1, self.cy + r * y1

    @property
    def centre(self) -> tuple[float, float]:
        x0, y0, x1, y1 = self.box
        return (x0 + x1) / 2, (y0 + y1) / 2

    @property
    def anchor(self) -> tuple[float, float]:
        """A point well inside the shape."""
        ax, ay = geometry(self.kind).anchor
        c, s = math.cos(self.angle) * self.radius, math.sin(self.angle) * self.radius
        return self.cx + c * ax - s * ay, self.cy + s * ax + c * ay

    @property
    def area(self) -> float:
        return geometry(self.kind).area * self.radius**2

    @property
    def extent(self) -> float:
        """Geometric mean of the box sides."""
        return math.sqrt(math.prod(_sides(self.box)))


@dataclass(frozen=True)
class Line:
    """A thin clutter line behind the objects."""

    x0: float
    y0: float
    x1: float
    y1: float
    width: float
    rgb: Rgb


@dataclass(frozen=True)
class Background:
    """Linear gradient from ``first`` to ``second`` along ``angle``, with a faint wave on top."""

    first: Rgb
    second: Rgb
    angle: float
    wave: float
    wave_x: float
    wave_y: float


@dataclass(frozen=True)
class Scene:
    """An image to be drawn. ``shapes`` run left to right by centre; ``order`` is the painting order."""

    width: int
    height: int
    background: Background
    lines: tuple[Line, ...]
    shapes: tuple[Shape, ...]
    order: tuple[int, ...]
    palette: int = MEASURED_COLOURS  # how many of COLOURS it draws from

    @cached_property
    def view(self) -> View:
        return View.of(self.width, self.height)


def draw_size(rng: random.Random) -> tuple[int, int]:
    """Width and height: the longer side 120..1600 (log-uniform), up to 3:1, the shorter side at least 120."""
    long = math.exp(rng.uniform(math.log(120), math.log(1600)))
    aspect = rng.uniform(1.0, 1.8) if rng.random() < 0.6 else rng.uniform(1.0, 3.0)
    width, height = round(long), max(round(long / aspect), 120)
    return (height, width) if rng.random() < 0.45 else (width, height)


def draw_colour(rng: random.Random, colour: int) -> Rgb:
    (h0, h1), (s0, s1), (v0, v1) = COLOUR_RANGES[COLOURS[colour]]
    hue = (rng.uniform(h0, h1) / 360) % 1.0
    return colorsys.hsv_to_rgb(hue, rng.uniform(s0, s1), rng.uniform(v0, v1))


def _mix(rgb: Rgb, other: Rgb, share: float) -> Rgb:
    """The colour, and this share of the way to the other one."""
    r, g, b = (a + (b - a) * share for a, b in zip(rgb, other, strict=True))
    return r, g, b


def stripe_gap(colour: int, rgb: Rgb) -> Rgb:
    """The second colour of stripes: the same hue, darker for light colours and lighter for dark ones."""
    name = COLOURS[colour]
    if name == "white":
        return 0.45, 0.45, 0.45
    if name == "black":
        return 0.55, 0.55, 0.55
    light = name in ("yellow", "pink", "orange", "lime", "cyan", "magenta")
    return _mix(rgb, (0, 0, 0), 0.5) if light else _mix(rgb, (1, 1, 1), 0.6)


def draw_background(rng: random.Random) -> Background:
    def tone() -> Rgb:
        u = rng.random()
        if u < 0.35:
            v = rng.uniform(0.8, 1.0)
            return colorsys.hsv_to_rgb(rng.random(), rng.uniform(0, 0.08), v)
        if u < 0.55:
            return colorsys.hsv_to_rgb(rng.random(), rng.uniform(0, 0.4), rng.uniform(0.05, 0.3))
        return colorsys.hsv_to_rgb(rng.random(), rng.uniform(0, 0.32), rng.uniform(0.3, 0.9))

    first = second = tone()
    if rng.random() < 0.4:
        second = _mix(first, tone(), rng.uniform(0.1, 0.6))
    wave = rng.uniform(0.005, 0.04) if rng.random() < 0.3 else 0.0
    angle = rng.uniform(0, 2 * math.pi)
    return Background(first, second, angle, wave, *(rng.uniform(-0.2, 0.2) for _ in range(2)))


def contrast(rgb: Rgb, background: Background) -> float:
    return min(math.dist(rgb, background.first), math.dist(rgb, background.second))


def _draw_angle(rng: random.Random, kind: int) -> float:
    shape = SHAPES[kind]
    tilt = TILT.get(shape, DEFAULT_TILT)
    degrees = 90.0 * rng.choice(QUARTERS.get(shape, (0,)))
    if rng.random() < 0.75:
        degrees += rng.uniform(-tilt, tilt)
    return math.radians(degrees)


@dataclass(frozen=True)
class _Candidate:
    """A shape with everything but its place; ``bounds`` at radius one."""

    kind: int
    colour: int
    style: int
    angle: float
    rgb: Rgb
    bounds: Box


def _draw_candidates(
    rng: random.Random, count: int, background: Background, held_out: bool, palette: int
) -> list[_Candidate]:
    kinds, colours = (
        rng.sample(all_of, rng.randint(1, 3)) if rng.random() < 0.45 else all_of
        for all_of in (range(len(SHAPES)), range(palette))
    )
    forced = rng.choice(sorted(HELD_OUT)) if held_out and count else None
    styled = rng.random() < 0.55
    found: list[_Candidate] = []
    for _ in range(count * 12):
        if len(found) == count:
            break
        colour, kind = rng.choice(colours), rng.choice(kinds)
        if forced is not None and not found:
            colour, kind = forced
        elif (colour, kind) in HELD_OUT and not (held_out and rng.random() < 0.5):
            continue
        rgb = draw_colour(rng, colour)
        if contrast(rgb, background) < MIN_CONTRAST:
            continue
        style = rng.choice((0, 0, 1, 2)) if styled else 0
        if style == 2 and contrast(stripe_gap(colour, rgb), background) < 0.5 * MIN_CONTRAST:
            style = 0
        angle = _draw_angle(rng, kind)
        found.append(_Candidate(kind, colour, style, angle, rgb, unit_bounds(kind, angle)))
    return found


def _radius_range(view: View, bounds: Box) -> tuple[float, float]:
    """Least and greatest radius that the view allows."""
    w, h = _sides(bounds)
    (tx, ty), (gx, gy) = view.tiled_scale, view.global_scale
    low = max(MIN_VIEW_PX / min(w * tx, h * ty), MIN_GLOBAL_PX / min(w * gx, h * gy))
    high = MAX_FRACTION * min(view.width / w, view.height / h)
    return low * 1.001, high


def overlap_share(a: Box, b: Box) -> float:
    """Intersection of two boxes over the smaller one's area."""
    w = min(a[2], b[2]) - max(a[0], b[0])
    h = min(a[3], b[3]) - max(a[1], b[1])
    if w <= 0 or h <= 0:
        return 0.0
    return w * h / min(math.prod(_sides(a)), math.prod(_sides(b)))


def _fits(box: Box, placed: list[Box], view: View, limit: float, gap: float) -> bool:
    if limit == 0.0:
        px, py = 2.0 / view.tiled_scale[0], 2.0 / view.tiled_scale[1]
        box = (box[0] - px, box[1] - py, box[2] + px, box[3] + py)
    centre = (box[0] + box[2]) / 2
    return all(
        abs(centre - (other[0] + other[2]) / 2) >= gap and overlap_share(box, other) <= limit
        for other in placed
    )


def _place(
    rng: random.Random, view: View, candidates: list[_Candidate], limit: float
) -> list[tuple[_Candidate, Box, float, float, float]]:
    """Positions for as many candidates as fit: (candidate, box, cx, cy, radius)."""
    sized = []
    share = 0.5 / max(len(candidates), 1)
    for c in candidates:
        low, high = _radius_range(view, c.bounds)
        if low > high:
            continue
        roomy = math.sqrt(share * view.width * view.height / math.prod(_sides(c.bounds)))
        high = min(high, max(roomy * 1.3, low * 1.15))
        sized.append((math.exp(rng.uniform(math.log(low), math.log(max(high, low)))), low, c))
    sized.sort(key=lambda item: -item[0])
    placed: list[tuple[_Candidate, Box, float, float, float]] = []
    gap = CENTRE_GAP * view.width
    for radius, low, c in sized:
        for attempt in range(40):
            r = radius if attempt < 20 else low
            u0, v0, u1, v1 = (r * b for b in c.bounds)
            edge = 0.006
            x_low, x_high = edge * view.width - u0, (1 - edge) * view.width - u1
            y_low, y_high = edge * view.height - v0, (1 - edge) * view.height - v1
            if x_low > x_high or y_low > y_high:
                continue
            cx, cy = rng.uniform(x_low, x_high), rng.uniform(y_low, y_high)
            box = (cx + u0, cy + v0, cx + u1, cy + v1)
            if _fits(box, [other for _, other, *_ in placed], view, limit, gap):
                placed.append((c, box, cx, cy, r))
                break
    return placed


def _draw_lines(rng: random.Random, width: int, height: int) -> tuple[Line, ...]:
    lines = []
    for _ in range(0 if rng.random() < 0.6 else rng.randint(1, 6)):
        grey: float = rng.random()
        rgb: Rgb = (grey, grey, grey)
        if rng.random() >= 0.6:
            rgb = colorsys.hsv_to_rgb(rng.random(), rng.random(), grey)
        x0, y0, x1, y1 = (rng.uniform(-0.1, 1.1) * side for side in (width, height, width, height))
        thick = rng.uniform(0.002, 0.008) * min(width, height) + 0.6
        lines.append(Line(x0, y0, x1, y1, thick, rgb))
    return tuple(lines)


def draw_count(rng: random.Random) -> int:
    """Returns a random number of objects: 4 % of scenes are empty, others have 1..12 objects, preferably few."""
    if rng.random() < 0.04:
        return 0
    return rng.randint(1, 6) if rng.random() < 0.35 else rng.randint(1, MAX_OBJECTS)


def draw_scene(
    rng: random.Random,
    width: int,
    height: int,
    count: int | None = None,
    held_out: bool = False,
    palette: int = MEASURED_COLOURS,
) -> Scene:
    """A random scene of that size. Fewer than ``count`` objects result where no more fit.

    held_out: the scene holds at least one of the pairs that training never shows (else none).
    palette: how many of COLOURS may occur; beyond the measured ones only in training.
    """
    view, background = View.of(width, height), draw_background(rng)
    wanted = draw_count(rng) if count is None else count
    candidates = _draw_candidates(rng, wanted, background, held_out, palette)
    limit = rng.uniform(0.05, MAX_OVERLAP) if rng.random() < 0.3 else 0.0
    placed = _place(rng, view, candidates, limit)
    placed.sort(key=lambda item: item[1][0] + item[1][2])
    shapes, scale = [], min(view.tiled_scale)
    for c, _, cx, cy, radius in placed:
        stroke = max(rng.uniform(0.16, 0.26) * radius, MIN_STROKE_PX / scale)
        widest = 0.6 * LIMB.get(SHAPES[c.kind], 0.45) * radius
        style = 0 if c.style == 1 and MIN_STROKE_PX / scale > widest else c.style
        period = max(rng.uniform(0.42, 0.7) * radius, MIN_PERIOD_PX / scale)
        look = (c.rgb, stripe_gap(c.colour, c.rgb), min(stroke, widest), period)
        shapes.append(Shape(c.kind, c.colour, style, cx, cy, radius, c.angle, *look))
    order = list(range(len(shapes)))
    rng.shuffle(order)
    lines = _draw_lines(rng, width, height)
    return Scene(width, height, background, lines, tuple(shapes), tuple(order), palette)
