"""Requests as token sequences: the input and the expected output of the model for every skill.

A coordinate is id 5 with a value, and a size is id 6 with two values. All other tokens are text ids. A reasoning is the
steps, each between ids 7 and 9 with its points, then id 3 and the answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from kestrel_engine.types.model_config import Templates, parse_model_config
from training.domains.picture import Ask, Point
from training.kestrel_small import FOLDER

EOS, ANSWER, COORD, SIZE, GROUND_START, GROUND_END = 0, 3, 5, 6, 7, 9


def path_token_text(token: str) -> str:
    """How a path token is written in the vocabulary: a space before all but the opening command."""
    return token if token == "M" else f" {token}"


@dataclass
class Prompt:
    """One conversation after the image. ``values`` has an entry per id: coordinates (v, 0), sizes (w, h).

    start: index of the first id that the model must produce itself.
    """

    ids: list[int] = field(default_factory=list)
    values: list[tuple[float, float]] = field(default_factory=list)
    start: int = 0

    def text(self, ids: list[int]) -> None:
        self.ids += ids
        self.values += [(0.0, 0.0)] * len(ids)

    def coord(self, value: float) -> None:
        self.ids.append(COORD)
        self.values.append((value, 0.0))

    def reference(self, ref: tuple[float, ...]) -> None:
        """A spatial reference: a point as two coordinates, a box as centre and size."""
        if len(ref) == 2:
            self.coord(ref[0])
            self.coord(ref[1])
        else:
            x0, y0, x1, y1 = ref
            self.coord((x0 + x1) / 2)
            self.coord((y0 + y1) / 2)
            self.ids.append(SIZE)
            self.values.append((x1 - x0, y1 - y0))


class PromptWriter:
    """Writes prompts with a model's tokenizer and templates; encodings are remembered."""

    def __init__(self, tokenizer: Tokenizer, templates: Templates) -> None:
        self.tokenizer, self._templates = tokenizer, templates
        self._encode = lru_cache(maxsize=200_000)(lambda text: tuple(tokenizer.encode(text).ids))

    @classmethod
    def of(cls, folder: Path) -> PromptWriter:
        """Of the model in this folder."""
        config = parse_model_config(json.loads((folder / "config.json").read_text("utf-8")))
        return cls(Tokenizer.from_file(str(folder / "tokenizer.json")), config.templates)

    def encode(self, text: str) -> list[int]:
        return list(self._encode(text))

    def open(self, skill: str, words: str, refs: tuple[tuple[float, ...], ...] = ()) -> Prompt:
        """A request without its result. words: the question, the object, or a caption's length."""
        prompt = Prompt()
        if skill == "caption":
            prompt.text(list(self._templates.caption[words]))
        else:
            asks = "query" if skill == "reasoning" else skill
            prompt.text(list(getattr(self._templates, f"{asks}_prefix")))
            for ref in refs:
                prompt.reference(ref)
            # As the engine's grammar has them.
            words = f" {words}" if skill in ("point", "detect") else words.strip()
            prompt.text(self.encode(words))
            thinks = skill == "reasoning"
            t = self._templates
            prompt.text(list(t.query_reasoning_suffix if thinks else t.query_suffix))
        prompt.start = len(prompt.ids)
        return prompt


@cache
def writer() -> PromptWriter:
    return PromptWriter.of(FOLDER)


def opening(ask: Ask, width: int, height: int) -> Prompt:
    """The request without its result."""
    refs = tuple(tuple(v / (width, height)[i % 2] for i, v in enumerate(ref)) for ref in ask.refs)
    return writer().open(ask.skill, ask.text, refs)


def _points(prompt: Prompt, points: Sequence[Point], width: int, height: int) -> None:
    for x, y in points:
        prompt.coord(min(max(x / width, 0.0), 1.0))
        prompt.coord(min(max(y / height, 0.0), 1.0))


def write(ask: Ask, width: int, height: int) -> Prompt:
    """The request and its result."""
    prompt = opening(ask, width, height)
    for words, points in ask.steps:
        prompt.text([GROUND_START, *writer().encode(words)])
        _points(prompt, points, width, height)
        prompt.text([GROUND_END])
    if ask.skill == "reasoning":
        prompt.text([ANSWER])
    if ask.skill in ("query", "reasoning", "caption"):
        parts = ask.answer if ask.spelled else (ask.answer,)
        prompt.text([i for each in parts for i in writer().encode(each)])
    _points(prompt, ask.points, width, height)
    if ask.skill in ("detect", "segment"):
        for x0, y0, x1, y1 in ask.boxes:
            left, right = max(x0, 0) / width, min(x1, width) / width
            top, bottom = max(y0, 0) / height, min(y1, height) / height
            prompt.reference((left, top, right, bottom))
        for token in ask.path:
            prompt.text(writer().encode(path_token_text(token)))
    prompt.text([EOS])
    return prompt
