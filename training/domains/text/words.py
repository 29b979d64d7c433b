"""Made-up texts: words, names, prices, dates, codes."""

import random
import string
from functools import cache
from pathlib import Path

from training.domains.text.fonts import sources
from training.sources import word_lists

_LISTS = [*word_lists(Path(__file__).parent).values()]
MONTHS, SHOPS, GOODS, KEYS, PLACES, TITLES = _LISTS[:6]
STREETS, AFTER_TOTAL, BEFORE_TOTAL, THANKS = _LISTS[6:]


def dictionary() -> tuple[str, ...]:
    """The words of the data files. Without these, goods and places: shapes are drawn without data files."""
    return _words(sources() / "words.txt")


@cache
def _words(file: Path) -> tuple[str, ...]:
    return tuple(file.read_text(encoding="utf-8").split()) if file.exists() else (*GOODS, *PLACES)


def word(rng: random.Random) -> str:
    """Mostly a word of the dictionary; some have their letters mixed, as a model must not guess by the first ones."""
    text = rng.choice(dictionary())
    if rng.random() < 0.2:
        text = "".join(rng.sample(text.lower(), len(text)))
    u = rng.random()
    return text.capitalize() if u < 0.25 else text.upper() if u < 0.35 else text


def name(rng: random.Random) -> str:
    return f"{rng.choice(dictionary()).capitalize()} {rng.choice(dictionary()).capitalize()}"


def made_up(rng: random.Random) -> str:
    """A word of two or three syllables that no dictionary has."""
    parts = zip(rng.choices("bcdfghjklmnprstvwz", k=3), rng.choices("aeiouy", k=3), strict=True)
    text: str = "".join(a + b for a, b in parts)[: rng.choice((4, 5, 6))] + rng.choice(
        ("", *"nrstlx")
    )
    return text.capitalize()


def term(rng: random.Random) -> str:
    """A word of any kind, as names, headings and labels have."""
    u = rng.random()
    if u < 0.7:
        return rng.choice(dictionary())
    return rng.choice(GOODS + KEYS + SHOPS).lower() if u < 0.85 else made_up(rng)


def title(rng: random.Random, most: int = 26) -> str:
    """A heading, a label or a name of at most ``most`` characters, which no list has: it must be read."""
    for _ in range(8):
        a, b, c = (term(rng) for _ in range(3))
        n = rng.choice((rng.randint(2, 99), rng.randint(1950, 2035), rng.randint(100, 9999)))
        text = rng.choice(TITLES).format(a=a, b=b, c=c, p=rng.choice(PLACES), n=n)
        if len(text) <= most:
            break
    text = text[:most].strip()
    u = rng.random()
    if u < 0.25:
        return " ".join(part[:1].upper() + part[1:] for part in text.split(" "))
    return text.upper() if u < 0.3 else text if u < 0.35 else text[0].upper() + text[1:]


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
    words = f"{d} {month} {y}", f"{month[:3]} {d}, {y}", f"{month} {d}, {y}", f"{d} {month[:3]} {y}"
    figures = f"{d:02}/{m:02}/{y}", f"{m:02}/{d:02}/{y % 100:02}", f"{d:02}.{m:02}.{y}"
    return rng.choice((*figures, f"{y}-{m:02}-{d:02}", f"{y}-{m:02}-{d:02}", *words))


def time(rng: random.Random) -> str:
    h, m = rng.randint(0, 23), f"{rng.randint(0, 59):02}"
    half = f"{h % 12 or 12}:{m} {rng.choice(('am', 'pm', 'AM', 'PM'))}"
    return rng.choice((f"{h:02}:{m}", f"{h:02}:{m}", f"{h}:{m}", half))


def phone(rng: random.Random) -> str:
    a, b, c = rng.randint(10, 999), rng.randint(100, 999), rng.randint(1000, 9999)
    return rng.choice((f"{a} {c}", f"({b}) {a}-{c}", f"+{a} {b} {c}", f"0{b} {c}", f"{b}-{a}-{c}"))


def email(rng: random.Random) -> str:
    a, b = (rng.choice(dictionary()).lower() for _ in range(2))
    return f"{a}{rng.choice(('', '.', '_', str(rng.randint(1, 99))))}@{b}.{rng.choice(('com', 'org', 'net'))}"


def value(rng: random.Random, key: str = "") -> str:
    """What may stand beside a key."""
    if "date" in key.lower():
        return date(rng)
    makers = number, price, code, word, name, time, phone, title, title, date
    return rng.choice(PLACES) if rng.random() < 0.1 else rng.choice(makers)(rng)


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
    return email(rng)


def phrase(rng: random.Random, words: int) -> str:
    return " ".join(piece(rng) for _ in range(words))
