"""Printed text: a page of some kind, and what may be asked about any page."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np

from training.domains.phrasing import absent_object, off_topic, vary
from training.domains.picture import Ask, Mark, Picture, centre, in_order
from training.domains.text import words as w
from training.domains.text.documents import KINDS
from training.domains.text.page import Line, Page, Word

LONGEST = 110  # characters of an answer
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def _read_all(rng: random.Random, page: Page) -> Ask | None:
    """Lines from top to bottom, and from left to right where they share a baseline."""
    rows: list[list[Line]] = []
    for line in page.lines:
        if rows and abs(rows[-1][0].box[3] - line.box[3]) < 0.5 * (line.box[3] - line.box[1]):
            rows[-1].append(line)
        else:
            rows.append([line])
    text = "\n".join(
        " ".join(line.text for line in sorted(row, key=lambda k: k.box[0])) for row in rows
    )
    if not 0 < len(text) <= LONGEST:
        return None
    templates = ("Read the text.", "What does it say?", "What does the {picture} say?", "What is written here?",
                 "Transcribe the text.", "Read all the text.", "What text is in the {picture}?", "OCR", "Text?",
                 "Which words are in the {picture}?", "What is written in the {picture}?", "Read this.")  # fmt: skip
    return Ask("query", "text read", vary(rng, templates), text, spelled=True)


def _read_line(rng: random.Random, page: Page) -> Ask | None:
    n = len(page.lines)
    k = rng.randrange(n)
    bottoms = [line.box[3] for line in page.lines]
    if (
        n < 2
        or n > 8
        or any(b - a < 6 for a, b in pairwise(bottoms))
        or len(page.lines[k].text) > LONGEST
    ):
        return None
    templates = [
        "What does line {d} say?",
        "Read line {d}.",
        "Read the {o} line.",
        "What is the {o} line?",
        "Line {d}?",
    ]
    if k == n - 1:
        templates += ["Read the last line.", "What does the last line say?"]
    return Ask(
        "query",
        "text line",
        vary(rng, templates, d=str(k + 1), o=_ORDINALS[k]),
        page.lines[k].text,
        spelled=True,
    )


def _plain(word: Word) -> str:
    return word.text.strip(",.;:!?")


def _find(rng: random.Random, page: Page, words: list[Word], skill: str) -> Ask:
    text = w.word(rng) if rng.random() < 0.25 else _plain(rng.choice(words))
    found = [word for word in words if _plain(word).lower() == text.lower()]
    said = rng.choice(
        (text, f'"{text}"', f'the word "{text}"', f"the text {text}", f'the text "{text}"')
    )
    found = in_order(found, page.size[0], lambda word: centre(word.box))
    boxes = tuple(word.box for word in found)
    kind = f"text {skill}" if found else "absent"
    return Ask(
        skill, kind, said, boxes=boxes, points=tuple(map(centre, boxes)) if skill == "point" else ()
    )


def _presence(rng: random.Random, words: list[Word]) -> Ask:
    have = {_plain(word).lower() for word in words}
    text = _plain(rng.choice(words)) if rng.random() < 0.5 else w.word(rng)
    templates = (
        'Is the word "{t}" in the {picture}?',
        'Does it say "{t}"?',
        'Does the word "{t}" occur?',
        'Is "{t}" written here?',
    )
    return Ask(
        "query",
        "text presence",
        vary(rng, templates, t=text),
        "yes" if text.lower() in have else "no",
    )


def _here(rng: random.Random, page: Page, words: list[Word]) -> Ask | None:
    """Read what a box or a point marks."""
    thing: Line | Word = rng.choice(page.lines) if rng.random() < 0.5 else rng.choice(words)
    if len(thing.text) > LONGEST:
        return None
    if isinstance(thing, Word) and rng.random() < 0.4:
        ref: tuple[float, ...] = centre(thing.box)
        templates: tuple[str, ...] = (
            "Which word is this?",
            "Which word is here?",
            "What word is this?",
        )
    else:
        pad = rng.uniform(0, 3)
        x0, y0, x1, y1 = thing.box
        ref = (x0 - pad, y0 - pad, x1 + pad, y1 + pad)
        templates = (
            "What does this say?",
            "Read this.",
            "What is written here?",
            "Read the text here.",
        )
    return Ask("query", "text here", vary(rng, templates), thing.text, refs=(ref,), spelled=True)


def _next_word(rng: random.Random, page: Page, words: list[Word]) -> Ask | None:
    line = rng.choice(page.lines)
    if len(line.words) < 2:
        return None
    k = rng.randrange(len(line.words) - 1)
    first, second = line.words[k : k + 2]
    if sum(word.text.lower() == first.text.lower() for word in words) > 1:
        return None
    templates = (
        'Which word comes after "{t}"?',
        'What stands right of "{t}"?',
        'What is written after "{t}"?',
    )
    return Ask("query", "text next", vary(rng, templates, t=first.text), second.text, spelled=True)


def _amounts(rng: random.Random, page: Page, words: list[Word]) -> Ask:
    rows = len({round(line.box[3] / 5) for line in page.lines})
    if rng.random() < 0.5 and rows == len(page.lines):
        return Ask(
            "query",
            "text lines",
            vary(rng, ("How many lines of text are there?", "How many lines are there?")),
            str(rows),
        )
    return Ask(
        "query",
        "text words",
        vary(rng, ("How many words are there?", "Count the words.")),
        str(len(words)),
    )


def asks_of(rng: random.Random, page: Page) -> list[Ask]:
    words = [word for line in page.lines for word in line.words]
    asks = [
        _read_all(rng, page),
        _find(rng, page, words, "detect"),
        _find(rng, page, words, "point"),
        _here(rng, page, words),
    ]
    asks += [_here(rng, page, words) for _ in range(3)] + [
        _read_line(rng, page),
        _presence(rng, words),
    ]
    asks.append(_find(rng, page, words, rng.choice(("detect", "point"))))
    asks.append(_next_word(rng, page, words) if rng.random() < 0.7 else None)
    if len(words) <= 12 and rng.random() < 0.4:
        asks.append(_amounts(rng, page, words))
    u = rng.random()
    asks.append(off_topic(rng) if u < 0.15 else absent_object(rng) if u < 0.4 else None)
    return [ask for ask in asks if ask is not None]


def draw(rng: random.Random, width: int, height: int, held: bool) -> Picture:
    kinds, weights = zip(*KINDS, strict=True)
    for _ in range(10):
        page, special = rng.choices(kinds, weights)[0](rng, width, height, held)
        if page.lines and min(line.box[3] - line.box[1] for line in page.lines) >= 3:
            break
    else:
        raise RuntimeError(f"no text fits into {width}x{height}")
    asks = special + asks_of(rng, page)
    marks = [Mark(word.box, "text") for line in page.lines for word in line.words]
    return Picture(np.asarray(page.image), asks, marks, page.characters)
