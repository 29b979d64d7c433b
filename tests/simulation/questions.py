"""What callers ask, and what the answer is when nothing else happens."""

import io
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from kestrel_engine import InRegion, Tiled, Tiles


@cache
def image(name: str) -> Any:
    """The image of that name: pixels, a PNG, a region of one, a tiled one, or bytes that are none."""
    kind, _, number = name.partition(" ")
    if kind == "broken":
        return b"\x89PNG\r\n\x1a\n" + bytes(40)
    if kind == "region":
        return InRegion(image(f"png {number}"), (0.1, 0.2, 0.8, 0.9))
    if kind == "tiled":
        return Tiled(image(f"png {number}"), Tiles(rows=1, columns=2))
    sides = [(40, 60), (130, 200), (126, 126), (90, 300)][int(number) % 4]
    pixels = np.random.default_rng(int(number)).integers(0, 255, (*sides, 3), np.uint8)
    if kind == "pixels":
        return pixels
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    return written.getvalue()


CONSTRAINTS = (
    ("regex", "[ab]{2,9}"),
    ("choices", ("red", "green", "green crescent")),
    ("grammar", 'start: "(" start ")" | "x"'),
)


@dataclass(frozen=True, slots=True)
class Question:
    """A request without its circumstances. ``image``: a name; "" for none."""

    skill: str
    image: str = ""
    arguments: tuple[tuple[str, Any], ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()
    salt: str = ""

    @property
    def wanted(self) -> dict[str, Any]:
        """The settings. A constraint is a pair in ``settings``."""
        found = dict(self.settings)
        if "constraint" in found:
            found["constraint"] = dict([found["constraint"]])
        return found

    @property
    def is_broken(self) -> bool:
        return self.image.startswith("broken")

    @property
    def num_sequences(self) -> int | None:
        """How many sequences it becomes; None if it depends on their results."""
        if "presupposes" in dict(self.arguments):
            return None
        return 3 if self.image.startswith("tiled") else 1


def random_question(rng: random.Random) -> Question:
    """One of some thousand questions, of which many share an image or the beginning of a prompt."""
    kind = rng.choice(["png", "png", "png", "pixels", "pixels", "region", ""])
    name = f"{kind} {rng.randrange(6)}" if kind else ""
    settings: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 5, 12, 30]), "temperature": 0}
    skill = rng.choice(["query"] * 5 + ["caption", "detect", "detect", "point", "segment", "embed"])
    arguments: dict[str, Any] = {}
    if skill == "query":
        arguments["question"] = "why " * rng.randint(1, 6) + rng.choice("abc")
        arguments["reasoning"] = rng.random() < 0.15
        if name and rng.random() < 0.1:
            arguments["presupposes"] = ("cat", "dog")[: rng.randint(1, 2)]
        if rng.random() < 0.15:
            settings["stop"] = rng.choice("aeiou")
        if rng.random() < 0.15:
            settings["logprobs"] = True
        if rng.random() < 0.1:
            settings["temperature"], settings["seed"] = 0.7, rng.randrange(3)
        if rng.random() < 0.2 and not arguments["reasoning"]:
            settings["constraint"] = rng.choice(CONSTRAINTS)
    else:
        name = name or f"png {rng.randrange(6)}"
    if skill == "caption":
        arguments["length"] = rng.choice(["short", "normal"])
    elif skill == "embed":
        arguments["crops"], settings = rng.random() < 0.5, {}
    elif skill in ("detect", "point", "segment"):
        arguments["object"] = rng.choice(["cat", "dog", "red car"])
        del settings["temperature"]
        if skill != "segment" and rng.random() < 0.15:
            name = f"tiled {rng.randrange(6)}"
    if rng.random() < 0.02:
        name = "broken 0"
    salt = rng.choice(["", "", "", "x"])
    return Question(skill, name, tuple(arguments.items()), tuple(settings.items()), salt)
