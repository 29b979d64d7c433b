"""How people type: capitals, politeness, missing marks, typing errors; and questions that no picture answers."""

from __future__ import annotations

import random

from training.domains.picture import NOT_SHOWN, Ask
from training.scenes.phrases import fill, with_article

_BEFORE = "Please tell me: |Can you tell me |Hello, |Hi! |Please: |Question: |Tell me, |So, ".split(
    "|"
)
_AFTER = (" Thanks!", " Please.", " Answer briefly.", " Thank you.")
_OFF_TOPIC = (
    "What is the capital of {p}?|Capital of {p}?|Who is the president of {p}?|How big is {p}?|What is {n} plus {m}?|"
    "What is {n} times {m}?|{n} + {m}?|Who wrote {b}?|When was {b} published?|How are you?|Tell me a joke.|"
    "What is your name?|Who are you?|What is the weather like in {p}?|What time is it now?|How do I cook {f}?|"
    "What does {f} cost in {p}?|Translate {f} to French.|Write a poem about {f}.|How many people live in {p}?|"
    "Which language do they speak in {p}?|Is {f} healthy?|What is the meaning of life?|How far is it from {p} to {q}?|"
    "Who won the world cup?|What is the square root of {n}?|Write code that sorts a list.|Where can I buy {f}?|"
    "How old are you?|What is the speed of light?|Who painted the Mona Lisa?|When did the war end?|Can you sing?"
)
_PLACES = (
    "France Japan Brazil Kenya Norway Canada India Spain Peru Egypt Italy Poland Chile Turkey Berlin London Texas Rome "
    "China Mexico Ireland Sweden Greece"
).split()
_BOOKS = "Hamlet|Dracula|Emma|The Hobbit|Faust|Moby Dick|Dune|Ulysses|The Trial|Carmen".split("|")
_FOODS = "rice|pasta|bread|soup|cheese|an omelette|coffee|honey|fish|chocolate|beans".split("|")
FOREIGN = (
    "dog giraffe person tree horse sandwich zebra elephant guitar banana dinosaur kangaroo bottle face flower knife "
    "penguin mermaid tractor window teapot violin sheep cow tiger owl wolf shoe hat spoon plate pillow blanket tomato "
    "onion"
).split()


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
        text = rng.choice(_BEFORE) + text
    elif u < 0.22:
        text += rng.choice(_AFTER)
    elif u < 0.24 and not quoted:
        text = _mistype(rng, text)
    if rng.random() < 0.12:
        text = text.rstrip("?.")
    return text


def _mistype(rng: random.Random, text: str) -> str:
    places = [i for i in range(1, len(text) - 2) if text[i].isalpha() and text[i + 1].isalpha()]
    if not places:
        return text
    i = rng.choice(places)
    return text[:i] + text[i + 1] + text[i] + text[i + 2 :]


def tell(rng: random.Random, kind: str, ways: str, answer: str, **words: str) -> Ask:
    """A question whose answer is in the model's own words."""
    return Ask("query", kind, vary(rng, ways, **words), answer)


def read(rng: random.Random, kind: str, ways: str, answer: str, **words: str) -> Ask:
    """A question whose answer stands in the picture, so that it is learnt character by character."""
    return Ask("query", kind, vary(rng, ways, **words), answer, spelled=True)


def off_topic(rng: random.Random) -> Ask:
    p, q = rng.sample(_PLACES, 2)
    words = {"p": p, "q": q, "b": rng.choice(_BOOKS), "f": rng.choice(_FOODS)}
    n, m = (str(rng.randint(2, 99)) for _ in range(2))
    return tell(rng, "off topic", _OFF_TOPIC, NOT_SHOWN, n=n, m=m, **words)


def absent_object(rng: random.Random) -> Ask:
    """A request for what the picture hasn't got, by any skill."""
    thing = rng.choice(FOREIGN)
    u = rng.random()
    if u < 0.5:
        skill = "detect" if u < 0.25 else "point"
        return Ask(skill, "absent", rng.choice((thing, thing + "s", "the " + thing)))
    if u < 0.75:
        ways = "Is there {a} in the {picture}?|Is there {a}?|Can you see {a}?|Do you see {a} here?"
        return tell(rng, "absent", ways, "no", a=with_article(thing))
    if u < 0.85:
        ways = "How many {t}s are there?|How many {t}s do you see?|Count the {t}s."
        return tell(rng, "absent", ways, "0", t=thing)
    ways = "What colour is the {t}?|What color is the {t}?|Where is the {t}?|What is the {t} doing?"
    return tell(rng, "absent", ways, f"There is no {thing}.", t=thing)
