"""Point: one point for each object that matches a name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..types.requests import check_spatial_refs, spatial_tokens
from .base import SkillContext, SkillControl, SkillOutput, checked_text
from .declaration import (
    OBJECT_SETTINGS,
    SPATIAL_REFS,
    TEXT,
    names_of,
    object_schema,
    settings_schema,
)
from .objects.locate import LocateControl, LocateOutput
from .objects.request import Merging, ObjectsRequest
from .settings import read_settings, reject_unknown


class PointSkill:
    """Arguments: object, spatial_refs. Output: {"points": [{"x", "y", "score"}]}, normalised to [0, 1]."""

    name = "point"
    description = "Finds the centre of every object of a kind."
    arguments = object_schema({"object": TEXT, "spatial_refs": SPATIAL_REFS}, required=("object",))
    settings = settings_schema(OBJECT_SETTINGS)

    def build(
        self, arguments: Mapping[str, Any], settings: Mapping[str, Any], context: SkillContext
    ) -> ObjectsRequest:
        reject_unknown(arguments, names_of(self.arguments))
        text = checked_text("object", arguments.get("object"), context)
        refs = check_spatial_refs(arguments.get("spatial_refs"))
        read = read_settings(settings, context.defaults, greedy=True, extra=names_of(self.settings))
        max_objects = read.max_objects or context.defaults.max_objects
        templates = context.model.templates
        return ObjectsRequest(
            skill=self.name,
            prompt_field="object",
            prompt_suffix=(
                *templates.point_prefix,
                *spatial_tokens(refs),
                *context.codec.encode(" " + text),
                *templates.point_suffix,
            ),
            sampling=read.sampling,
            max_tokens=read.max_tokens,
            token_budget=min(read.max_tokens or 2 * max_objects, 2 * max_objects),
            merging=Merging("points", max_objects),
            min_score=read.min_score,
        )

    def new_control(
        self, request: ObjectsRequest, max_tokens: int, context: SkillContext
    ) -> SkillControl:
        max_objects = request.merging.max_objects
        return LocateControl(boxes=False, max_objects=max_objects, model=context.model)

    def new_output(self, request: ObjectsRequest, context: SkillContext) -> SkillOutput:
        return LocateOutput(
            "points",
            boxes=False,
            min_score=request.min_score,
            calibration=context.calibration,
        )
