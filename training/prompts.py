"""Typed token sequences: the input and the expected output of the model for every skill.

A coordinate is id 5 with a value, and a size is id 6 with two values. All other tokens are text ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from training.scenes.captions import LENGTHS

EOS, ANSWER, COORD, SIZE = 0, 3, 5, 6
COORD_BINS = SIZE_BINS = 1024
Value = tuple[float, float]


def path_token_text(token: str) -> str:
    """How a path token is written in the vocabulary: a space before all but the opening command."""
    return token if token == "M" else f" {token}"


def coord_bin(value: float) -> float:
    """Returns the fractional bin for a coordinate, which is bin / 1024."""
    return min(max(value * COORD_BINS, 0.0), COORD_BINS - 1.0)


def size_bin(value: float) -> float:
    """Returns the fractional bin for a size, which is 2 ** (10 bin / 1023 - 10)."""
    return (math.log2(min(max(value, 1 / 1024), 1.0)) + 10) / 10 * (SIZE_BINS - 1)


@dataclass
class Prompt:
    """One conversation after the image. ``values`` has an entry per id: coordinates (v, 0), sizes (w, h).

    start: index of the first id that the model must produce itself.
    """

    skill: str
    ids: list[int] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    start: int = 0

    def text(self, ids: list[int]) -> None:
        self.ids += ids
        self.values += [(0.0, 0.0)] * len(ids)

    def coord(self, value: float) -> None:
        self.ids.append(COORD)
        self.values.append((value, 0.0))

    def size(self, width: float, height: float) -> None:
        self.ids.append(SIZE)
        self.values.append((width, height))

    def reference(self, ref: tuple[float, ...]) -> None:
        """A spatial reference: a point as two coordinates, a box as centre and size."""
        if len(ref) == 2:
            self.coord(ref[0])
            self.coord(ref[1])
        else:
            x0, y0, x1, y1 = ref
            self.coord((x0 + x1) / 2)
            self.coord((y0 + y1) / 2)
            self.size(x1 - x0, y1 - y0)

    def begin_answer(self) -> None:
        self.start = len(self.ids)


@dataclass(frozen=True)
class Templates:
    """Ids around the user's words, as config.json lists them."""

    caption: dict[str, list[int]]
    prefix: dict[str, list[int]]

    def as_config(self) -> dict[str, object]:
        skills = {name: {"prefix": ids, "suffix": [ANSWER]} for name, ids in self.prefix.items()}
        return {"caption": self.caption, **skills}


class PromptWriter:
    """Writes prompts with one tokenizer; encodings are remembered."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._encode = lru_cache(maxsize=200_000)(lambda text: tuple(tokenizer.encode(text).ids))

    @classmethod
    def of(cls, file: Path) -> PromptWriter:
        return cls(Tokenizer.from_file(str(file)))

    def encode(self, text: str) -> list[int]:
        return list(self._encode(text))

    @cached_property
    def templates(self) -> Templates:
        describe = self.encode("describe")
        captions = {name: [1, *describe, 2, *self.encode(name), ANSWER] for name in LENGTHS}
        skills = ("query", "detect", "point", "segment")
        return Templates(captions, {name: [1, *self.encode(name), 2] for name in skills})

    def open(self, skill: str, words: str, refs: tuple[tuple[float, ...], ...] = ()) -> Prompt:
        """A request without its result; words as the engine's grammar has them."""
        prompt = Prompt(skill)
        prompt.text(self.templates.prefix[skill])
        for ref in refs:
            prompt.reference(ref)
        prompt.text([*self.encode(words), ANSWER])
        prompt.begin_answer()
        return prompt

    def seek(self, skill: str, words: str, refs: tuple[tuple[float, ...], ...] = ()) -> Prompt:
        """Point, detect or segment; without the result."""
        return self.open(skill, words if skill == "segment" else f" {words}", refs)

    def open_caption(self, length: str) -> Prompt:
        prompt = Prompt("caption")
        prompt.text(self.templates.caption[length])
        prompt.begin_answer()
        return prompt
