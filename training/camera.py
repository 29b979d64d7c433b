"""What a camera and an encoder do to a picture: it is turned, then blurred, tinted and compressed by libvips."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pyvips
from numpy.typing import NDArray
from PIL import Image

from training.domains.picture import Ask, Box, Mark, Picture, Pixels, Point

pyvips.concurrency_set(1)  # each core has a process that draws

NOISE = 30.0  # standard deviation of _noise()


@cache
def _noise() -> NDArray[np.int8]:
    """Pictures get a part of it: drawing new noise takes as long as drawing the picture."""
    noise = np.random.Generator(np.random.SFC64(1)).standard_normal((1700, 1700, 3), np.float32)
    return (noise * NOISE).clip(-127, 127).astype(np.int8)


def spoil(rng: random.Random, pixels: Pixels) -> Pixels:
    """Blur, tint, noise and JPEG down to quality 30; half of the pictures stay clean."""
    if rng.random() < 0.5:
        return pixels
    image = pyvips.Image.new_from_array(pixels).copy(interpretation="srgb")
    if rng.random() < 0.3:
        image = image.gaussblur(rng.uniform(0.3, 1.0))
    if rng.random() < 0.3:
        gain = rng.uniform(0.85, 1.1)
        image = image * [gain * rng.uniform(0.92, 1.08) for _ in range(3)]
    if rng.random() < 0.4:
        (height, width, _), noise = pixels.shape, _noise()
        y, x = rng.randint(0, len(noise) - height), rng.randint(0, len(noise) - width)
        part = pyvips.Image.new_from_array(
            np.ascontiguousarray(noise[y : y + height, x : x + width])
        )
        image = image + part * (rng.uniform(0, 14) / NOISE)
    chroma = "on" if rng.random() < 0.8 else "off"
    quality = rng.randint(30, 96)
    data = image.rint().cast("uchar").jpegsave_buffer(Q=quality, subsample_mode=chroma)
    return np.asarray(pyvips.Image.new_from_buffer(data, "").numpy())


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
        [Mark(box, m.label, m.colour) for m in picture.marks if inside(box := around(m.box))],
        [(*move(x, y), c) for x, y, c in picture.characters],
        picture.complete,
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
