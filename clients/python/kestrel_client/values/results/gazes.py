"""The result of gaze: what people look at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..._pb.kestrel.v1 import vision_service_pb2
from ...drawing.marks import Marks, labelled
from ...geometry import Box, Point, from_box, from_point
from ...images.image_forms import ImageInput
from .base import (
    FinishReason,
    ImageResult,
    common_fields,
    read_finish_reason,
    read_finish_reasons,
    shown_scores,
)
from .searches import ObjectSearch, read_search


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaze:
    """What one person looks at."""

    eye: Point
    """Where the gaze begins: the eye that was given, or the centre of the face."""
    face: Box | None
    """None for an eye that was given."""
    target: Point | None
    """What the person looks at; None if it is outside the image."""
    score: float
    """How sure the model is of the target, in [0, 1], not calibrated; 0 without one."""
    absence: float | None
    """The probability that the person looks at something outside the image, in [0, 1], not calibrated."""
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GazeResult(ImageResult):
    """What people look at. Iteration gives the gazes."""

    gazes: tuple[Gaze, ...]
    """In the order of the eyes or faces of the call, or in the order in which the model found the faces."""
    search: ObjectSearch | None
    """How the search for faces ended; None if the call named eyes or faces."""

    @property
    def marks(self) -> Marks:
        """The targets, and the faces with the scores of their targets."""
        return Marks(
            points=tuple(each.target for each in self.gazes if each.target is not None),
            boxes=labelled(
                (each.face, "face", None if each.target is None else each.score)
                for each in self.gazes
                if each.face is not None
            ),
        )

    def __iter__(self) -> Iterator[Gaze]:
        return iter(self.gazes)

    def __len__(self) -> int:
        return len(self.gazes)

    def __repr__(self) -> str:
        scores = [each.score for each in self.gazes if each.target is not None]
        return self._short(
            f"{len(self.gazes)} gazes, {len(scores)} in the image{shown_scores(scores)}"
        )


def read_gaze(message: vision_service_pb2.Gaze) -> Gaze:
    return Gaze(
        eye=from_point(message.eye),
        face=from_box(message.face) if message.HasField("face") else None,
        target=from_point(message.target) if message.HasField("target") else None,
        score=message.score,
        absence=message.absence if message.HasField("absence") else None,
        finish_reason=read_finish_reason(message.finish_reason),
    )


def gaze_result(response: vision_service_pb2.GazeResponse, source: ImageInput | None) -> GazeResult:
    ends: list[vision_service_pb2.Gaze | vision_service_pb2.ObjectSearch] = [*response.gazes]
    if response.HasField("search"):
        ends.append(response.search)
    return GazeResult(
        gazes=tuple(map(read_gaze, response.gazes)),
        search=read_search(response.search) if response.HasField("search") else None,
        finish_reason=read_finish_reasons(each.finish_reason for each in ends),
        **common_fields(response, source),
    )
