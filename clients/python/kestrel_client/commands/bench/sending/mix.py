"""Mix: what the requests ask. Each request's skill, question or object, and image are drawn at random."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kestrel_client import AsyncKestrelClient

from .images import Image

SKILLS = ("query", "caption", "point", "detect", "segment")


@dataclass(frozen=True)
class Ask:
    """One request. ``skill``: the method of the client. ``words``: its question, length or object."""

    skill: str
    words: str
    image: Image

    def stream(self, client: AsyncKestrelClient, options: Mapping[str, Any]) -> Any:
        """An AsyncStream of the client."""
        return getattr(client, f"stream_{self.skill}")(self.image, self.words, **options)

    async def unary(self, client: AsyncKestrelClient, options: Mapping[str, Any]) -> Any:
        """Returns the result."""
        return await getattr(client, self.skill)(self.image, self.words, **options)


@dataclass(frozen=True)
class Mix:
    """``weights``: how often each skill is asked, relative to the others."""

    weights: Mapping[str, float]
    questions: Sequence[str]
    objects: Sequence[str]
    lengths: Sequence[str] = ("short",)
    _words: dict[str, Sequence[str]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        words = {"query": self.questions, "caption": self.lengths}
        object.__setattr__(self, "_words", {s: words.get(s, self.objects) for s in self.weights})

    def draw(self, rng: random.Random) -> tuple[str, str]:
        """Returns a skill and its words."""
        (skill,) = rng.choices(list(self.weights), list(self.weights.values()))
        return skill, rng.choice(self._words[skill])
