"""Naming objects: which shapes a phrase means, and the many ways to write it."""

import random
from dataclasses import dataclass
from pathlib import Path

from training.scenes import vocabulary as v
from training.scenes.scenes import Scene, Shape

_LINES = (Path(__file__).parents[1] / "ways.txt").read_text(encoding="utf-8").splitlines()
WAYS = dict(line.split(": ", 1) for line in _LINES)
"""The ways to ask a question by name; "|" divides them."""


def fill(rng: random.Random, ways: str, **words: str) -> str:
    """One of the ways to ask, which "|" divides, with its words."""
    picture = rng.choice(("picture", "picture", "image", "photo"))
    return rng.choice(ways.split("|")).format(picture=picture, **words)


@dataclass(frozen=True)
class Phrase:
    """A description such as "striped red circle"; a field that is None leaves that property open."""

    kind: int | None = None
    colour: int | None = None
    style: int | None = None

    def matches(self, shape: Shape) -> bool:
        asked = (self.kind, shape.kind), (self.colour, shape.colour), (self.style, shape.style)
        return all(mine is None or mine == its for mine, its in asked)

    def find(self, scene: Scene) -> list[int]:
        """Indices of the matching shapes, left to right."""
        return [i for i, shape in enumerate(scene.shapes) if self.matches(shape)]

    @property
    def held_out(self) -> bool:
        return (self.colour, self.kind) in v.HELD_OUT

    def plain(self, plural: bool = False) -> str:
        """The canonical words, as answers and reasoning use them."""
        return self.words(None, plural)

    def words(self, rng: random.Random | None, plural: bool = False) -> str:
        """The words as a user may say them."""
        parts = []
        if self.style is not None:
            parts.append(rng.choice(v.STYLE_WORDS[self.style]) if rng else v.STYLES[self.style])
        if self.colour is not None:
            parts.append(v.COLOURS[self.colour])
        if self.kind is None:
            noun = rng.choice(v.ANY_NOUNS) if rng else v.ANY_NOUNS[0]
        else:
            noun = (v.SHAPES[self.kind], v.PLURALS[self.kind])
            if rng and rng.random() < 0.15:
                noun = v.SYNONYMS.get(v.SHAPES[self.kind], noun)
        parts.append(noun[plural])
        return " ".join(parts)


def name_of(shape: Shape) -> str:
    """Canonical short name: "red circle"."""
    return f"{v.COLOURS[shape.colour]} {v.SHAPES[shape.kind]}"


def article(words: str) -> str:
    return "an" if words[0] in "aeiou" and not words.startswith(("us", "uni")) else "a"


def with_article(words: str) -> str:
    return f"{article(words)} {words}"


def refer(rng: random.Random, scene: Scene, index: int) -> Phrase | None:
    """A phrase that means this shape alone, mostly by colour and kind; None if it has a twin."""
    kind, colour, style = (s := scene.shapes[index]).kind, s.colour, s.style
    both = Phrase(kind, colour)
    options = [both, both, Phrase(kind, colour, style), Phrase(kind), Phrase(None, colour)]
    rng.shuffle(options)
    return next((phrase for phrase in options if phrase.find(scene) == [index]), None)


def draw_present(rng: random.Random, scene: Scene) -> Phrase | None:
    """A phrase with at least one match."""
    if not scene.shapes:
        return None
    shape = rng.choice(scene.shapes)
    u = rng.random()
    style = shape.style if rng.random() < 0.12 else None
    kind = None if u < 0.16 or 0.34 <= u < 0.54 else shape.kind
    return Phrase(kind, None if u < 0.34 else shape.colour, style)


def draw_absent(rng: random.Random, scene: Scene) -> Phrase | None:
    """A phrase without a match, mostly built from what is there; never a pair that training holds out."""
    for _ in range(20):
        near = bool(scene.shapes) and rng.random() < 0.7
        kind = rng.choice(scene.shapes).kind if near else rng.randrange(len(v.SHAPES))
        colour = rng.choice(scene.shapes).colour if near else rng.randrange(scene.palette)
        u = rng.random()
        style = rng.randrange(3) if rng.random() < 0.08 else None
        phrase = Phrase(None if 0.15 <= u < 0.3 else kind, None if u < 0.15 else colour, style)
        if not phrase.find(scene) and not phrase.held_out:
            return phrase
    return None


# Up to which random number, what stands before the words, and whether they are plural.
_FORMS = (
    (0.45, "", False), (0.8, "", True), (0.88, "the ", False), (0.92, "all ", True), (0.96, "every ", False),
    (1.0, "a ", False),
)  # fmt: skip


def object_words(rng: random.Random, phrase: Phrase) -> str:
    """How a user names what is to be found: singular, plural, with or without an article."""
    u = rng.random()
    _, before, plural = next(form for form in _FORMS if u < form[0])
    words = before + phrase.words(rng, plural)
    return words.capitalize() if rng.random() < 0.03 else words
