"""Backgrounds and colours that several domains use."""

import colorsys
import random

import numpy as np
from PIL import Image

from training.domains.picture import Box, as_numpy

Rgb = tuple[int, int, int]


def hsv(rng: random.Random, saturation: tuple[float, float], value: tuple[float, float]) -> Rgb:
    r, g, b = colorsys.hsv_to_rgb(rng.random(), rng.uniform(*saturation), rng.uniform(*value))
    return round(255 * r), round(255 * g), round(255 * b)


def luma(rgb: tuple[float, float, float]) -> float:
    return 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2]


def draw_ground(
    rng: random.Random, width: int, height: int, plain: float = 0.6
) -> tuple[Image.Image, Rgb]:
    """A background, mostly light, and its mean colour. plain: share of grounds of one colour."""
    u = rng.random()
    if u < 0.35:
        base: Rgb = (255, 255, 255)
    elif u < 0.6:
        base = hsv(rng, (0, 0.12), (0.88, 1))
    elif u < 0.75:
        base = hsv(rng, (0, 0.5), (0.05, 0.3))
    else:
        base = hsv(rng, (0.05, 0.7), (0.3, 0.95))
    if rng.random() < plain:
        return Image.new("RGB", (width, height), base), base
    g = as_numpy(rng)
    small = np.empty((5, 7, 3), np.float32)
    small[:] = base
    strength = rng.uniform(4, 28)
    if rng.random() < 0.5:  # a gradient
        t = np.add.outer(np.linspace(-1, 1, 5) * g.normal(), np.linspace(-1, 1, 7) * g.normal())
        small += t[..., None] * strength * 0.7
    else:  # clouds, as paper or walls have them
        small += g.normal(0, strength * 0.6, (5, 7, 1)) + g.normal(0, strength * 0.2, (5, 7, 3))
    image = Image.fromarray(small.clip(0, 255).astype(np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    return image, base


def ink_box(alpha: Image.Image, x: float, y: float) -> Box:
    """The box of what can be seen of a mask whose left upper corner is at (x, y)."""
    seen = alpha.point(lambda v: 255 if v > 60 else 0).getbbox() or (0, 0, *alpha.size)
    return seen[0] + x, seen[1] + y, seen[2] + x, seen[3] + y


def ink_for(rng: random.Random, ground: Rgb, contrast: float = 90) -> Rgb:
    """A colour that differs from the ground by ``contrast`` grey levels at least."""
    dark = luma(ground) > 127
    if rng.random() < 0.55:
        level = rng.randint(0, 60) if dark else rng.randint(200, 255)
        grey = (level, level, level)
        if abs(luma(grey) - luma(ground)) >= contrast:
            return grey
    for _ in range(20):
        rgb = hsv(rng, (0.2, 1), (0.1, 0.75) if dark else (0.6, 1))
        if abs(luma(rgb) - luma(ground)) >= contrast:
            return rgb
    return (0, 0, 0) if dark else (255, 255, 255)
