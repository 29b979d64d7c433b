"""The pictures of ``demo`` and of the server's web page, and what to ask about each.

kestrel-small saw none of them in training. ``python -m training.samples`` drew them, except the shapes, which are scene
0 of the evaluation set (training/scenes/evaluation_set.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from kestrel_client.geometry import Box, Point

_LIST = Path(__file__).with_name("samples.json")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. ``at``: the point that the question is about. ``answer``: the right answer of a query or caption.
    ``boxes``: the objects of point, detect and segment.
    """

    skill: str
    text: str
    answer: str = ""
    at: Point | None = None
    boxes: tuple[Box, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    file: Path
    asks: tuple[Ask, ...]


def samples() -> list[Sample]:
    """The pictures in the order of ``demo``."""
    return [
        Sample(
            name=entry["name"],
            file=_LIST.parent / entry["file"],
            asks=tuple(
                Ask(
                    skill=ask["skill"],
                    text=ask["text"],
                    answer=ask.get("answer", ""),
                    at=Point(*ask["at"]) if "at" in ask else None,
                    boxes=tuple(Box(*box) for box in ask.get("boxes", ())),
                )
                for ask in entry["asks"]
            ),
        )
        for entry in json.loads(_LIST.read_text(encoding="utf-8"))
    ]
