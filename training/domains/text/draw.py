"""Printed text: a page of some kind, and what may be asked about any page."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np

from training.domains.phrasing import absent_object, off_topic, read, tell
from training.domains.picture import Ask, Mark, Picture, centre, find, in_order
from training.domains.text import words as w
from training.domains.text.documents import KINDS, form, receipt, table
from training.domains.text.page import Line, Page, Word
from training.scenes.phrases import WAYS

LONGEST = 110  # characters of an answer
READABLE = 16  # pixels of the font from which on issue 40 wants that lines are read
_SIZED = ("text read", "text line", "text here")
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def _read_all(rng: random.Random, page: Page) -> Ask | None:
    """Lines from top to bottom, and from left to right where they share a baseline."""
    rows: list[list[Line]] = []
    for line in page.lines:
        if not rows or abs(rows[-1][0].box[3] - line.box[3]) >= 0.5 * (line.box[3] - line.box[1]):
            rows.append([])
        rows[-1].append(line)
    sorted_rows = (sorted(row, key=lambda line: line.box[0]) for row in rows)
    text = "\n".join(" ".join(line.text for line in row) for row in sorted_rows)
    if not 0 < len(text) <= LONGEST:
        return None
    return read(rng, "text read", WAYS["read"], text)


def _read_line(rng: random.Random, page: Page) -> Ask | None:
    n = len(page.lines)
    k = rng.randrange(n)
    bottoms = [line.box[3] for line in page.lines]
    close = any(b - a < 6 for a, b in pairwise(bottoms))
    if not 2 <= n <= 8 or close or len(page.lines[k].text) > LONGEST:
        return None
    ways = WAYS["line"] + ("|" + WAYS["last line"] if k == n - 1 else "")
    return read(rng, "text line", ways, page.lines[k].text, d=str(k + 1), o=_ORDINALS[k])


def _plain(word: Word) -> str:
    return word.text.strip(",.;:!?")


def _find(rng: random.Random, page: Page, words: list[Word], skill: str) -> Ask:
    whole = [line for line in page.lines if 1 < len(line.words) < 5]
    if whole and rng.random() < 0.3:
        text = rng.choice(whole).text
        found = [line.box for line in whole if line.text == text]
    else:
        text = w.word(rng) if rng.random() < 0.25 else _plain(rng.choice(words))
        found = [word.box for word in words if _plain(word).lower() == text.lower()]
    ways = (text, f'"{text}"', f'the word "{text}"', f"the text {text}", f'the text "{text}"')
    kind = f"text {skill}" if found else "absent"
    return find(skill, kind, rng.choice(ways), in_order(found, page.size[0], centre))


def _presence(rng: random.Random, words: list[Word]) -> Ask:
    have = {_plain(word).lower() for word in words}
    text = _plain(rng.choice(words)) if rng.random() < 0.5 else w.word(rng)
    said = "yes" if text.lower() in have else "no"
    return tell(rng, "text presence", WAYS["word presence"], said, t=text)


def _here(rng: random.Random, page: Page, words: list[Word]) -> Ask | None:
    """Read what a box or a point marks."""
    thing: Line | Word = rng.choice(page.lines) if rng.random() < 0.5 else rng.choice(words)
    if len(thing.text) > LONGEST:
        return None
    if isinstance(thing, Word) and rng.random() < 0.4:
        ref: tuple[float, ...] = centre(thing.box)
        ways = "Which word is this?|Which word is here?|What word is this?"
    else:
        pad = rng.uniform(0, 3)
        x0, y0, x1, y1 = thing.box
        ref = (x0 - pad, y0 - pad, x1 + pad, y1 + pad)
        ways = "What does this say?|Read this.|What is written here?|Read the text here."
    return read(rng, "text here", ways, thing.text, (ref,))


def _next_word(rng: random.Random, page: Page, words: list[Word]) -> Ask | None:
    line = rng.choice(page.lines)
    if len(line.words) < 2:
        return None
    k = rng.randrange(len(line.words) - 1)
    first, second = line.words[k : k + 2]
    if sum(word.text.lower() == first.text.lower() for word in words) > 1:
        return None
    return read(rng, "text next", WAYS["next word"], second.text, t=first.text)


def asks_of(rng: random.Random, page: Page) -> list[Ask]:
    words = [word for line in page.lines for word in line.words]
    asks = [_read_all(rng, page)]
    asks += [_find(rng, page, words, skill) for skill in ("detect", "point")]
    asks += [_here(rng, page, words) for _ in range(4)]
    asks += [_read_line(rng, page), _presence(rng, words)]
    asks.append(_find(rng, page, words, rng.choice(("detect", "point"))))
    asks.append(_next_word(rng, page, words) if rng.random() < 0.7 else None)
    u = rng.random()
    asks.append(off_topic(rng) if u < 0.15 else absent_object(rng) if u < 0.4 else None)
    return [ask for ask in asks if ask is not None]


def draw(rng: random.Random, width: int, height: int, held: bool) -> Picture:
    kinds, weights = zip(*KINDS, strict=True)
    for _ in range(10):
        drawn = rng.choices(kinds, weights)[0]
        if not held and rng.random() < 0.3:
            drawn = rng.choice((form, table, table, receipt, receipt))  # screens need the same
        page, special = drawn(rng, width, height, held)
        small = min((line.size for line in page.lines), default=0) < READABLE
        if small and not held and rng.random() < 0.5:
            continue
        if page.lines and min(line.box[3] - line.box[1] for line in page.lines) >= 3:
            break
    else:
        raise RuntimeError(f"no text fits into {width}x{height}")
    asks = special + asks_of(rng, page)
    if not held:
        asks += filter(None, (_read_line(rng, page) for _ in range(2)))
    if small:
        asks = [replace(a, kind=f"{a.kind} small") if a.kind in _SIZED else a for a in asks]
    marks = [Mark(word.box, "text") for line in page.lines for word in line.words]
    return Picture(np.asarray(page.image), asks, marks, page.characters)
