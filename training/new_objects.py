"""Images of objects that kestrel-tiny does not know: a new shape, or known shapes in a new colour.

They are drawn among shapes that it knows, with labels as ``kestrel-grpc train`` reads them.
"""

from __future__ import annotations

import colorsys
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kestrel_grpc.scenes.phrases import with_article
from kestrel_grpc.scenes.render import render_scene
from kestrel_grpc.scenes.scenes import (
    Box,
    Rgb,
    Scene,
    Shape,
    draw_colour,
    draw_scene,
    overlap_share,
    stripe_gap,
)
from kestrel_grpc.scenes.vocabulary import COLOURS, MEASURED_COLOURS, SHAPES

LEAST_SIDE, MOST_SIDE = 160, 252
"""Pixels. An image of at most 252 pixels a side is one crop, which the vision tower encodes in a seventh of the time of
a large one."""
WANTED = (0, 1, 1, 1, 2, 3)
"""How many new objects an image has; each number is as likely as it is frequent here."""
CONTRAST = 0.3
"""Least distance of a colour to the background's, of red, green and blue in 0..1."""
NEW_COLOURS = {
    "lavender": ((246, 264), (0.32, 0.5), (0.92, 1.0)),
    "mint": ((140, 160), (0.3, 0.45), (0.92, 1.0)),
}
"""Hue in degrees, saturation and value, as in ``vocabulary.COLOUR_RANGES``. The nearest colours of lavender that the
model knows are pink, at a distance of 0.19 where the ranges are closest, and blue and purple, at 0.20; mint is 0.13
from green and 0.18 from cyan. Orange and yellow are 0.11 apart."""
NEAR_COLOURS = {"lavender": ("purple", "pink", "blue"), "mint": ("green", "blue", "white")}
ASKED = 3
"""Known shapes whose colour is asked for, and sorts of new objects, at most, where there is more contrast."""
_NEW = -1
"""Number of the new colour, which is none of COLOURS."""


@dataclass(frozen=True)
class Hexagon:
    """A regular hexagon; ``angle`` in radians, sizes in pixels."""

    x: float
    y: float
    radius: float
    angle: float
    colour: int
    rgb: Rgb

    @property
    def box(self) -> Box:
        at = [self.angle + k * math.pi / 3 for k in range(6)]
        xs = [self.x + self.radius * math.cos(a) for a in at]
        ys = [self.y + self.radius * math.sin(a) for a in at]
        return min(xs), min(ys), max(xs), max(ys)

    def paint(self, pixels: NDArray[np.float32]) -> None:
        """Paints over ``pixels`` [height, width, 3], grey levels 0..255."""
        height, width, _ = pixels.shape
        y, x = np.mgrid[0:height, 0:width] + 0.5
        dx, dy = x - self.x, y - self.y
        edges = [self.angle + math.pi / 6 + k * math.pi / 3 for k in range(6)]
        outside = np.max([dx * math.cos(a) + dy * math.sin(a) for a in edges], axis=0)
        cover = np.clip(0.5 - (outside - self.radius * math.cos(math.pi / 6)), 0, 1)[..., None]
        pixels += (np.array(self.rgb, np.float32) * 255 - pixels) * cover


@dataclass(frozen=True)
class NewObject:
    """``point`` and ``box`` in pixels. The point is well inside the object, where the base model learnt to point: the
    centre of a crescent's box is outside the crescent. ``sort``: what tells it from others, a hexagon's colour or the
    shape of what has a new colour."""

    point: tuple[float, float]
    box: Box
    sort: int


@dataclass(frozen=True)
class Picture:
    """``hexagons`` are painted over the scene. ``objects``: the new ones, from left to right. ``colour``: of which
    noun the colour can be asked, and the answer."""

    scene: Scene
    hexagons: tuple[Hexagon, ...]
    objects: tuple[NewObject, ...]
    colour: tuple[str, str] | None


@dataclass(frozen=True)
class Subject:
    """What is taught. ``draw``: the picture of a seed; True asks for a picture that shows what is easily taken for the
    new objects. ``sorted_name``: the name of the objects of a sort, such as "red hexagon". ``sort_of``: the sort that a
    known shape would have."""

    name: str
    plural: str
    draw: Callable[[str, bool], Picture]
    sorted_name: Callable[[int], str]
    sort_of: Callable[[Shape], int]


def hexagons() -> Subject:
    """A new shape, in the measured colours."""
    return Subject(
        "hexagon",
        "hexagons",
        _draw_hexagons,
        lambda sort: f"{COLOURS[sort]} hexagon",
        lambda shape: shape.colour,
    )


def coloured(colour: str) -> Subject:
    """A new colour of NEW_COLOURS, on the known shapes; or a known one, for what the base model gets right."""
    return Subject(
        f"{colour} shape",
        f"{colour} shapes",
        lambda seed, with_near: _draw_coloured(colour, seed, with_near),
        lambda sort: f"{colour} {SHAPES[sort]}",
        lambda shape: shape.kind,
    )


def known(colour: str | None) -> Subject:
    """What the base model knows that comes nearest to a new colour, or with None to a new shape."""
    if colour is not None:
        return coloured(NEAR_COLOURS[colour][0])
    kind = SHAPES.index("diamond")
    return Subject(
        "diamond",
        "diamonds",
        lambda seed, _with_near: _draw_known(kind, seed),
        lambda sort: f"{COLOURS[sort]} diamond",
        lambda shape: shape.colour,
    )


def _draw_known(kind: int, seed: str) -> Picture:
    """A scene of known shapes, of which those of ``kind`` count as new."""
    rng = random.Random(f"kestrel-tiny/teach/known/{seed}")
    width, height = rng.randint(LEAST_SIDE, MOST_SIDE), rng.randint(LEAST_SIDE, MOST_SIDE)
    scene = draw_scene(rng, width, height, count=rng.randint(1, 7))
    found = [shape for shape in scene.shapes if shape.kind == kind]
    objects = tuple(NewObject(shape.anchor, shape.box, shape.colour) for shape in found)
    colour_of = (SHAPES[kind], COLOURS[found[0].colour]) if len(found) == 1 else None
    return Picture(scene, (), objects, colour_of)


def _draw_hexagons(seed: str, _with_near: bool) -> Picture:
    """A scene of known shapes, and 0 to 3 hexagons that overlap none of them."""
    rng = random.Random(f"kestrel-tiny/teach/{seed}")
    width, height = rng.randint(LEAST_SIDE, MOST_SIDE), rng.randint(LEAST_SIDE, MOST_SIDE)
    scene = draw_scene(rng, width, height, count=rng.randint(1, 6))
    boxes = [shape.box for shape in scene.shapes]
    found: list[Hexagon] = []
    wanted = rng.choice(WANTED)
    for _ in range(200):
        if len(found) == wanted:
            break
        radius = rng.uniform(0.09, 0.2) * min(width, height)
        colour = rng.randrange(MEASURED_COLOURS)
        one = Hexagon(
            rng.uniform(radius, width - radius),
            rng.uniform(radius, height - radius),
            radius,
            rng.uniform(-0.15, 0.15) + rng.choice((0.0, math.pi / 2)),
            colour,
            draw_colour(rng, colour),
        )
        apart = all(overlap_share(one.box, box) == 0 for box in boxes)
        if _stands_out(one.rgb, scene) and apart:
            found.append(one)
            boxes.append(one.box)
    found.sort(key=lambda each: each.x)
    objects = tuple(NewObject((one.x, one.y), one.box, one.colour) for one in found)
    colour_of = ("hexagon", COLOURS[found[0].colour]) if len(found) == 1 else None
    return Picture(scene, tuple(found), objects, colour_of)


def _draw_coloured(name: str, seed: str, with_near: bool) -> Picture:
    """A scene in which 0 to 3 shapes are given the colour. ``with_near``: another one mostly has a colour near it."""
    rng = random.Random(f"kestrel-tiny/teach/colour/{seed}")
    width, height = rng.randint(LEAST_SIDE, MOST_SIDE), rng.randint(LEAST_SIDE, MOST_SIDE)
    scene = draw_scene(rng, width, height, count=rng.randint(1, 7))
    wanted, shapes = rng.choice(WANTED), list(scene.shapes)
    number = _NEW if name in NEW_COLOURS else COLOURS.index(name)
    for index in rng.sample(range(len(shapes)), len(shapes)):
        if wanted == 0:
            break
        rgb = _draw_new(rng, name) if number == _NEW else draw_colour(rng, number)
        if _stands_out(rgb, scene):
            shapes[index] = _recoloured(shapes[index], number, rgb)
            wanted -= 1
    old = [index for index, shape in enumerate(shapes) if shape.colour != number]
    if with_near and old and rng.random() < 0.7:
        index, near = rng.choice(old), COLOURS.index(rng.choice(NEAR_COLOURS[name]))
        rgb = draw_colour(rng, near)
        if _stands_out(rgb, scene):
            shapes[index] = _recoloured(shapes[index], near, rgb)
    new = [shape for shape in shapes if shape.colour == number]
    objects = tuple(NewObject(shape.anchor, shape.box, shape.kind) for shape in new)
    alone = [one.kind for one in new if sum(one.kind == other.kind for other in shapes) == 1]
    colour_of = (SHAPES[alone[0]], name) if alone else None
    return Picture(replace(scene, shapes=tuple(shapes)), (), objects, colour_of)


def _draw_new(rng: random.Random, name: str) -> Rgb:
    (h0, h1), saturation, value = NEW_COLOURS[name]
    hue = rng.uniform(h0, h1) / 360
    return colorsys.hsv_to_rgb(hue, rng.uniform(*saturation), rng.uniform(*value))


def _recoloured(shape: Shape, colour: int, rgb: Rgb) -> Shape:
    if colour == _NEW:
        gap = rgb[0] / 2, rgb[1] / 2, rgb[2] / 2
    else:
        gap = stripe_gap(colour, rgb)
    return replace(shape, colour=colour, rgb=rgb, rgb2=gap)


def _stands_out(rgb: Rgb, scene: Scene) -> bool:
    behind = scene.background
    return min(math.dist(rgb, each) for each in (behind.first, behind.second)) >= CONTRAST


def examples(seed: str, subject: Subject, picture: Picture) -> list[dict[str, Any]]:
    """The lines about one image."""
    rng = random.Random(f"kestrel-tiny/teach/examples/{seed}")
    objects = picture.objects
    lines = _located(picture, subject.name, objects)
    count = str(len(objects))
    lines.append({"question": f"How many {subject.plural} are there?", "answer": count})
    lines.append(_asked_for(subject.name, objects))
    sorts = sorted({one.sort for one in objects})
    sort = rng.choice(sorts) if sorts and rng.random() < 0.6 else rng.randrange(10)
    own = [one for one in objects if one.sort == sort]
    lines.append(_asked_for(subject.sorted_name(sort), own))
    lines.append(rng.choice(_located(picture, subject.sorted_name(sort), own)))
    if picture.colour is not None:
        noun, answer = picture.colour
        lines.append({"question": f"What colour is the {noun}?", "answer": answer})
    return lines


def _located(picture: Picture, name: str, some: Sequence[NewObject]) -> list[dict[str, Any]]:
    """The points and the boxes of some objects of a picture."""
    w, h = picture.scene.width, picture.scene.height
    points = [[one.point[0] / w, one.point[1] / h] for one in some]
    boxes = [[x0 / w, y0 / h, x1 / w, y1 / h] for x0, y0, x1, y1 in (one.box for one in some)]
    return [{"object": name, "points": points}, {"object": name, "boxes": boxes}]


def _asked_for(name: str, some: Sequence[NewObject]) -> dict[str, Any]:
    question = f"Is there {with_article(name)}?"
    return {"question": question, "answer": "yes" if some else "no"}


def contrast(seed: str, picture: Picture) -> list[dict[str, Any]]:
    """A question about a shape that the model knows, which keeps it from giving every question a new answer."""
    shapes = [shape for shape in picture.scene.shapes if shape.colour != _NEW]
    kinds = [shape.kind for shape in picture.scene.shapes]
    alone = [shape for shape in shapes if kinds.count(shape.kind) == 1]
    if not alone:
        return []
    shape = random.Random(f"kestrel-tiny/teach/contrast/{seed}").choice(alone)
    question = f"What colour is the {SHAPES[shape.kind]}?"
    return [{"question": question, "answer": COLOURS[shape.colour]}]


def more_contrast(seed: str, subject: Subject, picture: Picture) -> list[dict[str, Any]]:
    """As ``contrast``, of several known shapes, and about new objects of the sorts that the shapes have."""
    rng = random.Random(f"kestrel-tiny/teach/contrast/{seed}")
    known = [shape for shape in picture.scene.shapes if shape.colour != _NEW]
    kinds = [shape.kind for shape in picture.scene.shapes]
    alone = [shape for shape in known if kinds.count(shape.kind) == 1]
    lines = [
        {"question": f"What colour is the {SHAPES[shape.kind]}?", "answer": COLOURS[shape.colour]}
        for shape in rng.sample(alone, min(ASKED, len(alone)))
    ]
    sorts = sorted(
        {subject.sort_of(shape) for shape in known} | {one.sort for one in picture.objects}
    )
    for sort in rng.sample(sorts, min(ASKED, len(sorts))):
        own = [one for one in picture.objects if one.sort == sort]
        name = subject.sorted_name(sort)
        lines += [_asked_for(name, own), rng.choice(_located(picture, name, own))]
    return lines


def write(
    folder: Path,
    subject: Subject,
    name: str,
    count: int,
    with_contrast: bool = False,
    more: bool = False,
) -> None:
    """Writes ``count`` images and data.jsonl to ``folder``. Another ``name`` gives other images.

    ``with_contrast``: they also show, and ask for, what is easily taken for the new objects.
    ``more``: they ask for more of it.
    """
    import pyvips

    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for index in range(count):
        seed = f"{name}/{index}"
        picture = subject.draw(seed, with_contrast)
        pixels = np.ascontiguousarray(render_scene(picture.scene).permute(1, 2, 0).numpy())
        for one in picture.hexagons:
            one.paint(pixels)
        image = pyvips.Image.new_from_array(np.clip(np.round(pixels), 0, 255).astype(np.uint8))
        file = f"{index:04}.jpg"
        image.copy(interpretation="srgb").write_to_file(str(folder / file), Q=90)
        about = examples(seed, subject, picture)
        if with_contrast:
            about += more_contrast(seed, subject, picture) if more else contrast(seed, picture)
        lines += [{"image": file, **each} for each in about]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "data.jsonl").write_text(text, encoding="utf-8")
