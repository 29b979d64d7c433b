"""Lessons for small models, whose vocabularies have 60 ids."""

from kestrel_engine.teaching.data.lessons import EndTarget, Lesson, WordTarget
from kestrel_engine.types.requests import Coord, Size


def spoken(prompt: list[int], answer: list[int]) -> Lesson:
    """An answer of words and its end."""
    lesson = Lesson([*prompt, *answer])
    following = [*answer, 0]
    lesson.words = [WordTarget(len(prompt) - 1 + i, each) for i, each in enumerate(following)]
    return lesson


def boxed(prompt: list[int]) -> Lesson:
    """One box and the end."""
    at = len(prompt) - 1
    lesson = Lesson([*prompt, Coord(0.25), Coord(0.5), Size(0.125, 0.25)])
    lesson.ends = [EndTarget(at, False, False), EndTarget(at + 3, True, True)]
    return lesson
