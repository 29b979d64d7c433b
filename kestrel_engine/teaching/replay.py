"""Replay: the base model's own answers about the training images, which keep what it knew before.

The prompts are made from the base model's short descriptions: their phrases name the objects that it knows. For each
image there are questions, points and boxes about phrases of its description and of another image's, which are mostly
absent. Descriptions, and answers to questions about the whole image, are replayed of images without a labelled object:
in those of others, the base model gives the new objects names of old ones, and the adapter would learn both. Each image
has the points or boxes of a general name besides: of a noun of its phrases, or of all objects. A phrase that finds a
labelled object is left out, because the base model takes the object for something else. The questions are of many
forms: a form that is not replayed is soon answered with what is taught.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..engine import InferenceEngine
from ..types.events import EngineResult
from ..types.requests import Edges
from .data.examples import (
    BoxExample,
    CaptionExample,
    Example,
    PointExample,
    QuestionExample,
    TaughtImage,
)
from .judging import NEAR, ask, boxes_of, points_of

LONGER_EVERY = 4
"""Longer descriptions, which take long to make, are replayed of at most one of about so many images."""
LEAST_DESCRIBED = 0.1
"""If fewer of the images are without a labelled object, descriptions of all images are replayed."""
TOGETHER = 16
"""Images whose prompts follow one another, so that the engine still holds their embeddings."""
GENERAL_OBJECTS = ("object", "objects", "thing")
MOST_ANSWER_IDS = 128
"""Longer answers are not replayed: they cost more than they keep."""
QUESTIONS_OF_ONE = (
    "Is there {a_phrase}?",
    "How many {phrase} are there?",
    "Where is the {phrase}?",
    "What colour is the {noun}?",
    "What color is the {noun}?",
    "What is this {noun} like?",
)
QUESTIONS_OF_TWO = (
    "Is the {phrase} to the left of the {other}?",
    "Which is bigger, the {phrase} or the {other}?",
)
GENERAL_QUESTIONS = (
    "What is in this picture?",
    "Which objects are there?",
    "How many objects are there?",
    "Is the picture empty?",
    "What is the largest object?",
    "What is the leftmost object?",
    "What is at the top?",
    "Which colours are there?",
)
_BREAKS = frozenset(
    "a an the and or of in on at with to from by for near is are was has have its their there this that it picture "
    "image photo photograph shows showing show several some many no one two three four five six seven eight nine ten "
    "eleven twelve left right top bottom middle".split()
)
_WORD = re.compile(r"[^\W\d_][\w'-]*|[^\w\s]|\d+")


@dataclass(frozen=True, slots=True)
class ReplayPrompt:
    """``phrases``: what a question is about."""

    example: Example
    phrases: tuple[str, ...] = ()


async def replay(
    engine: InferenceEngine,
    images: Sequence[TaughtImage],
    seed: int = 0,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[TaughtImage]:
    """Returns the base model's answers about each of ``images``. Raises as `ask`."""
    rng = random.Random(seed)
    described = _described(images)
    seen: dict[str, None] = {}
    found: list[TaughtImage] = []
    for begin in range(0, len(images), TOGETHER):
        some = images[begin : begin + TOGETHER]
        short = await ask(engine, [(image.path, CaptionExample("short", ())) for image in some])
        own = [phrases_of(str(result.output["caption"])) for result in short]
        seen |= dict.fromkeys(phrase for phrases in own for phrase in phrases)
        questions = [
            (image, prompt)
            for index, (image, phrases) in enumerate(zip(some, own, strict=True))
            for prompt in _prompts(
                rng, phrases, list(seen), begin + index, described.get(image.path)
            )
        ]
        results = await ask(engine, [(image.path, prompt.example) for image, prompt in questions])
        answers: dict[Path, list[tuple[ReplayPrompt, EngineResult]]] = {
            image.path: [] for image in some
        }
        for image, result in zip(some, short, strict=True):
            if image.path in described:
                answers[image.path].append((ReplayPrompt(CaptionExample("short", ())), result))
        for (image, prompt), result in zip(questions, results, strict=True):
            answers[image.path].append((prompt, result))
        found += [TaughtImage(image.path, _kept(answers[image.path], image)) for image in some]
        if progress is not None:
            progress(len(found), len(images), "images answered for the replay")
    return found


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
    rng: random.Random,
    own: Sequence[str],
    every: Sequence[str],
    index: int,
    lengths: Sequence[str] | None,
) -> list[ReplayPrompt]:
    """The prompts about one image, besides its short description. The base model gives the objects and answers.
    ``lengths``: of its longer descriptions; None if it is not to be described."""
    prompts = []
    if lengths is not None:
        prompts.append(ReplayPrompt(QuestionExample(rng.choice(GENERAL_QUESTIONS), "")))
        prompts += [ReplayPrompt(CaptionExample(length, ())) for length in lengths]
    nouns = list(dict.fromkeys(phrase.split()[-1] for phrase in own))
    name = rng.choice((*GENERAL_OBJECTS, *nouns))
    prompts.append(ReplayPrompt(BoxExample(name, ()) if index % 3 == 0 else PointExample(name, ())))
    others = [phrase for phrase in rng.sample(every, min(4, len(every))) if phrase not in own]
    phrases = (*rng.sample(own, min(2, len(own))), *others[:1])
    questions = QUESTIONS_OF_ONE + (QUESTIONS_OF_TWO if len(phrases) > 1 else ())
    for place, phrase in enumerate(phrases):
        located = PointExample(phrase, ()) if (index + place) % 2 else BoxExample(phrase, ())
        other = phrases[place - 1]
        question = rng.choice(questions).format(
            phrase=phrase,
            a_phrase=f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}",
            noun=phrase.split()[-1],
            other=other,
        )
        prompts += [
            ReplayPrompt(located),
            ReplayPrompt(QuestionExample(question, ""), (phrase, other)),
        ]
    return prompts


def _kept(
    answers: Sequence[tuple[ReplayPrompt, EngineResult]], image: TaughtImage
) -> tuple[Example, ...]:
    """The examples to replay about an image: none about a phrase that finds a labelled object."""
    answered = [(prompt, _answered(prompt.example, result, image)) for prompt, result in answers]
    mistaken = {
        prompt.example.object
        for prompt, example in answered
        if example is None and isinstance(prompt.example, PointExample | BoxExample)
    }
    return tuple(
        example
        for prompt, example in answered
        if example is not None and mistaken.isdisjoint(prompt.phrases)
    )


def _answered(example: Example, result: EngineResult, image: TaughtImage) -> Example | None:
    """The example with the base model's answer; None if it is not to be replayed."""
    if result.finish_reason != "stop" or len(result.token_ids) > MOST_ANSWER_IDS:
        return None
    match example:
        case QuestionExample(question=question):
            return QuestionExample(question, str(result.output["answer"]), result.token_ids)
        case CaptionExample(length=length):
            return CaptionExample(length, result.token_ids)
        case PointExample(object=name):
            points = tuple(points_of(result.output))
            return None if _mistakes(name, points, image) else PointExample(name, points)
        case BoxExample(object=name):
            boxes = tuple(boxes_of(result.output))
            centres = [((x0 + x1) / 2, (y0 + y1) / 2) for x0, y0, x1, y1 in boxes]
            return None if _mistakes(name, centres, image) else BoxExample(name, boxes)


def _mistakes(name: str, points: Sequence[tuple[float, float]], image: TaughtImage) -> bool:
    """Whether one of ``points`` lies on a labelled object of the image, and ``name`` does not mean all objects."""
    if name in GENERAL_OBJECTS:
        return False
    labelled = _labelled(image)
    return any(x0 <= x <= x1 and y0 <= y <= y1 for x, y in points for x0, y0, x1, y1 in labelled)


def _labelled(image: TaughtImage) -> list[Edges]:
    labelled: list[Edges] = []
    for example in image.examples:
        if isinstance(example, BoxExample):
            labelled += example.boxes
        elif isinstance(example, PointExample):
            labelled += [(x - NEAR, y - NEAR, x + NEAR, y + NEAR) for x, y in example.points]
    return labelled


def _described(images: Sequence[TaughtImage]) -> dict[Path, tuple[str, ...]]:
    """The images whose descriptions are replayed, and the lengths of their longer descriptions."""
    chosen = [image.path for image in images if not _labelled(image)]
    if len(chosen) < LEAST_DESCRIBED * len(images):
        chosen = [image.path for image in images]
    every = max(1, round(LONGER_EVERY * len(chosen) / max(1, len(images))))
    return {
        path: ("normal", "long") if index % every == 0 else () for index, path in enumerate(chosen)
    }
