"""What is known of each model's release: checksums, ids of its tokenizer, answers, speed.

The facts of the released Moondream models come from public repositories. Nobody of this project has run these models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint.catalog import BUNDLED

TOLERANCE = 4 / 1024
"""Largest allowed difference of a coordinate. Coordinates are multiples of 1/1024. Half-precision dtypes and other JPEG
decoders may shift one by a few of these steps."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a known answer: bundled at ``path``, drawn by ``draw`` (RGB [H, W, 3] uint8), or the user's file
    with the checksum ``sha256``. ``described``: what it is. Without any of them it is the user's picture that no
    checksum names."""

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

    ``output``: the answer's parts, whose numbers may differ by TOLERANCE. ``token_ids``: all ids of the answer.
    ``says``: words in its text. ``at_least``: number of objects. ``is_sure``: whether another answer means a fault.
    """

    skill: str
    arguments: Mapping[str, Any]
    picture: Picture | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    output: Mapping[str, Any] = field(default_factory=dict)
    token_ids: tuple[int, ...] = ()
    says: str = ""
    at_least: int = 0
    is_sure: bool = True

    @property
    def request(self) -> str:
        about = next(iter(self.arguments.values()), self.settings.get("length", ""))
        how = " with reasoning" if self.settings.get("reasoning") else ""
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

_SAMPLE = Picture("the bundled sample", path=BUNDLED / "kestrel_tiny" / "sample.jpg")
_SIGN = Picture("the stop sign among vLLM's test assets (stop_sign.jpg)")
_BOTTLES = Picture(
    "orchard-py's test asset bottles.jpg",
    sha256="0745408a16863a72ae36d6545349fd3c04a5fdd24e0b6f677f847472c7218223",
)
_DEMO = Picture(
    "Moondream's demo-1.jpg, which is orchard-py's test asset moondream.jpg",
    sha256="52bdf639be45fe501c1bb31dd13df7d4726de32bb676aa4fc84771a4b8242a21",
)
_APPLE = Picture(
    "orchard-py's test asset apple.jpg",
    sha256="f5e3893cc371e2698bae673646871c2e084ce376e1885019a67aa01a554c7af3",
)
_SUM = {
    "question": "You are a careful assistant. Answer the user's question correctly."
    "What is 17 + 26? Reply with just the number."
}
_SUM_REASONED = (
    *(489, 1222, 316, 8022, 41203, 1283, 41251, 1194, 41289, 1720, 41182, 30609, 742, 1137, 46, 225, 1194),
    *(41293, 1720, 41229, 4020, 41182, 489, 1812, 6416, 7930, 41203, 628, 41247, 868, 41649, 4020, 34, 3, 4020),
)  # fmt: skip

RELEASES: dict[str, Release] = {
    "kestrel-tiny": Release(
        (
            KnownAnswer(
                "query",
                {"question": "How many red circles are there?"},
                _SAMPLE,
                output={"answer": "3"},
            ),
            KnownAnswer(
                "detect",
                {"object": "square"},
                _SAMPLE,
                output={
                    "objects": [
                        {
                            "x_min": 0.5709505439443281,
                            "y_min": 0.07647939330932198,
                            "x_max": 0.7415494560556719,
                            "y_max": 0.30633310669067804,
                        }
                    ]
                },
            ),
        )
    ),
    "moondream2": Release(
        (
            KnownAnswer(
                "query",
                {"question": "What shapes are in the image, and what color is each shape?"},
                Picture("a drawing by this program", draw=_square_and_circle),
                output={
                    "answer": "There are two shapes in the image: a red square and a blue circle."
                },
                is_sure=False,
            ),
        ),
        STARMIE,
        {
            ("H100", "bfloat16"): (24.9, 1.2),
            ("H100", "fp8"): (22.0, 1.0),
        },
        (592, "BF16"),
    ),
    "moondream3-preview": Release(
        (
            KnownAnswer("query", _SUM, settings={"reasoning": False}, token_ids=(4020,)),
            KnownAnswer("query", _SUM, settings={"reasoning": True}, token_ids=_SUM_REASONED),
            KnownAnswer(
                "point",
                {"object": "sign"},
                _SIGN,
                output={"points": [{"x": 289 / 1024, "y": 326 / 1024}]},
            ),
            KnownAnswer(
                "detect",
                {"object": "sign"},
                _SIGN,
                output={
                    "objects": [
                        {
                            "x_min": 0.16633163392543793,
                            "y_min": 0.1345907300710678,
                            "x_max": 0.3590589910745621,
                            "y_max": 0.4200967699289322,
                        }
                    ]
                },
            ),
            KnownAnswer(
                "gaze",
                {"eye": (555 / 1024, 555 / 1024)},
                _DEMO,
                output={"gaze": {"x": 582 / 1024, "y": 358 / 1024}},
            ),
            KnownAnswer(
                "query",
                {"question": "How many bottles are shown?"},
                _BOTTLES,
                settings={"reasoning": True},
                output={"answer": "6"},
            ),
            KnownAnswer("detect", {"object": "apple"}, _APPLE, at_least=1),
            KnownAnswer("caption", {}, _APPLE, says="apple"),
        ),
        STARMIE,
        {
            ("H100", "bfloat16"): (28.2, 1.2),
            ("H100", "fp8"): (25.1, 1.1),
        },
    ),
}
"""By model name. The stop sign's answers are those of Moondream 3's own code (revision 1dae073c), the sums, gaze and
bottles those of orchard-py's tests, the drawing's those of one user of Moondream 2, whose picture was not quite the
same."""


def release_of(model: str) -> tuple[str, Release | None]:
    """The name of a model without revision and file, and its release."""
    name = model.strip().lower().partition("@")[0].partition(":")[0]
    return name, RELEASES.get(name)
