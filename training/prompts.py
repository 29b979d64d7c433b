"""Typed token sequences: the input and the expected output of the model for every skill.

A coordinate is id 5 with a value, and a size is id 6 with two values. All other tokens are text ids.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from kestrel_grpc.scenes.captions import LENGTHS, caption
from kestrel_grpc.scenes.paths import path_tokens
from kestrel_grpc.scenes.phrases import (
    Phrase,
    draw_absent,
    draw_present,
    object_words,
    refer,
    with_article,
)
from kestrel_grpc.scenes.questions import Question
from kestrel_grpc.scenes.scenes import Scene, Shape
from kestrel_grpc.scenes.vocabulary import FOREIGN_NOUNS
from training.tokenizer import path_token_text

EOS, ANSWER, THINK, COORD, SIZE, GROUND_START, GROUND_END = 0, 3, 4, 5, 6, 7, 9
COORD_BINS = SIZE_BINS = 1024
TOKENIZER_FILE = (
    Path(__file__).parents[1] / "kestrel_engine" / "bundled" / "kestrel_tiny" / "tokenizer.json"
)

Value = tuple[float, float]


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

    @classmethod
    def bundled(cls) -> PromptWriter:
        """kestrel-tiny's."""
        return cls.of(TOKENIZER_FILE)

    def encode(self, text: str) -> list[int]:
        return list(self._encode(text))

    @cached_property
    def templates(self) -> Templates:
        describe = self.encode("describe")
        captions = {name: [1, *describe, 2, *self.encode(name), ANSWER] for name in LENGTHS}
        skills = ("query", "detect", "point", "segment")
        return Templates(captions, {name: [1, *self.encode(name), 2] for name in skills})

    def open(
        self, skill: str, words: str, refs: tuple[tuple[float, ...], ...], opener: int
    ) -> Prompt:
        prompt = Prompt(skill)
        prompt.text(self.templates.prefix["query" if skill == "reasoning" else skill])
        for ref in refs:
            prompt.reference(ref)
        prompt.text([*self.encode(words), opener])
        prompt.begin_answer()
        return prompt

    def ask(self, question: Question) -> Prompt:
        """A question answered at once; without the answer's ids."""
        return self.open("query", question.text.strip(), question.refs, ANSWER)

    def ask_reasoning(self, question: Question) -> Prompt:
        """A question to be reasoned about; without the reasoning."""
        return self.open("reasoning", question.text.strip(), question.refs, THINK)

    def seek(self, skill: str, words: str, refs: tuple[tuple[float, ...], ...] = ()) -> Prompt:
        """Point, detect or segment; without the result."""
        return self.open(skill, words if skill == "segment" else f" {words}", refs, ANSWER)

    def open_caption(self, length: str) -> Prompt:
        prompt = Prompt("caption")
        prompt.text(self.templates.caption[length])
        prompt.begin_answer()
        return prompt

    # Complete examples, with what the model is to say.

    def query(self, question: Question) -> Prompt:
        prompt = self.ask(question)
        prompt.text([*self.encode(question.answer), EOS])
        return prompt

    def reasoning(self, question: Question, scene: Scene) -> Prompt:
        """I see [a red circle, point] and [blue stars, points]. -> answer"""
        prompt = self.ask_reasoning(question)
        prompt.text(self.encode("I see"))
        for number, (words, indices) in enumerate(question.steps):
            if number:
                prompt.text(self.encode(" and"))
            if not indices:
                prompt.text(self.encode(" nothing" if words == "nothing" else f" no {words}"))
                continue
            named = with_article(words) if len(indices) == 1 else words
            prompt.text([GROUND_START, *self.encode(f" {named}")])
            for i in indices:
                self._point(prompt, scene, scene.shapes[i])
            prompt.text([GROUND_END])
        prompt.text([*self.encode("."), ANSWER, *self.encode(question.answer), EOS])
        return prompt

    def caption(self, scene: Scene, length: str) -> Prompt:
        prompt = self.open_caption(length)
        prompt.text([*self.encode(caption(scene, length)), EOS])
        return prompt

    def point(self, scene: Scene, words: str, indices: list[int]) -> Prompt:
        prompt = self.seek("point", words)
        for i in indices:
            self._point(prompt, scene, scene.shapes[i])
        prompt.text([EOS])
        return prompt

    def detect(self, scene: Scene, words: str, indices: list[int]) -> Prompt:
        prompt = self.seek("detect", words)
        for i in indices:
            self._box(prompt, scene, scene.shapes[i])
        prompt.text([EOS])
        return prompt

    def segment(
        self, scene: Scene, words: str, index: int | None, refs: tuple[tuple[float, ...], ...] = ()
    ) -> Prompt:
        prompt = self.seek("segment", words, refs)
        if index is not None:
            self._box(prompt, scene, scene.shapes[index])
            for token in path_tokens(scene.shapes[index]):
                prompt.text(self.encode(path_token_text(token)))
        prompt.text([EOS])
        return prompt

    @staticmethod
    def _point(prompt: Prompt, scene: Scene, shape: Shape) -> None:
        x, y = shape.anchor
        prompt.coord(x / scene.width)
        prompt.coord(y / scene.height)

    @staticmethod
    def _box(prompt: Prompt, scene: Scene, shape: Shape) -> None:
        x0, y0, x1, y1 = shape.box
        prompt.reference((x0 / scene.width, y0 / scene.height, x1 / scene.width, y1 / scene.height))


def draw_target(rng: random.Random, scene: Scene, held_out: bool = False) -> tuple[str, list[int]]:
    """Words for point and detect, and the shapes they mean; about one in six asks for what is not there."""
    u = rng.random()
    if u < 0.03:
        noun = rng.choice(FOREIGN_NOUNS)
        return (noun if rng.random() < 0.6 else noun + "s"), []
    phrase = draw_absent(rng, scene, held_out) if u < 0.16 else None
    phrase = phrase or draw_present(rng, scene) or draw_absent(rng, scene, held_out) or Phrase()
    return object_words(rng, phrase), phrase.find(scene)


def draw_single(
    rng: random.Random, scene: Scene, held_out: bool = False
) -> tuple[str, int | None, tuple[tuple[float, ...], ...]]:
    """Words for segment, the one shape they mean (None: absent) and perhaps a reference to choose it by."""
    u = rng.random()
    if not scene.shapes or u < 0.15:
        phrase = draw_absent(rng, scene, held_out)
        words = (
            rng.choice(FOREIGN_NOUNS) if phrase is None or u < 0.03 else object_words(rng, phrase)
        )
        return words, None, ()
    index = rng.randrange(len(scene.shapes))
    shape = scene.shapes[index]
    if u < 0.22:
        x, y = shape.anchor
        ref = (x / scene.width, y / scene.height)
        return Phrase(kind=shape.kind).words(rng), index, (ref,)
    phrase = refer(rng, scene, index)
    if phrase is not None:
        return object_words(rng, phrase), index, ()
    phrase = Phrase(shape.kind, shape.colour)
    return object_words(rng, phrase), phrase.find(scene)[0], ()
