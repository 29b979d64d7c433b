"""Icons: one, rows, grids and loose ones, in any colour; some with words beside them."""

import math
import random
from functools import cache
from typing import Any

import numpy as np
from PIL import Image, ImageFilter, ImageOps

from training.domains.ground import Rgb, draw_ground, hsv, ink_box, ink_for, luma
from training.domains.phrasing import absent_object, off_topic, tell
from training.domains.picture import (
    Ask,
    Box,
    Mark,
    Picture,
    Point,
    centre,
    find,
    in_clear_order,
    in_order,
    view_scale,
)
from training.domains.text.fonts import draw_font, sources
from training.domains.text.page import Page, fit, width_of
from training.scenes.phrases import WAYS, article
from training.sources import HELD_SET, ICON_SETS, icon_names

Square = tuple[float, float, float]  # x, y, side in pixels
_NAMES = tuple(icon_names())
_SMALLEST = 20.0  # pixels of the model's view


@cache
def icon_masks(held: bool) -> dict[str, list[Any]]:
    """Masks [64, 64] by name."""
    data = np.load(sources() / "icons.npz")
    found: dict[str, list[Any]] = {}
    for name, number, mask in zip(data["names"].tolist(), data["sets"], data["masks"], strict=True):
        if (number == ICON_SETS.index(HELD_SET)) == held:
            found.setdefault(name, []).append(mask)
    return found


def _redrawn(rng: random.Random, mask: Image.Image) -> Image.Image:
    """As another set may draw it: with bolder or finer lines, narrower or lower."""
    if rng.random() < 0.3:
        bolder = rng.random() < 0.6
        mask = mask.filter(ImageFilter.MaxFilter(3) if bolder else ImageFilter.MinFilter(3))
    if rng.random() < 0.3:
        size = round(mask.width * rng.uniform(0.8, 1)), round(mask.height * rng.uniform(0.8, 1))
        mask = ImageOps.pad(mask.resize(size), mask.size)
    return mask


def _paste(rng: random.Random, page: Page, mask: Image.Image, place: Square, ink: Rgb) -> Box:
    """Draw a mask into the square; returns the box of its ink."""
    x, y, side = round(place[0]), round(place[1]), max(8, round(place[2]))
    how = rng.choice((Image.Resampling.BILINEAR, Image.Resampling.LANCZOS, Image.Resampling.BOX))
    mask = mask.resize((side, side), how)
    page.image.paste(ink, (x, y), mask)
    return ink_box(mask, x, y)


def layout(rng: random.Random, width: int, height: int, smallest: float) -> list[Square]:
    """Squares that don't overlap, and are at least ``smallest`` pixels of the model's view a side."""
    least = min(smallest / view_scale(width, height), 0.4 * min(width, height))
    u = rng.random()
    if u < 0.2:
        side = rng.uniform(max(least, 0.2 * min(width, height)), 0.9 * min(width, height))
        return [(rng.uniform(0, width - side), rng.uniform(0, height - side), side)]
    side = math.exp(rng.uniform(math.log(least), math.log(6 * least)))
    side = min(side, 0.4 * min(width, height))
    if u < 0.6:
        step_x, step_y = (side * rng.uniform(1.25, 2.6) for _ in range(2))
        columns = max(1, min(rng.randint(1, 8), int(width / step_x)))
        rows = max(1, min(rng.choice((1, 1, 2, 3, 4, 5)), int(height / step_y)))
        while rows * columns > 24:
            rows -= 1
        left, top = rng.uniform(0, width - columns * step_x), rng.uniform(0, height - rows * step_y)
        return [(left + (c + 0.5) * step_x - side / 2, top + (r + 0.5) * step_y - side / 2, side)
                for r in range(rows) for c in range(columns)]  # fmt: skip
    found: list[Square] = []
    for _ in range(rng.randint(2, 12) * 6):
        own = side * rng.uniform(0.7, 1.3)
        x, y = rng.uniform(0, max(0.1, width - own)), rng.uniform(0, max(0.1, height - own))
        apart = (max(abs(x - a), abs(y - b)) > max(own, other) for a, b, other in found)
        if len(found) < 14 and all(apart):
            found.append((x, y, own))
    return found or [(0, 0, min(side, width, height))]


def _wrong_name(rng: random.Random, icons: list[Mark]) -> str:
    have = {icon.label for icon in icons}
    return rng.choice([name for name in _NAMES if name not in have])


def _seek(rng: random.Random, icons: list[Mark], skill: str) -> Ask:
    name = rng.choice(icons).label if rng.random() < 0.85 else _wrong_name(rng, icons)
    boxes = [icon.box for icon in icons if icon.label == name]
    said = rng.choice(("{}", "{} icon", "the {} icon", "{} icons", "the {} symbol")).format(name)
    if rng.random() < 0.1:
        said = rng.choice(("icon", "icons", "all icons", "symbols"))
        boxes = [icon.box for icon in icons]
    kind = f"icons {skill}" if boxes else "absent"
    return find(skill, kind, said, boxes)


def _this(rng: random.Random, icons: list[Mark]) -> Ask:
    icon = rng.choice(icons)
    if len(icons) == 1 and rng.random() < 0.7:
        return tell(rng, "icons name", WAYS["icon alone"], icon.label)
    ref = icon.box if rng.random() < 0.5 else centre(icon.box)
    return tell(rng, "icons name", WAYS["icon here"], icon.label, (ref,))


def _amounts(rng: random.Random, icons: list[Mark]) -> list[Ask]:
    name = rng.choice(icons).label
    count = sum(icon.label == name for icon in icons)
    counts = [tell(rng, "icons count", WAYS["count of icons"], str(count), n=name)]
    counts.append(tell(rng, "icons count", WAYS["count of all icons"], str(len(icons))))
    present = rng.random() < 0.5
    asked, said = (name, "yes") if present else (_wrong_name(rng, icons), "no")
    chosen = rng.choice(counts)
    a = article(asked)
    return [chosen, tell(rng, "icons presence", WAYS["icon presence"], said, a=a, n=asked)]


def _captions(rng: random.Random, icons: list[Mark]) -> list[Ask]:
    names = [icon.label for icon in icons]
    text = f"Icons: {', '.join(names)}."
    if len(names) == 1:
        text = f"{article(names[0]).capitalize()} {names[0]} icon."
    elif len(names) > 5:
        text = f"{len(names)} icons."
    asks = [Ask("caption", "icons caption", "short", text)]
    return [*asks, tell(rng, "icons caption", WAYS["icons"], text)] if len(names) <= 5 else asks


def _labels(
    rng: random.Random, page: Page, icons: list[Mark], held: bool, ink: Rgb, pitch: float
) -> None:
    """The name under each icon, or another word."""
    font = draw_font(rng, held)
    for icon in icons:
        x0, y0, x1, y1 = icon.box
        text = (icon.label if rng.random() < 0.6 else rng.choice(_NAMES)).title()
        size = fit(text, font, round(0.3 * (y1 - y0)), pitch)
        if size >= 9 and y1 + 1.4 * size < page.size[1]:
            left = (x0 + x1) / 2 - width_of(text, font, size) / 2
            page.put(left, y1 + 1.2 * size, text, font, size, ink)


def draw(rng: random.Random, width: int, height: int, held: bool) -> Picture:
    drawn = icon_masks(held)
    image, ground = draw_ground(rng, width, height, plain=0.8)
    page = Page(image)
    places = layout(rng, width, height, _SMALLEST)
    pool = rng.sample(sorted(drawn), min(len(drawn), rng.choice((2, 4, 12, 30))))
    one_ink = ink_for(rng, ground, 80) if rng.random() < 0.6 else None
    tile = rng.random() < 0.15
    icons = []

    def middle(square: Square) -> Point:
        return square[0] + square[2] / 2, square[1] + square[2] / 2

    # The order goes by the squares: ink isn't in the middle of each.
    for x, y, side in in_order(places, width, middle):
        name, ink = rng.choice(pool), one_ink or ink_for(rng, ground, 60)
        if tile:
            plate = hsv(rng, (0.3, 1), (0.3, 1)) if rng.random() < 0.6 else ink_for(rng, ground, 30)
            pad = 0.12 * side
            around = (x - pad, y - pad, x + side + pad, y + side + pad)
            page.pen.rounded_rectangle(around, pad, plate)
            ink = (255, 255, 255) if luma(plate) < 150 else (0, 0, 0)
        mask = Image.fromarray(rng.choice(drawn[name]))
        mask = mask if held else _redrawn(rng, mask)
        icons.append(Mark(_paste(rng, page, mask, (x, y, side), ink), name))
    if len(places) > 1 and rng.random() < 0.2:
        lefts = [x for x, _, _ in places]
        pitch = min((b - a for a in lefts for b in lefts if b - a > 1), default=width / 3)
        _labels(rng, page, icons, held, ink_for(rng, ground, 90), 0.95 * pitch)
    asks = [_seek(rng, icons, skill) for skill in ("detect", "point")]
    asks += [_this(rng, icons) for _ in range(4)]
    asks += [_seek(rng, icons, "point"), *_amounts(rng, icons)]
    asks += _captions(rng, icons) if in_clear_order(places, width, middle) else []
    asks.append(off_topic(rng) if rng.random() < 0.3 else absent_object(rng))
    for _ in range(0 if held else 3):
        asks += [_seek(rng, icons, "detect"), _this(rng, icons), *_amounts(rng, icons)]
    return Picture(np.asarray(page.image), asks, icons, page.characters)
