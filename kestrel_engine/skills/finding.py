"""Point and detect: one point, or a box, for each object that matches a name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..types.model_config import Templates
from ..types.requests import check_spatial_refs, spatial_tokens
from .base import SkillContext, SkillControl, SkillOutput, checked_text
from .declaration import (
    BOX_SETTINGS,
    OBJECT_SETTINGS,
    SPATIAL_REFS,
    TEXT,
    Schema,
    names_of,
    object_schema,
    settings_schema,
)
from .objects.locate import LocateControl, LocateOutput
from .objects.request import Merging, ObjectsRequest
from .settings import read_settings, reject_unknown


class _FindingSkill:
    """``key``: of the objects in the output. ``boxes``: whether a size follows each point."""

    name: ClassVar[str]
    arguments: ClassVar[Schema]
    settings: ClassVar[Schema]
    key: ClassVar[str]
    boxes: ClassVar[bool]

    def template(self, templates: Templates) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What precedes the name of the object in the prompt, and what follows it."""
        raise AssertionError("each skill has its own")

    def build(
        self, arguments: Mapping[str, Any], settings: Mapping[str, Any], context: SkillContext
    ) -> ObjectsRequest:
        reject_unknown(arguments, names_of(self.arguments))
        text = checked_text("object", arguments.get("object"), context)
        refs = check_spatial_refs(arguments.get("spatial_refs"))
        read = read_settings(settings, context.defaults, greedy=True, extra=names_of(self.settings))
        max_objects = read.max_objects or context.defaults.max_objects
        budget = (3 if self.boxes else 2) * max_objects
        prefix, suffix = self.template(context.model.templates)
        name = context.codec.encode(" " + text)
        return ObjectsRequest(
            skill=self.name,
            prompt_field="object",
            prompt_suffix=(*prefix, *spatial_tokens(refs), *name, *suffix),
            sampling=read.sampling,
            max_tokens=read.max_tokens,
            token_budget=min(read.max_tokens or budget, budget),
            merging=Merging(self.key, max_objects, read.max_overlap),
            min_score=read.min_score,
        )

    def new_control(
        self, request: ObjectsRequest, max_tokens: int, context: SkillContext
    ) -> SkillControl:
        max_objects = request.merging.max_objects
        return LocateControl(boxes=self.boxes, max_objects=max_objects, model=context.model)

    def new_output(self, request: ObjectsRequest, context: SkillContext) -> SkillOutput:
        return LocateOutput(
            self.key,
            boxes=self.boxes,
            min_score=request.min_score,
            calibration=context.calibration,
        )


class PointSkill(_FindingSkill):
    """Arguments: object, spatial_refs. Output: {"points": [{"x", "y", "score"}]}, normalised to [0, 1]."""

    name = "point"
    description = "Finds the centre of every object of a kind."
    arguments = object_schema({"object": TEXT, "spatial_refs": SPATIAL_REFS}, required=("object",))
    settings = settings_schema(OBJECT_SETTINGS)
    key = "points"
    boxes = False

    def template(self, templates: Templates) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return templates.point_prefix, templates.point_suffix


class DetectSkill(_FindingSkill):
    """Arguments: object. Output: {"objects": [{"x_min", "y_min", "x_max", "y_max", "score"}]}, normalised, not
    clipped."""

    name = "detect"
    description = "Finds the bounding box of every object of a kind."
    arguments = object_schema({"object": TEXT}, required=("object",))
    settings = settings_schema(BOX_SETTINGS)
    key = "objects"
    boxes = True

    def template(self, templates: Templates) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return templates.detect_prefix, templates.detect_suffix
