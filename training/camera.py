"""What a camera and an encoder do to a picture: it is turned and compressed here; crops.py blurs and tints it."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from PIL import Image

from training.domains.picture import Ask, Box, Picture, Pixels, Point


def compress(rng: random.Random, pixels: Pixels) -> Pixels:
    """As JPEG of quality 30 to 96; half of the pictures stay as they are."""
    if rng.random() < 0.5:
        return pixels
    data = io.BytesIO()
    chroma = "4:2:0" if rng.random() < 0.8 else "4:4:4"
    Image.fromarray(pixels).save(data, "JPEG", quality=rng.randint(30, 96), subsampling=chroma)
    return np.asarray(Image.open(data))


def turn(picture: Picture, degrees: float) -> Picture:
    """Turned around its middle against the clock; the ground of its first pixel fills the corners.

    A box becomes the box around the turned one. Requests to segment, and what leaves the picture, are left out.
    """
    height, width = picture.pixels.shape[:2]
    image = Image.fromarray(np.array(picture.pixels))
    ground = image.getpixel((0, 0))
    turned = image.rotate(degrees, Image.Resampling.BILINEAR, fillcolor=ground)
    sin, cos = math.sin(math.radians(degrees)), math.cos(math.radians(degrees))

    def move(x: float, y: float) -> Point:
        x, y = x - width / 2, y - height / 2
        return cos * x + sin * y + width / 2, cos * y - sin * x + height / 2

    def around(box: tuple[float, ...]) -> Box:
        x0, y0, x1, y1 = box
        xs, ys = zip(*(move(x, y) for x in (x0, x1) for y in (y0, y1)), strict=True)
        return min(xs), min(ys), max(xs), max(ys)

    def inside(box: Box) -> bool:
        return box[0] >= -2 and box[1] >= -2 and box[2] <= width + 2 and box[3] <= height + 2

    return Picture(
        np.asarray(turned),
        [ask for ask in (_moved(ask, move, around) for ask in picture.asks if ask.skill != "segment")
         if all(map(inside, ask.boxes))],
        [replace(m, box=box) for m in picture.marks if inside(box := around(m.box))],
        [(*move(x, y), c) for x, y, c in picture.characters],
        picture.complete,
        picture.domain,
    )  # fmt: skip


def _moved(
    ask: Ask, move: Callable[[float, float], Point], around: Callable[[tuple[float, ...]], Box]
) -> Ask:
    return replace(
        ask,
        boxes=tuple(around(box) for box in ask.boxes),
        points=tuple(move(*point) for point in ask.points),
        steps=tuple((words, tuple(move(*p) for p in points)) for words, points in ask.steps),
        refs=tuple(move(*ref) if len(ref) == 2 else around(ref) for ref in ask.refs),
    )
