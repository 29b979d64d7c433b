"""Caption: describes an image in one of three lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InvalidRequest
from .base import SkillContext, SkillControl, SkillOutput
from .declaration import TEXT_SETTINGS, names_of, object_schema, settings_schema
from .settings import read_settings, reject_unknown
from .text.answer import AnswerOutput, answer_control
from .text.penalties import read_penalties
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
        read = read_settings(
            settings, context.defaults, greedy=False, extra=names_of(self.settings)
        )
        penalties = read_penalties(settings, context.model.text.vocab_size)
        return TextRequest(
            skill=self.name,
            prompt_suffix=tuple(context.model.templates.caption[key]),
            sampling=read.sampling,
            max_tokens=read.max_tokens,
            constraint=read.constraint,
            stop=read.stop,
            logprobs=read.logprobs,
            top_logprobs=read.top_logprobs,
            penalties=penalties,
        )

    def new_control(
        self, request: TextRequest, max_tokens: int, context: SkillContext
    ) -> SkillControl:
        return answer_control(request, context)

    def new_output(self, request: TextRequest, context: SkillContext) -> SkillOutput:
        return AnswerOutput("caption", context, request.stop, logprobs=request.logprobs)
