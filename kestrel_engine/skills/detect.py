"""Detect: a box around each object that matches a name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import SkillContext, SkillControl, SkillOutput, checked_text
from .declaration import BOX_SETTINGS, TEXT, names_of, object_schema, settings_schema
from .objects.locate import LocateControl, LocateOutput
from .objects.request import Merging, ObjectsRequest
from .settings import read_settings, reject_unknown


class DetectSkill:
    """Arguments: object. Output: {"objects": [{"x_min", "y_min", "x_max", "y_max", "score"}]}, normalised, not
    clipped."""

    name = "detect"
    description = "Finds the bounding box of every object of a kind."
    arguments = object_schema({"object": TEXT}, required=("object",))
    settings = settings_schema(BOX_SETTINGS)

    def build(
        self, arguments: Mapping[str, Any], settings: Mapping[str, Any], context: SkillContext
    ) -> ObjectsRequest:
        reject_unknown(arguments, names_of(self.arguments))
        text = checked_text("object", arguments.get("object"), context)
        read = read_settings(settings, context.defaults, greedy=True, extra=names_of(self.settings))
        max_objects = read.max_objects or context.defaults.max_objects
        templates = context.model.templates
        return ObjectsRequest(
            skill=self.name,
            prompt_field="object",
            prompt_suffix=(
                *templates.detect_prefix,
                *context.codec.encode(" " + text),
                *templates.detect_suffix,
            ),
            sampling=read.sampling,
            max_tokens=read.max_tokens,
            token_budget=min(read.max_tokens or 3 * max_objects, 3 * max_objects),
            merging=Merging("objects", max_objects, read.max_overlap),
            min_score=read.min_score,
        )

    def new_control(
        self, request: ObjectsRequest, max_tokens: int, context: SkillContext
    ) -> SkillControl:
        max_objects = request.merging.max_objects
        return LocateControl(boxes=True, max_objects=max_objects, model=context.model)

    def new_output(self, request: ObjectsRequest, context: SkillContext) -> SkillOutput:
        return LocateOutput(
            "objects",
            boxes=True,
            min_score=request.min_score,
            calibration=context.calibration,
        )
