"""How people type: capitals, politeness, missing marks, typing errors; and questions that no picture answers."""

import random
from pathlib import Path

from training.domains.picture import NOT_SHOWN, Ask
from training.domains.text.words import dictionary
from training.scenes.phrases import WAYS, fill, with_article
from training.sources import word_lists

Refs = tuple[tuple[float, ...], ...]
_LISTS = word_lists(Path(__file__).parent)
_BEFORE, _AFTER, _OFF_TOPIC, _PLACES, _BOOKS, _FOODS, FOREIGN = _LISTS.values()


def vary(rng: random.Random, ways: str, **words: str) -> str:
    """As ``fill()``, with the case and the marks that a person may type. Words in quotation marks stay as they are."""
    text = fill(rng, ways, **words)
    quoted = '"' in text
    u = rng.random()
    if u < 0.04 and not quoted:
        text = text.upper()
    elif u < 0.16 and text[:1] != '"':
        text = text[0].lower() + text[1:]
    elif u < 0.20:
        text = f"{rng.choice(_BEFORE)} {text}"
    elif u < 0.22:
        text = f"{text} {rng.choice(_AFTER)}"
    elif u < 0.24 and not quoted:
        text = _mistype(rng, text)
    if rng.random() < 0.12:
        text = text.rstrip("?.")
    return text


def plural(noun: str) -> str:
    return noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")


def _mistype(rng: random.Random, text: str) -> str:
    places = [i for i in range(1, len(text) - 2) if text[i].isalpha() and text[i + 1].isalpha()]
    if not places:
        return text
    i = rng.choice(places)
    return text[:i] + text[i + 1] + text[i] + text[i + 2 :]


def tell(
    rng: random.Random, kind: str, ways: str, answer: str, refs: Refs = (), **words: str
) -> Ask:
    """A question whose answer is in the model's own words."""
    return Ask("query", kind, vary(rng, ways, **words), answer, refs=refs)


def read(
    rng: random.Random, kind: str, ways: str, answer: str, refs: Refs = (), **words: str
) -> Ask:
    """A question whose answer stands in the picture, so that it is learnt character by character."""
    return Ask("query", kind, vary(rng, ways, **words), answer, refs=refs, spelled=True)


def off_topic(rng: random.Random) -> Ask:
    p, q = rng.sample(_PLACES, 2)
    words = {"p": p, "q": q, "b": rng.choice(_BOOKS), "f": rng.choice(_FOODS)}
    n, m = (str(rng.randint(2, 99)) for _ in range(2))
    text = vary(rng, "|".join(_OFF_TOPIC), n=n, m=m, **words)
    return Ask("query", "off topic", text, NOT_SHOWN)


def absent_object(rng: random.Random) -> Ask:
    """A request for what the picture hasn't got, by any skill. The refusal names it, so any word may be asked for."""
    thing = rng.choice(FOREIGN) if rng.random() < 0.3 else rng.choice(dictionary()).lower()
    u = rng.random()
    if u < 0.35:
        skill = "detect" if u < 0.18 else "point"
        return Ask(skill, "absent", rng.choice((thing, plural(thing), "the " + thing)))
    if u < 0.5:
        return tell(rng, "absent", WAYS["presence absent"], "no", a=with_article(thing))
    if u < 0.57:
        return tell(rng, "absent", WAYS["count absent"], "0", t=plural(thing))
    return tell(rng, "absent", WAYS["absent thing"], f"There is no {thing}.", t=thing)
