"""What is known of each model's release: checksums, ids of its tokenizer, answers, speed.

The facts come from public repositories. Nobody of this project has run these models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint.catalog import BUNDLED, KNOWN

TOLERANCE = 4 / 1024
"""Largest allowed difference of a coordinate. Coordinates are multiples of 1/1024. Half-precision dtypes and other JPEG
decoders may shift one by a few of these steps."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a known answer: bundled at ``path``, drawn by ``draw`` (RGB [H, W, 3] uint8), or the user's file,
    with the checksum ``sha256`` if it is known. ``described``: what it is."""

    described: str
    path: Path | None = None
    draw: Callable[[], np.ndarray] | None = None
    sha256: str | None = None

    @property
    def is_at_hand(self) -> bool:
        return self.path is not None or self.draw is not None


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """The answer of ``skill``. What is not set is not compared.

    ``output``: the answer's parts, whose numbers may differ by TOLERANCE. ``token_ids``: all ids of the answer, after
    those of its reasoning and without the id between them. ``grounds``: the points of each ground of its reasoning.
    ``says``: words in its text. ``at_least``: number of objects. ``is_sure``: whether another answer means a fault.
    """

    skill: str
    arguments: Mapping[str, Any]
    picture: Picture | None = None
    output: Mapping[str, Any] = field(default_factory=dict)
    token_ids: Sequence[int] = ()
    grounds: int = 0
    says: str = ""
    at_least: int = 0
    is_sure: bool = True

    @property
    def request(self) -> str:
        about = next(iter(self.arguments.values()), "")
        how = " with reasoning" if self.arguments.get("reasoning") else ""
        return f"{self.skill} {about!r}{how}"


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """``ids``: text to its ids. ``lengths``: text to the number of its ids. ``source``: where the file is."""

    vocabulary: int
    ids: Mapping[str, list[int]]
    lengths: Mapping[str, int]
    source: str


@dataclass(frozen=True, slots=True)
class Release:
    """``speed``: by card and dtype, the milliseconds to the first token about a new picture, and for each further one,
    of one caller. ``stored``: the number of stored tensors and their dtype, if they are known."""

    answers: tuple[KnownAnswer, ...]
    tokenizer: TokenizerFacts | None = None
    speed: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    stored: tuple[int, str] | None = None


def _square_and_circle() -> np.ndarray:
    """A red square on the left of a blue circle, on white."""
    pixels = np.full((256, 384, 3), 255, np.uint8)
    pixels[78:178, 46:146] = (255, 0, 0)
    rows, columns = np.ogrid[:256, :384]
    pixels[(rows - 128) ** 2 + (columns - 288) ** 2 <= 50**2] = (0, 0, 255)
    return pixels


def _starmie() -> TokenizerFacts:
    text = Path(__file__).with_name("released_ids.json").read_text(encoding="utf-8")
    ids = {text: [number] for text, number in json.loads(text).items()}
    lengths = {"What shapes are in the image, and what color is each shape?": 10}
    return TokenizerFacts(51200, ids | {"detect": [7235, 476]}, lengths, "moondream/starmie-v1")


STARMIE = _starmie()
"""The tokenizer of all released models. It takes a word with the blank before it, and often several words, as one
id."""


def _read() -> dict[str, Release]:
    text = Path(__file__).with_name("releases.json").read_text(encoding="utf-8")
    known = json.loads(text)
    pictures = {name: _picture(**fields) for name, fields in known["pictures"].items()}
    return {model: _release(pictures, **fields) for model, fields in known["releases"].items()}


def _picture(
    described: str, bundled: str | None = None, drawn: bool = False, sha256: str | None = None
) -> Picture:
    path = None if bundled is None else BUNDLED / bundled
    return Picture(described, path, _square_and_circle if drawn else None, sha256)


def _release(
    pictures: Mapping[str, Picture],
    answers: list[dict[str, Any]],
    tokenizer: str | None = None,
    speed: Sequence[tuple[str, str, float, float]] = (),
    stored: list[Any] | None = None,
) -> Release:
    return Release(
        tuple(
            KnownAnswer(**{**fields, "picture": pictures.get(fields.get("picture", ""))})
            for fields in answers
        ),
        STARMIE if tokenizer == "starmie" else None,
        {(card, dtype): (first_ms, next_ms) for card, dtype, first_ms, next_ms in speed},
        None if stored is None else (stored[0], stored[1]),
    )


RELEASES = _read()
"""By model name. The stop sign's answers are those of Moondream 3's own code (revision 1dae073c), the sums, gaze and
bottles those of orchard-py's tests, the drawing's those of one user of Moondream 2, whose picture was not quite the
same."""


def release_of(model: str) -> tuple[str, Release | None]:
    """The name of a model without revision and file, and its release. A released model may have its hub id."""
    name = model.strip().lower().partition("@")[0].partition(":")[0]
    for known in KNOWN.values():
        if known.hub is not None and known.hub.repo.lower() == name:
            name = known.name
    return name, RELEASES.get(name)
