"""Gaze: where a person looks, from the place of an eye. One gaze from several looks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random
from statistics import median
from typing import Any, TypeAlias

from ..errors import FieldPath
from ..types.requests import Edges, check_place, spatial_tokens
from .base import SkillContext, SkillControl, SkillOutput, SkillRequest
from .declaration import LENGTH_SETTINGS, POINT, names_of, object_schema, settings_schema
from .objects.locate import LocateControl, LocateOutput
from .settings import read_settings, reject_unknown

Place: TypeAlias = tuple[float, float]
"""x and y as fractions of the image."""

NUM_LOOKS = 10
"""Looks at the image for an accurate gaze; as many at the mirrored image."""
_TOKENS = 2
"""A point."""
_NEIGHBOURS, _FARTHEST = 2, 2.0
"""A point is an outlier if its mean distance to this many neighbours exceeds this many times the median."""


class GazeRequest(SkillRequest):
    """A request whose prompt has one place, the eye."""

    def place_path(self, number: int) -> FieldPath:
        return ("eye",)


class GazeSkill:
    """Arguments: eye. Output: {"gaze": {"x", "y", "score"}}, normalised to [0, 1], or {"gaze": None} if the person
    looks at something outside the image."""

    name = "gaze"
    description = "Finds what a person looks at, from the place of an eye."
    arguments = object_schema({"eye": POINT}, required=("eye",))
    settings = settings_schema(LENGTH_SETTINGS)

    def build(
        self, arguments: Mapping[str, Any], settings: Mapping[str, Any], context: SkillContext
    ) -> GazeRequest:
        reject_unknown(arguments, names_of(self.arguments))
        read = read_settings(settings, context.defaults, greedy=True, extra=names_of(self.settings))
        eye = check_place("eye", arguments.get("eye"), lengths=(2,))
        # The reference has this prompt for all of its models (moondream.md section 3).
        encode = context.codec.encode
        return GazeRequest(
            skill=self.name,
            prompt_field="eye",
            prompt_suffix=(*encode("\n\nPoint:"), *spatial_tokens((eye,)), *encode(" gaze\n\n")),
            sampling=read.sampling,
            max_tokens=read.max_tokens,
            token_budget=min(read.max_tokens or _TOKENS, _TOKENS),
        )

    def new_control(
        self, request: SkillRequest, max_tokens: int, context: SkillContext
    ) -> SkillControl:
        return LocateControl(boxes=False, max_objects=1, model=context.model)

    def new_output(self, request: SkillRequest, context: SkillContext) -> SkillOutput:
        # A calibration of other points says nothing of these.
        return GazeOutput("gaze", boxes=False)


class GazeOutput(LocateOutput):
    """One point, or none. ``absence``: the probability that it is outside the image."""

    def output(self) -> dict[str, Any]:
        (points,) = super().output().values()
        return {"gaze": points[0] if points else None}

    @property
    def is_complete(self) -> bool:
        """A point is the whole answer, and no limit has cut it."""
        return len(self.token_ids) == _TOKENS


def eyes_in(face: Edges, random: Random) -> list[Place]:
    """Returns the eyes of the looks for an accurate gaze: NUM_LOOKS random places in the box ``face``."""
    x_min, y_min, x_max, y_max = face
    return [(random.uniform(x_min, x_max), random.uniform(y_min, y_max)) for _ in range(NUM_LOOKS)]


def mean_gaze(points: Sequence[Place]) -> Place | None:
    """Returns the mean of ``points`` without outliers, as the reference computes it (detect_gaze and
    remove_outlier_points of moondream/torch). ``points``: of the looks that found one, of NUM_LOOKS at the image and
    NUM_LOOKS at the mirrored image. None if less than half did: the person looks at something outside the image."""
    if len(points) < NUM_LOOKS:
        return None
    # The nearest neighbour of each point is the point itself.
    apart = [
        sum(sorted(_distance(a, b) for b in points)[:_NEIGHBOURS]) / _NEIGHBOURS for a in points
    ]
    most = _FARTHEST * median(apart)
    kept = [point for point, distance in zip(points, apart, strict=True) if distance <= most]
    return sum(x for x, _ in kept) / len(kept), sum(y for _, y in kept) / len(kept)


def _distance(one: Place, other: Place) -> float:
    # math.dist rounds in another way than the reference.
    return math.sqrt((one[0] - other[0]) ** 2 + (one[1] - other[1]) ** 2)
