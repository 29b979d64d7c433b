"""Caption: describes an image in one of three lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InvalidRequest
from .base import SkillContext, SkillControl, SkillOutput
from .declaration import TEXT_SETTINGS, names_of, object_schema, settings_schema
from .settings import read_text_settings, reject_unknown
from .text.answer import AnswerOutput, answer_control
from .text.request import TextRequest

LENGTHS = ("short", "normal", "long")


class CaptionSkill:
    """Arguments: length ("short", "normal" or "long", any case; default normal). Output: {"caption"}."""

    name = "caption"
    description = "Describes an image."
    arguments = object_schema({"length": {"enum": list(LENGTHS)}})
    settings = settings_schema(TEXT_SETTINGS)

    def build(
        self, arguments: Mapping[str, Any], settings: Mapping[str, Any], context: SkillContext
    ) -> TextRequest:
        reject_unknown(arguments, names_of(self.arguments))
        length = arguments.get("length", "normal")
        key = length.lower() if isinstance(length, str) else ""
        if key not in LENGTHS:
            raise InvalidRequest("length", f"{length!r} is not one of {', '.join(LENGTHS)}")
        _, fields = read_text_settings(settings, context, names_of(self.settings))
        return TextRequest(
            skill=self.name,
            prompt_suffix=tuple(context.model.templates.caption[key]),
            **fields,
        )

    def new_control(
        self, request: TextRequest, max_tokens: int, context: SkillContext
    ) -> SkillControl:
        return answer_control(request, context)

    def new_output(self, request: TextRequest, context: SkillContext) -> SkillOutput:
        return AnswerOutput("caption", context, request.stop, logprobs=request.logprobs)
