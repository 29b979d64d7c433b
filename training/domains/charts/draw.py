"""Charts by a small renderer of our own: bars, lines, pies and scatter plots with known values."""

from __future__ import annotations

import random

import numpy as np
from PIL import Image

from training.domains.charts.chart import Chart, draw_data
from training.domains.charts.questions import asks_of
from training.domains.charts.render import RENDER, Pen
from training.domains.ground import draw_ground, ink_for, luma
from training.domains.picture import Mark, Picture, view_scale
from training.domains.text.fonts import draw_font
from training.domains.text.page import Page, fit, width_of


def draw(rng: random.Random, width: int, height: int, held: bool) -> Picture:
    for _ in range(20):
        c = draw_data(rng, rng.choices(list(RENDER), (34, 16, 22, 16, 12))[0])
        try:
            return _picture(rng, c, width, height, held)
        except ValueError:
            continue
    raise RuntimeError(f"no chart fits into {width}x{height}")


def _picture(rng: random.Random, c: Chart, width: int, height: int, held: bool) -> Picture:
    image, ground = draw_ground(rng, width, height, plain=0.97)
    if rng.random() < 0.7:
        image, ground = Image.new("RGB", (width, height), (255, 255, 255)), (255, 255, 255)
    page, ink = Page(image), ink_for(rng, ground, 120)
    c.colours = [(n, rgb) for n, rgb in c.colours if abs(luma(rgb) - luma(ground)) > 25]
    if len(c.colours) < (len(c.categories) if c.kind == "pie" else len(c.series)):
        raise ValueError("colours too near the ground")
    font = draw_font(rng, held)
    scale = view_scale(width, height)
    size = round(rng.uniform(12, rng.choice((20, 32))) / scale)
    size = max(8, min(size, width // 22, height // 16))
    top, pen = 1.0 * size, Pen(page, font, size, ink)
    titled = rng.random() < 0.75
    if titled:
        large = fit(c.title, font, round(size * rng.uniform(1, 1.5)), 0.96 * width)
        left = (width - width_of(c.title, font, large)) / 2
        page.put(left, 1.3 * large, c.title, font, large, ink)
        top += 1.9 * large
    plot = (5.0 * size, top + 0.8 * size, width - 1.2 * size, height - 2.4 * size)
    if plot[2] - plot[0] < 8 * size or plot[3] - plot[1] < 6 * size:
        raise ValueError("too small")
    if len(c.series) > 1:
        wide = max(width_of(t, font, size) for t in c.series) + 2 * size
        pen.legend(c.series, c.colours, plot[2] - wide, plot[1])
        plot = (plot[0], plot[1], plot[2] - wide - 0.5 * size, plot[3])
        c.legend = True
    RENDER[c.kind](pen, rng, c, plot)
    asks = asks_of(rng, c, width, titled)
    marks = [Mark(box, c.kind, c.colours[s][0] if c.kind != "pie" else c.colours[k][0])
             for s, row in enumerate(c.boxes) for k, box in enumerate(row)]  # fmt: skip
    return Picture(np.asarray(page.image), asks, marks, page.characters)
