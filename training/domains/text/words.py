"""Made-up texts: words, names, prices, dates, codes."""

import random
import string
from functools import cache
from pathlib import Path

from training.domains.text.fonts import sources
from training.sources import word_lists


@cache
def dictionary() -> tuple[str, ...]:
    return tuple((sources() / "words.txt").read_text(encoding="utf-8").split())


MONTHS, SHOPS, GOODS, KEYS = word_lists(Path(__file__).parent).values()


def word(rng: random.Random) -> str:
    """Mostly a word of the dictionary; some have their letters mixed, as a model must not guess by the first ones."""
    text = rng.choice(dictionary())
    if rng.random() < 0.2:
        text = "".join(rng.sample(text.lower(), len(text)))
    u = rng.random()
    return text.capitalize() if u < 0.25 else text.upper() if u < 0.35 else text


def name(rng: random.Random) -> str:
    return f"{rng.choice(dictionary()).capitalize()} {rng.choice(dictionary()).capitalize()}"


def number(rng: random.Random) -> str:
    u = rng.random()
    if u < 0.4:
        return str(rng.randint(0, 10 ** rng.randint(1, 5)))
    if u < 0.6:
        return f"{rng.uniform(0, 10 ** rng.randint(1, 3)):.{rng.randint(1, 2)}f}"
    if u < 0.8:
        return price(rng)
    return f"{rng.randint(1, 100)}%"


def price(rng: random.Random, most: float = 3) -> str:
    amount = f"{10 ** rng.uniform(-0.3, most):.2f}"
    return rng.choice((amount, "$" + amount, "$" + amount, "£" + amount, "€" + amount))


def date(rng: random.Random) -> str:
    d, m, y = rng.randint(1, 28), rng.randint(1, 12), rng.randint(1990, 2030)
    month = MONTHS[m - 1]
    words = f"{d} {month} {y}", f"{month[:3]} {d}, {y}"
    return rng.choice((f"{d:02d}/{m:02d}/{y}", f"{y}-{m:02d}-{d:02d}", *words))


def time(rng: random.Random) -> str:
    return f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"


def code(rng: random.Random) -> str:
    letters = rng.choice(("", string.ascii_uppercase, string.ascii_letters))
    pool = letters + string.digits
    text = "".join(rng.choices(pool, k=rng.randint(3, 10)))
    return text[:3] + "-" + text[3:] if rng.random() < 0.3 and len(text) > 5 else text


def odd(rng: random.Random) -> str:
    """Any printable characters, so that reading doesn't become guessing words."""
    pool = string.ascii_letters + string.digits + "!#$%&()*+,-./:;=?@_" + string.ascii_lowercase
    return "".join(rng.choices(pool, k=rng.randint(2, 8)))


def piece(rng: random.Random) -> str:
    """A word of running text, mostly a real one."""
    u = rng.random()
    if u < 0.72:
        text = word(rng)
        return text + rng.choice(",.;:!?") if rng.random() < 0.1 else text
    if u < 0.82:
        return number(rng)
    if u < 0.86:
        return date(rng).split()[0]
    if u < 0.92:
        return code(rng)
    if u < 0.96:
        return odd(rng)
    return f"{rng.choice(dictionary()).lower()}@{rng.choice(dictionary()).lower()}.{rng.choice(('com', 'org', 'net'))}"


def phrase(rng: random.Random, words: int) -> str:
    return " ".join(piece(rng) for _ in range(words))
