"""What a camera and an encoder do to a picture: it is turned and compressed here; crops.py blurs and tints it."""

import io
import math
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from PIL import Image

from training.domains.picture import Ask, Box, Picture, Pixels, Point, centre, in_clear_order

TURNED, MOST_TURN = 0.1, 6.0  # share of the pictures that are turned; degrees
_HOLLOW = ("icons", "emoji")  # of which the box of what is turned isn't known
# These tell things in the order of their places.
_LISTS = ("icons caption", "photo caption", "emoji caption")


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

    A box becomes the box around the turned one, and several boxes have the order of their new places. Requests to
    segment, what leaves the picture, what has no clear order, and boxes of what doesn't fill its box are left out.
    Scenes of shapes turn themselves (domains/shapes), since what is left of what changes, too.
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

    left_out = ("segment", "detect") if picture.domain in _HOLLOW else ("segment",)
    kept = (a for a in picture.asks if a.skill not in left_out)
    moved = (
        _moved(a, width, move, around) for a in kept if a.kind not in _LISTS or "," not in a.answer
    )
    return Picture(
        np.asarray(turned),
        [ask for ask in moved if ask is not None and all(map(inside, ask.boxes))],
        [replace(m, box=box) for m in picture.marks if inside(box := around(m.box))],
        [(*move(x, y), c) for x, y, c in picture.characters],
        picture.complete,
        picture.domain,
    )  # fmt: skip


def _moved(
    ask: Ask,
    width: int,
    move: Callable[[float, float], Point],
    around: Callable[[tuple[float, ...]], Box],
) -> Ask | None:
    boxes, points = [around(box) for box in ask.boxes], [move(*point) for point in ask.points]
    order = in_clear_order(range(len(boxes)), width, lambda i: centre(boxes[i]))
    if order is None:
        return None
    return replace(
        ask,
        boxes=tuple(boxes[i] for i in order),
        points=tuple(points[i] for i in order if points),
        steps=tuple((words, tuple(move(*p) for p in points)) for words, points in ask.steps),
        refs=tuple(move(*ref) if len(ref) == 2 else around(ref) for ref in ask.refs),
    )
