"""Lessons: the tokens of an example, exactly as a skill builds its prompt, and what is to follow which token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...skills.base import SkillContext
from ...skills.registry import SkillRegistry
from ...types.requests import Coord, ImagePlace, Size, Token
from .examples import Answered, Boxed, Captioned, Example, Pointed

_SKILLS = SkillRegistry.default()


@dataclass(frozen=True, slots=True)
class WordTarget:
    """The id ``id`` follows the token at ``at``."""

    at: int
    id: int


@dataclass(frozen=True, slots=True)
class EndTarget:
    """After the token at ``at``, the model decides between the end and one more object. ``is_end``: the right decision.
    ``is_pair``: it decides between the end token and the coordinate token only, otherwise any other token than the end
    means one more object (skills/objects/locate.py)."""

    at: int
    is_end: bool
    is_pair: bool


@dataclass(frozen=True, slots=True)
class CoordTarget:
    """The coordinate ``value`` is read after the token at ``at``."""

    at: int
    value: float


@dataclass(frozen=True, slots=True)
class SizeTarget:
    """The size is read after the token at ``at``."""

    at: int
    width: float
    height: float


@dataclass(slots=True)
class Lesson:
    """``tokens`` follow BOS and the image. ``weight``: multiplies the lesson's losses."""

    tokens: list[Token]
    weight: float = 1.0
    words: list[WordTarget] = field(default_factory=list)
    ends: list[EndTarget] = field(default_factory=list)
    coords: list[CoordTarget] = field(default_factory=list)
    sizes: list[SizeTarget] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)


def write(example: Example, context: SkillContext, weight: float = 1.0) -> Lesson:
    """Returns the lesson of an example. Raises InvalidRequest for a text that the skill refuses."""
    match example:
        case Answered(question, answer, ids):
            lesson = _prompt("query", {"question": question}, context, weight)
            _say(lesson, context.codec.encode(answer) if ids is None else ids, context)
        case Captioned(length, ids):
            lesson = _prompt("caption", {"length": length}, context, weight)
            _say(lesson, ids, context)
        case Pointed(name, points):
            lesson = _prompt("point", {"object": name}, context, weight)
            for x, y in points:
                _object(lesson, x, y, None, context)
            _end(lesson, context, is_end=True)
        case Boxed(name, boxes):
            lesson = _prompt("detect", {"object": name}, context, weight)
            for x0, y0, x1, y1 in boxes:
                _object(lesson, (x0 + x1) / 2, (y0 + y1) / 2, Size(x1 - x0, y1 - y0), context)
            _end(lesson, context, is_end=True)
    return lesson


def _prompt(
    skill: str, arguments: Mapping[str, Any], context: SkillContext, weight: float
) -> Lesson:
    suffix = _SKILLS.get(skill).build(arguments, {}, context).prompt_suffix
    tokens = [token for token in suffix if not isinstance(token, ImagePlace)]
    assert len(tokens) == len(suffix), "an example is about one image"
    return Lesson(tokens, weight)


def _say(lesson: Lesson, ids: list[int] | tuple[int, ...], context: SkillContext) -> None:
    """Appends a text and its end. The end is not fed back."""
    for token in ids:
        lesson.words.append(WordTarget(len(lesson.tokens) - 1, token))
        lesson.tokens.append(token)
    lesson.words.append(WordTarget(len(lesson.tokens) - 1, context.model.ids.eos_id))


def _object(lesson: Lesson, x: float, y: float, size: Size | None, context: SkillContext) -> None:
    _end(lesson, context, is_end=False)
    for value in (x, y):
        lesson.coords.append(CoordTarget(len(lesson.tokens) - 1, value))
        lesson.tokens.append(Coord(value))
    if size is not None:
        lesson.sizes.append(SizeTarget(len(lesson.tokens) - 1, size.width, size.height))
        lesson.tokens.append(size)


def _end(lesson: Lesson, context: SkillContext, *, is_end: bool) -> None:
    is_first = not lesson.ends
    is_pair = not is_first and context.model.family != "moondream2"
    lesson.ends.append(EndTarget(len(lesson.tokens) - 1, is_end, is_pair))
