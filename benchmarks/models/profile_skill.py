"""DeviceProfile: a skill that profiles the GPU of a running server.

A server loads it with ``--skill benchmarks.models.profile_skill:DeviceProfile``. RunSkill with the argument ``seconds``
starts a profile in a thread and returns at once. Without the argument, it returns the result: {"state", "trace"}. A
call costs the server one token of a short prompt.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kestrel_engine.errors import InvalidRequest
from kestrel_engine.skills.base import SkillContext, SkillControl, SkillOutput, SkillRequest
from kestrel_engine.skills.text.answer import AnswerControl, AnswerOutput
from kestrel_engine.types.requests import SamplingParams

LONGEST_S = 10.0


class Watcher:
    """Takes one trace at a time. ``state``: "idle", "watching", "done", or an error message."""

    def __init__(self) -> None:
        self.state = "idle"
        self.trace: dict[str, Any] | None = None

    def start(self, seconds: float) -> None:
        self.state, self.trace = "watching", None
        threading.Thread(
            target=self._watch, args=(seconds,), name="device-profile", daemon=True
        ).start()

    def _watch(self, seconds: float) -> None:
        import torch

        if not torch.cuda.is_available():
            self.state = "no CUDA device"
            return
        from ..device.trace import record

        try:
            trace = record(seconds)
        except (
            Exception
        ) as error:  # The next call reports it, because nothing waits for this thread.
            self.state = f"{type(error).__name__}: {error}"
            return
        self.trace = asdict(trace)
        self.state = "done"


_WATCHER = Watcher()


class DeviceProfile:
    """Arguments: seconds, or none to request the result."""

    name = "device_profile"

    def build(
        self, arguments: Mapping[str, Any], settings: Mapping[str, Any], context: SkillContext
    ) -> SkillRequest:
        seconds = arguments.get("seconds")
        if seconds is not None:
            if not isinstance(seconds, (int, float)) or not 0 < seconds <= LONGEST_S:
                raise InvalidRequest("seconds", f"must be above 0 and at most {LONGEST_S:g}")
            if _WATCHER.state == "watching":
                raise InvalidRequest("seconds", "the device is being watched")
            _WATCHER.start(float(seconds))
        templates = context.model.templates
        return SkillRequest(
            skill=self.name,
            prompt_suffix=(*templates.query_prefix, *templates.query_suffix),
            sampling=SamplingParams(),
            needs_image=False,
            max_tokens=1,
        )

    def new_control(
        self, request: SkillRequest, max_tokens: int, context: SkillContext
    ) -> SkillControl:
        return AnswerControl(context)

    def new_output(self, request: SkillRequest, context: SkillContext) -> SkillOutput:
        return _Seen("text", context)


class _Seen(AnswerOutput):
    def output(self) -> dict[str, Any]:
        return {"state": _WATCHER.state, "trace": _WATCHER.trace}
