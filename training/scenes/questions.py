"""Questions about a scene with one right answer each, in varied words.

A maker returns None when the scene allows no fair question of its kind.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from training.domains.picture import Ask
from training.scenes import phrases
from training.scenes.captions import place_of, short_caption
from training.scenes.phrases import WAYS, Phrase, draw_absent, draw_present, name_of, refer
from training.scenes.scenes import MIN_SIZE_RATIO, Scene, Shape
from training.scenes.vocabulary import COLOURS, FOREIGN_NOUNS, SHAPES, STYLE_WORDS, STYLES

RELATION_GAP = 0.05  # least difference of two centres, as a share of the side
EDGE_GAP = 0.03  # least lead of the outermost centre
PLACE_GAP = 0.03  # least distance from the lines that divide the image into thirds

Step = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Question:
    """kind: the row of the evaluation table.

    steps: what the reasoning points at, as (words, indices of shapes); refs: a spatial reference in image
    shares, [x, y] or [x0, y0, x1, y1].
    """

    kind: str
    text: str
    answer: str
    steps: tuple[Step, ...] = ()
    refs: tuple[tuple[float, ...], ...] = ()


Maker = Callable[[random.Random, Scene], Question | None]


def _say(rng: random.Random, ways: str, **words: str) -> str:
    """Like fill(), sometimes without capital or mark, as people type."""
    text = phrases.fill(rng, ways, **words)
    if rng.random() < 0.2:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.15:
        text = text.rstrip("?.")
    return text


def _step(phrase: Phrase, found: list[int]) -> tuple[Step, ...]:
    """What the reasoning points at for a phrase."""
    return ((phrase.plain(len(found) != 1), tuple(found)),)


def _noun(rng: random.Random, plural: bool = False) -> str:
    return Phrase().words(rng, plural)


def count(rng: random.Random, scene: Scene) -> Question | None:
    absent = rng.random() < 0.13 or not scene.shapes
    phrase = draw_absent(rng, scene) if absent else draw_present(rng, scene)
    if absent and not scene.shapes and rng.random() < 0.5:
        phrase = Phrase()
    if phrase is None:
        return None
    found = phrase.find(scene)
    text = _say(rng, WAYS["count"], p=phrase.words(rng, plural=True))
    return Question("count", text, str(len(found)), _step(phrase, found))


def _singled_out(rng: random.Random, scene: Scene, by: str) -> tuple[int, Phrase] | None:
    """A shape that its ``by`` ("kind" or "colour"), perhaps with its style, tells from all others."""
    options = [
        (i, Phrase(**{name: getattr(s, name) for name in (by, *more)}))
        for more in ((), ("style",))
        for i, s in enumerate(scene.shapes)
    ]
    options = [(i, phrase) for i, phrase in options if phrase.find(scene) == [i]]
    return rng.choice(options) if options else None


def colour(rng: random.Random, scene: Scene) -> Question | None:
    found = _singled_out(rng, scene, "kind")
    if found is None:
        return None
    index, phrase = found
    c = rng.choice(("colour", "color"))
    text = _say(rng, WAYS["colour"], c=c, p=phrase.words(rng))
    return Question("colour", text, COLOURS[scene.shapes[index].colour], _step(phrase, [index]))


def shape(rng: random.Random, scene: Scene) -> Question | None:
    found = _singled_out(rng, scene, "colour")
    if found is None:
        return None
    index, phrase = found
    adjective = phrase.words(rng).rsplit(" ", 1)[0]
    text = _say(rng, WAYS["shape"], p=phrase.words(rng), a=adjective)
    return Question("shape", text, SHAPES[scene.shapes[index].kind], _step(phrase, [index]))


def presence(rng: random.Random, scene: Scene) -> Question | None:
    u = rng.random()
    if u < 0.04:
        text = _say(rng, "Is the {picture} empty?|Is this {picture} empty?")
        steps = (("shapes", tuple(range(len(scene.shapes)))),)
        return Question("presence", text, "no" if scene.shapes else "yes", steps)
    if u < 0.09:
        noun = rng.choice(FOREIGN_NOUNS)
        text = _say(rng, WAYS["presence"], one=phrases.with_article(noun), many=noun + "s")
        return Question("presence", text, "no", ((noun, ()),))
    phrase = draw_absent(rng, scene) if u < 0.55 else draw_present(rng, scene)
    if phrase is None:
        return None
    one, many = phrases.with_article(phrase.words(rng)), phrase.words(rng, plural=True)
    text, found = _say(rng, WAYS["presence"], one=one, many=many), phrase.find(scene)
    return Question("presence", text, "yes" if found else "no", _step(phrase, found))


# Words, axis and sign.
_DIRECTIONS: tuple[tuple[str, int, int], ...] = (
    ("left of", 0, -1), ("to the left of", 0, -1), ("right of", 0, 1), ("to the right of", 0, 1),
    ("above", 1, -1), ("below", 1, 1), ("under", 1, 1),
)  # fmt: skip


def _lead(scene: Scene, a: int, b: int, axis: int) -> float:
    """How far centre a lies beyond centre b along the axis, as a share of the side."""
    side = (scene.width, scene.height)[axis]
    return (scene.shapes[a].centre[axis] - scene.shapes[b].centre[axis]) / side


def relation(rng: random.Random, scene: Scene) -> Question | None:
    """Is A left of B?"""
    if len(scene.shapes) < 2:
        return None
    a, b = rng.sample(range(len(scene.shapes)), 2)
    first, second = refer(rng, scene, a), refer(rng, scene, b)
    direction, axis, sign = rng.choice(_DIRECTIONS)
    lead = _lead(scene, a, b, axis)
    if first is None or second is None or abs(lead) < RELATION_GAP:
        return None
    text = _say(rng, WAYS["relation"], a=first.words(rng), b=second.words(rng), d=direction)
    answer = "yes" if lead * sign > 0 else "no"
    return Question("relation", text, answer, _step(first, [a]) + _step(second, [b]))


def neighbour(rng: random.Random, scene: Scene) -> Question | None:
    """What is left of B? Asked only where one object is, or none."""
    order = list(range(len(scene.shapes)))
    rng.shuffle(order)
    for b in order:
        direction, axis, sign = rng.choice(_DIRECTIONS)
        phrase = refer(rng, scene, b)
        leads = {i: _lead(scene, i, b, axis) * sign for i in order if i != b}
        beyond = [i for i, lead in leads.items() if lead > 0]
        unclear = any(abs(lead) < RELATION_GAP for lead in leads.values())
        if phrase is None or unclear or len(beyond) > 1 or not leads:
            continue
        answer = name_of(scene.shapes[beyond[0]]) if beyond else "nothing"
        text = _say(rng, WAYS["neighbour"], d=direction, b=phrase.words(rng), n=_noun(rng))
        return Question("relation", text, answer, (*_step(phrase, [b]), (answer, tuple(beyond))))
    return None


_EXTREMES: tuple[tuple[str, int, int], ...] = (
    ("leftmost", 0, -1), ("furthest left", 0, -1), ("rightmost", 0, 1), ("furthest right", 0, 1),
    ("topmost", 1, -1), ("highest", 1, -1), ("bottommost", 1, 1), ("lowest", 1, 1),
)  # fmt: skip


def _said_of(shape: Shape, wanted: str) -> str:
    """The name, colour or shape of an object."""
    return {"colour": COLOURS[shape.colour], "shape": SHAPES[shape.kind]}.get(
        wanted, name_of(shape)
    )


def _about_one(rng: random.Random, scene: Scene, kind: str, index: int, word: str) -> Question:
    """Ask for the name, colour or shape of the object that a superlative means."""
    found = scene.shapes[index]
    wanted = rng.choice(("name", "name", "colour", "shape"))
    c, n = rng.choice(("colour", "color")), _noun(rng)
    wanted = "furthest" if word.startswith("furthest") else wanted
    text = _say(rng, WAYS[f"extreme {wanted}"], w=word, n=n, c=c)
    return Question(kind, text, _said_of(found, wanted), ((name_of(found), (index,)),))


def extreme(rng: random.Random, scene: Scene) -> Question | None:
    if len(scene.shapes) < 2:
        return None
    word, axis, sign = rng.choice(_EXTREMES)
    side = (scene.width, scene.height)[axis]
    ranked = sorted(range(len(scene.shapes)), key=lambda i: -sign * scene.shapes[i].centre[axis])
    first, second = (scene.shapes[i].centre[axis] for i in ranked[:2])
    if abs(first - second) < EDGE_GAP * side:
        return None
    return _about_one(rng, scene, "position", ranked[0], word)


def _clearly_larger(scene: Scene, a: int, b: int) -> bool:
    """Larger by the box and by the area alike."""
    first, second = scene.shapes[a], scene.shapes[b]
    ratios = first.extent / second.extent, first.area / second.area
    return min(ratios) > MIN_SIZE_RATIO


def size(rng: random.Random, scene: Scene) -> Question | None:
    """The largest or smallest object."""
    if len(scene.shapes) < 2:
        return None
    largest = rng.random() < 0.5
    best, *others = sorted(
        range(len(scene.shapes)), key=lambda i: scene.shapes[i].extent, reverse=largest
    )
    if not all(_clearly_larger(scene, *((best, i) if largest else (i, best))) for i in others):
        return None
    word = rng.choice(("largest", "biggest") if largest else ("smallest",))
    return _about_one(rng, scene, "size", best, word)


def compare(rng: random.Random, scene: Scene) -> Question | None:
    """Is A bigger than B?"""
    if len(scene.shapes) < 2:
        return None
    a, b = rng.sample(range(len(scene.shapes)), 2)
    first, second = refer(rng, scene, a), refer(rng, scene, b)
    larger = _clearly_larger(scene, a, b)
    if first is None or second is None or not (larger or _clearly_larger(scene, b, a)):
        return None
    word = rng.choice(("bigger", "larger", "smaller"))
    ways = "Is the {a} {w} than the {b}?"
    text = _say(rng, ways, a=first.words(rng), b=second.words(rng), w=word)
    answer = "yes" if larger == (word != "smaller") else "no"
    return Question("size", text, answer, _step(first, [a]) + _step(second, [b]))


def style(rng: random.Random, scene: Scene) -> Question | None:
    if not scene.shapes:
        return None
    index = rng.randrange(len(scene.shapes))
    found = scene.shapes[index]
    phrase = Phrase(found.kind, found.colour)
    if phrase.find(scene) != [index]:
        return None
    steps = _step(phrase, [index])
    if rng.random() < 0.4:
        text = _say(rng, WAYS["style"], p=phrase.words(rng))
        return Question("style", text, STYLES[found.style], steps)
    asked = found.style if rng.random() < 0.5 else rng.randrange(3)
    ways = "Is the {p} {s}?"
    text = _say(rng, ways, p=phrase.words(rng), s=rng.choice(STYLE_WORDS[asked]))
    return Question("style", text, "yes" if asked == found.style else "no", steps)


def place(rng: random.Random, scene: Scene) -> Question | None:
    """Where is A? Asked only well away from the lines between the thirds."""
    if not scene.shapes:
        return None
    index = rng.randrange(len(scene.shapes))
    x, y = scene.shapes[index].centre
    shares = (x / scene.width, y / scene.height)
    phrase = refer(rng, scene, index)
    if phrase is None or any(abs(s - line) < PLACE_GAP for s in shares for line in (1 / 3, 2 / 3)):
        return None
    text = _say(rng, WAYS["place"], p=phrase.words(rng))
    return Question("place", text, place_of(scene, scene.shapes[index]), _step(phrase, [index]))


def listing(rng: random.Random, scene: Scene) -> Question:
    everything = ("shapes", tuple(range(len(scene.shapes))))
    return Question("listing", _say(rng, WAYS["listing"]), short_caption(scene), (everything,))


def pointed(rng: random.Random, scene: Scene) -> Question | None:
    """What is this? with a spatial reference to one object."""
    if not scene.shapes:
        return None
    index = rng.randrange(len(scene.shapes))
    found, sides = scene.shapes[index], (scene.width, scene.height)
    place: tuple[float, ...] = found.anchor if rng.random() < 0.6 else found.box
    ref = tuple(v / sides[i % 2] for i, v in enumerate(place))
    wanted = rng.choice(("name", "name", "colour", "shape"))
    answer = _said_of(found, wanted)
    text = _say(rng, WAYS[f"{wanted} here"])
    return Question("reference", text, answer, ((name_of(found), (index,)),), (ref,))


MAKERS: tuple[tuple[Maker, int], ...] = (
    (count, 26), (colour, 9), (shape, 8), (presence, 13), (relation, 9), (neighbour, 7), (extreme, 8),
    (size, 7), (compare, 5), (style, 4), (place, 3), (listing, 3), (pointed, 4),
)  # fmt: skip
_WEIGHTS = [weight for _, weight in MAKERS]


def draw_question(rng: random.Random, scene: Scene) -> Question:
    """A random fair question."""
    for _ in range(30):
        question = rng.choices(MAKERS, _WEIGHTS)[0][0](rng, scene)
        if question is not None:
            return question
    return listing(rng, scene)


def as_ask(scene: Scene, question: Question, skill: str = "query") -> Ask:
    """reasoning: what the answer is about is pointed at first."""
    sides = scene.width, scene.height
    refs = tuple(tuple(v * sides[i % 2] for i, v in enumerate(ref)) for ref in question.refs)
    steps = tuple(
        (words, tuple(scene.shapes[i].anchor for i in found)) for words, found in question.steps
    )
    steps = steps if skill == "reasoning" else ()
    return Ask(skill, question.kind, question.text, question.answer, steps=steps, refs=refs)
