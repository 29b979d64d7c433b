"""Charts of charts.zip, or held/charts.zip, of the data folder (webcharts/shoot.py makes them)."""

from __future__ import annotations

import random

from training.domains.drawn import open_drawings
from training.domains.phrasing import off_topic
from training.domains.picture import Picture
from training.domains.webcharts.questions import ask_about


def draw(rng: random.Random, width: int, height: int, held: bool) -> Picture:
    pixels, table, _ = open_drawings(
        "held/charts.zip" if held else "charts.zip", "charts.json"
    ).place(rng, width, height)
    asks = ask_about(rng, table)
    if rng.random() < 0.2:
        asks.append(off_topic(rng))
    return Picture(pixels, asks)
