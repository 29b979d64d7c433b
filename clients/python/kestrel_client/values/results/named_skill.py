"""The result of a skill that was run by its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..._pb.kestrel.v1 import vision_service_pb2
from ...drawing.marks import Marks, labelled
from ...geometry import Box, Point
from ...images.image_forms import ImageInput
from ..struct_values import from_struct
from .base import Result, clipped, common_fields, read_finish_reason
from .text import Logprobs, read_logprobs


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SkillResult(Result):
    """The result of a skill that was run by its name. ``output``: plain values, defined by the skill."""

    skill: str
    output: dict[str, Any]
    logprobs: Logprobs | None = None
    """The log-probabilities of the text; None if they were not requested, or the skill gives none."""

    @property
    def marks(self) -> Marks:
        """Points and boxes, if the output has ``points`` or ``objects`` in the form of the model's own skills."""
        places = [place for name in ("points", "objects") for place in _listed(self.output, name)]
        points = tuple(Point(p["x"], p["y"]) for p in places if _has(p, "x", "y"))
        edges = ("x_min", "y_min", "x_max", "y_max")
        found = [(Box(*(p[edge] for edge in edges)), p) for p in places if _has(p, *edges)]
        boxes = labelled((box, self.skill, p.get("score")) for box, p in found)
        texts = (self.output.get(name) for name in ("answer", "caption"))
        text = tuple(each for each in texts if isinstance(each, str))
        return Marks(points=points, boxes=boxes, text=text)

    def __repr__(self) -> str:
        return self._short(f"{self.skill!r}, {clipped(self.output)}")


def _listed(output: dict[str, Any], name: str) -> list[Any]:
    found = output.get(name)
    return found if isinstance(found, list) else []


def _has(place: Any, *names: str) -> bool:
    return isinstance(place, dict) and all(
        isinstance(place.get(name), (int, float)) for name in names
    )


def skill_result(
    response: vision_service_pb2.RunSkillResponse, source: ImageInput | None, skill: str
) -> SkillResult:
    output = from_struct(response.output)
    return SkillResult(
        skill=skill,
        output=output,
        logprobs=read_logprobs(response),
        finish_reason=read_finish_reason(response.finish_reason),
        **common_fields(response, source),
    )
