"""Captions of three lengths, and the parser that reads back which objects they name."""

import re
from collections import Counter

from training.scenes.phrases import name_of, with_article
from training.scenes.scenes import Scene, Shape
from training.scenes.vocabulary import COLOURS, NUMBER_WORDS, PLURALS, SHAPES, STYLES

LENGTHS: tuple[str, ...] = ("short", "normal", "long")
_PLACES = (
    ("at the top left", "at the top", "at the top right"),
    ("at the left", "in the middle", "at the right"),
    ("at the bottom left", "at the bottom", "at the bottom right"),
)


def _series(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _amount(count: int) -> str:
    return f"{NUMBER_WORDS[count]} shape{'' if count == 1 else 's'}"


def place_of(scene: Scene, shape: Shape) -> str:
    """Returns where a shape is, by thirds of the image."""
    x, y = shape.centre
    return _PLACES[min(int(3 * y / scene.height), 2)][min(int(3 * x / scene.width), 2)]


def short_caption(scene: Scene) -> str:
    """Groups of like objects, in the order in which the first of each stands from left to right."""
    if not scene.shapes:
        return "An empty picture."
    parts = [
        with_article(f"{COLOURS[colour]} {SHAPES[kind]}")
        if count == 1
        else f"{NUMBER_WORDS[count]} {COLOURS[colour]} {PLURALS[kind]}"
        for (colour, kind), count in objects_of(scene).items()
    ]
    text = _series(parts)
    return text[0].upper() + text[1:] + "."


def normal_caption(scene: Scene) -> str:
    """Every object by itself, left to right."""
    each = f": {_series([with_article(name_of(s)) for s in scene.shapes])}" if scene.shapes else ""
    return f"The picture shows {_amount(len(scene.shapes))}{each}."


def long_caption(scene: Scene) -> str:
    """Every object with its style and place, left to right."""
    if not scene.shapes:
        return "The picture is empty. There are no shapes."
    verb = "is" if len(scene.shapes) == 1 else "are"
    parts = [
        f"{with_article(f'{STYLES[s.style]} {name_of(s)}')} {place_of(scene, s)}"
        for s in scene.shapes
    ]
    return f"There {verb} {_amount(len(scene.shapes))}. From left to right: {_series(parts)}."


def caption(scene: Scene, length: str) -> str:
    return {"short": short_caption, "normal": normal_caption, "long": long_caption}[length](scene)


_NUMBERS = {"a": 1, "an": 1, **{word: i for i, word in enumerate(NUMBER_WORDS)}}
_ITEM = re.compile(
    rf"\b({'|'.join(_NUMBERS)}) (?:(?:{'|'.join(STYLES)}) )?({'|'.join(COLOURS)}) ({'|'.join(SHAPES + PLURALS)})\b"
)


def named_objects(text: str) -> Counter[tuple[int, int]]:
    """How many objects of each (colour, kind) a caption names."""
    found: Counter[tuple[int, int]] = Counter()
    for number, colour, noun in _ITEM.findall(text.lower()):
        kind = SHAPES.index(noun) if noun in SHAPES else PLURALS.index(noun)
        found[COLOURS.index(colour), kind] += _NUMBERS[number]
    return +found


def objects_of(scene: Scene) -> Counter[tuple[int, int]]:
    return Counter((s.colour, s.kind) for s in scene.shapes)
