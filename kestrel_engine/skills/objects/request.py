"""ObjectsRequest: a request for points or boxes, which may look at an image several times."""

from __future__ import annotations

from dataclasses import dataclass

from ..base import SkillRequest


@dataclass(frozen=True, slots=True)
class Merging:
    """How to merge the outputs of several looks at an image: ``key`` names the list of points or boxes in an output, of
    which the merged one has at most ``max_objects``. ``max_overlap``: of two boxes that overlap more (intersection over
    union), also of one look, the result has the better one; None: both."""

    key: str
    max_objects: int
    max_overlap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectsRequest(SkillRequest):
    """``min_score``: the least score of an object that is returned."""

    merging: Merging
    min_score: float = 0.0
