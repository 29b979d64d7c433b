"""Replay: the base model's own answers about the training images, which keep what it knew before.

The prompts are made from the base model's short descriptions: their phrases name the objects that it knows. For each
image there is a description, a question and an object of its own description, and the same about a phrase of another
image's, which is mostly absent. An example that finds a labelled object is left out, because the base model takes the
object for something else.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ..engine import InferenceEngine
from ..types.events import EngineResult
from .data.examples import Answered, Boxed, Captioned, Edges, Example, Pointed, TaughtImage
from .judging import NEAR, ask, boxes_of, points_of

LENGTHS = ("short", "short", "normal", "long")
"""Of the replayed descriptions; a long one is replayed as often as a normal one."""
MOST_ANSWER_IDS = 128
"""Longer answers are not replayed: they cost more than they keep."""
_BREAKS = frozenset(
    "a an the and or of in on at with to from by for near is are was has have its their there this that it picture "
    "image photo photograph shows showing show several some many no one two three four five six seven eight nine ten "
    "eleven twelve left right top bottom middle".split()
)
_WORD = re.compile(r"[^\W\d_][\w'-]*|[^\w\s]|\d+")


async def replay(
    engine: InferenceEngine,
    images: Sequence[TaughtImage],
    seed: int = 0,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[TaughtImage]:
    """Returns the base model's answers about each of ``images``. Raises as `ask`."""
    paths = [image.path for image in images]
    captions = await ask(engine, [(path, Captioned("short", ())) for path in paths], None, progress)
    own = [phrases_of(str(result.output["caption"])) for result in captions]
    every = sorted({phrase for phrases in own for phrase in phrases})
    rng = random.Random(seed)
    prompts: list[list[Example]] = [
        _prompts(rng, phrases, every, first=index) for index, phrases in enumerate(own)
    ]
    asked: list[tuple[Path, Example]] = [
        (path, example)
        for path, examples in zip(paths, prompts, strict=True)
        for example in examples
    ]
    results = iter(await ask(engine, asked, None, progress))
    return [
        TaughtImage(
            image.path,
            tuple(
                kept
                for example in examples
                if (kept := _answered(example, next(results), image)) is not None
            ),
        )
        for image, examples in zip(images, prompts, strict=True)
    ]


def phrases_of(caption: str) -> list[str]:
    """Returns the phrases of at most three words between articles, numbers, prepositions and marks."""
    found: list[list[str]] = [[]]
    for word in _WORD.findall(caption.lower()):
        if word in _BREAKS or not word[0].isalpha():
            found.append([])
        else:
            found[-1].append(word)
    return list(dict.fromkeys(" ".join(words) for words in found if 1 <= len(words) <= 3))


def _prompts(
    rng: random.Random, own: Sequence[str], every: Sequence[str], first: int
) -> list[Example]:
    """The prompts about one image. The objects are what the base model will say."""
    prompts: list[Example] = [Captioned(rng.choice(LENGTHS), ())]
    chosen = rng.sample(own, min(2, len(own)))
    others = [phrase for phrase in rng.sample(every, min(4, len(every))) if phrase not in own][:1]
    for index, phrase in enumerate([*chosen, *others]):
        locate = Pointed(phrase, ()) if (first + index) % 2 else Boxed(phrase, ())
        question = rng.choice(("Is there a {}?", "How many {} are there?", "Where is the {}?"))
        prompts += [locate, Answered(question.format(phrase), "")]
    prompts.append(Answered(rng.choice(("What is in the picture?", "What do you see?")), ""))
    return prompts


def _answered(example: Example, result: EngineResult, image: TaughtImage) -> Example | None:
    """The example with the base model's answer; None if it is not to be replayed."""
    if result.finish_reason != "stop" or len(result.token_ids) > MOST_ANSWER_IDS:
        return None
    match example:
        case Answered(question=question):
            return Answered(question, str(result.output["answer"]), result.token_ids)
        case Captioned(length=length):
            return Captioned(length, result.token_ids)
        case Pointed(object=name):
            points = tuple(points_of(result.output))
            return None if _meets(points, image) else Pointed(name, points)
        case Boxed(object=name):
            boxes = tuple(boxes_of(result.output))
            centres = [((x0 + x1) / 2, (y0 + y1) / 2) for x0, y0, x1, y1 in boxes]
            return None if _meets(centres, image) else Boxed(name, boxes)


def _meets(points: Sequence[tuple[float, float]], image: TaughtImage) -> bool:
    """Whether one of ``points`` lies on a labelled object of the image."""
    labelled: list[Edges] = []
    for example in image.examples:
        if isinstance(example, Boxed):
            labelled += example.boxes
        elif isinstance(example, Pointed):
            labelled += [(x - NEAR, y - NEAR, x + NEAR, y + NEAR) for x, y in example.points]
    return any(x0 <= x <= x1 and y0 <= y <= y1 for x, y in points for x0, y0, x1, y1 in labelled)
