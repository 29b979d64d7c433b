"""Pages of screens.zip, or held/screens.zip, of the data folder (screens/shoot.py makes them)."""

from __future__ import annotations

import random
from functools import cache

from training.domains.drawn import open_drawings
from training.domains.phrasing import off_topic
from training.domains.picture import Mark, Picture
from training.domains.screens.questions import absent, ask_about
from training.sources import icon_names


def draw(rng: random.Random, width: int, height: int, held: bool) -> Picture:
    archive = open_drawings("held/screens.zip" if held else "screens.zip", "pages.json")
    pixels, page, place = archive.place(rng, width, height)
    elements = []
    for e in page["elements"]:
        name = _spoken().get(e["name"]) if e["role"] == "icon" else e["name"]
        if name:
            elements.append({**e, "name": name})
    asks = ask_about(rng, elements, place, width)
    if not held:
        asks += absent(rng, elements)
    if rng.random() < 0.2:
        asks.append(off_topic(rng))
    marks = [Mark(place.box(e["box"]), f"screen {e['role']}") for e in elements]
    return Picture(pixels, asks, marks, complete=False)


@cache
def _spoken() -> dict[str, str]:
    """The name that the domain of icons uses, by the name that an icon set uses."""
    return {
        other.replace("-", " "): name for name, others in icon_names().items() for other in others
    }
