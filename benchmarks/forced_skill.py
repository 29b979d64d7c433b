"""ForcedCaption: a skill that writes exactly max_tokens tokens, so that decoding is measured and not the model's wish
to end. A constraint is data, so a skill in one file is all it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kestrel_engine.events import FinishReason
from kestrel_engine.requests import SamplingParams
from kestrel_engine.skills.answer import AnswerOutput
from kestrel_engine.skills.base import SkillContext, SkillControl, SkillOutput, SkillRequest
from kestrel_engine.step import StepToken, TokenRule


class ForcedCaption:
    """Arguments: none. Settings: max_tokens. Output: {"text"}."""

    name = "forced"

    def build(
        self, arguments: Mapping[str, Any], settings: Mapping[str, Any], context: SkillContext
    ) -> SkillRequest:
        return SkillRequest(
            skill=self.name,
            prompt_suffix=tuple(context.model.templates.caption["normal"]),
            sampling=SamplingParams(),
            max_tokens=settings["max_tokens"],
        )

    def new_control(
        self, request: SkillRequest, max_tokens: int, context: SkillContext
    ) -> SkillControl:
        return _NeverEnds(context)

    def new_output(self, request: SkillRequest, context: SkillContext) -> SkillOutput:
        return AnswerOutput("text", context)


class _NeverEnds:
    """The end token is never allowed."""

    def __init__(self, context: SkillContext) -> None:
        ids = context.model.ids
        self._rule = TokenRule(suppressed=(ids.eos_id, ids.answer_id))

    def rule(self, index: int) -> TokenRule:
        return self._rule

    def accept(self, token: StepToken) -> FinishReason | None:
        return None
