"""Skills whose answers have a forced length, so that the model's choice to end does not affect a measurement.

A server loads one with ``--skill benchmarks.models.forced_skill:ForcedQuery``, and RunSkill calls it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kestrel_engine.errors import InvalidRequest
from kestrel_engine.skills import DetectSkill
from kestrel_engine.skills.base import SkillContext, SkillControl, SkillOutput, SkillRequest
from kestrel_engine.skills.objects.locate import LocateControl
from kestrel_engine.skills.objects.request import ObjectsRequest
from kestrel_engine.skills.query import QueryRequest, QuerySkill
from kestrel_engine.skills.text.answer import AnswerOutput
from kestrel_engine.types.events import FinishReason
from kestrel_engine.types.requests import SamplingParams
from kestrel_engine.types.step import StepToken, TokenRule


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


class ForcedQuery:
    """A direct query of a forced length. Arguments: question. Settings: max_tokens, which is required. Greedy by
    default. Output: {"answer"}."""

    name = "forced_query"
    _query = QuerySkill()

    def build(
        self, arguments: Mapping[str, Any], settings: Mapping[str, Any], context: SkillContext
    ) -> QueryRequest:
        greedy = {"temperature": 0.0, "top_p": 1.0}
        request = self._query.build(arguments, {**greedy, **settings}, context)
        if request.max_tokens is None:
            raise InvalidRequest("max_tokens", "is required: nothing else ends the answer")
        return replace(request, skill=self.name, needs_image=True)

    def new_control(
        self, request: QueryRequest, max_tokens: int, context: SkillContext
    ) -> SkillControl:
        return _NeverEnds(context, request.top_logprobs)

    def new_output(self, request: QueryRequest, context: SkillContext) -> SkillOutput:
        return AnswerOutput("answer", context, logprobs=request.logprobs)


class ForcedDetect:
    """A detection that finds exactly ``max_objects`` boxes. Arguments: object. Settings: max_objects. Output: as
    DetectSkill's."""

    name = "forced_detect"
    _detect = DetectSkill()

    def build(
        self, arguments: Mapping[str, Any], settings: Mapping[str, Any], context: SkillContext
    ) -> ObjectsRequest:
        return replace(self._detect.build(arguments, settings, context), skill=self.name)

    def new_control(
        self, request: ObjectsRequest, max_tokens: int, context: SkillContext
    ) -> SkillControl:
        return _AlwaysAnother(context, request.merging.max_objects)

    def new_output(self, request: ObjectsRequest, context: SkillContext) -> SkillOutput:
        return self._detect.new_output(request, context)


class _AlwaysAnother(LocateControl):
    """The rules of a detection, so that they cost the same, but without the end token."""

    def __init__(self, context: SkillContext, max_objects: int) -> None:
        super().__init__(boxes=True, max_objects=max_objects, model=context.model)
        end = (context.model.ids.eos_id,)
        self._first = replace(self._first, suppressed=end)
        self._next = replace(self._next, suppressed=end)


class _NeverEnds:
    """The rule of an ordinary answer, so that it costs the same, but without the end token."""

    def __init__(self, context: SkillContext, top: int = 0) -> None:
        """``top``: how many alternatives each token has (TokenRule.top)."""
        ids = context.model.ids
        self._rule = TokenRule(stop=ids.eos_id, suppressed=(ids.eos_id, ids.answer_id), top=top)

    def rule(self, index: int) -> TokenRule:
        return self._rule

    def accept(self, token: StepToken) -> FinishReason | None:
        return None
