"""Charts of libraries: of charts.zip or held/charts.zip (shoot.py makes them), or drawn now by matplotlib."""

from __future__ import annotations

import random

from training.domains.drawn import open_drawings
from training.domains.phrasing import off_topic
from training.domains.picture import Picture
from training.domains.webcharts.plotted import plot
from training.domains.webcharts.questions import ask_about
from training.domains.webcharts.tables import make_table

PLOTTED = 0.5
"""The share that is drawn now: the charts of the archive are few, and a model would learn them by heart."""


def draw(rng: random.Random, width: int, height: int, held: bool) -> Picture:
    if not held and rng.random() < PLOTTED:
        table = {"library": "matplotlib", **make_table(rng)}
        pixels = plot(rng, table, width, height)
    else:
        archive = open_drawings("held/charts.zip" if held else "charts.zip", "charts.json")
        pixels, table, _ = archive.place(rng, width, height)
    asks = ask_about(rng, table, exact=held)
    if rng.random() < 0.2:
        asks.append(off_topic(rng))
    return Picture(pixels, asks)
