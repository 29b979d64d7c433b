"""Mix: what the requests ask. Each request's skill, question or object, and image are drawn at random."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .sample_images import Image

SKILLS = ("query", "caption", "point", "detect", "segment")


class Ask(NamedTuple):
    """One request. ``skill``: the method of the client. ``words``: its question, length or object."""

    skill: str
    words: str
    image: Image


@dataclass(frozen=True)
class Mix:
    """``weights``: how often each skill is asked, relative to the others."""

    weights: Mapping[str, float]
    questions: Sequence[str]
    objects: Sequence[str]

    def draw(self, rng: random.Random) -> tuple[str, str]:
        """Returns a skill and its words."""
        (skill,) = rng.choices(list(self.weights), list(self.weights.values()))
        words = {"query": self.questions, "caption": ("short",)}.get(skill, self.objects)
        return skill, rng.choice(words)
