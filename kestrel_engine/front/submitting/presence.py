"""Whether the images of a question show the objects that it presupposes: requests to point at each of them, which end
with their first decision (docs/use/scores.md). Owns nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import RequestError
from ...preprocess.prepared_cache import Looks
from ...skills.base import SkillOutput, logprobs_of
from ...steps.delivery import Finished
from ...types.events import EngineResult, FinishReason, ObjectAbsence
from ...types.stream import EngineStream

LOOK = "point"
"""The skill of a look."""
LOOK_SETTINGS: Mapping[str, Any] = {
    "max_objects": 1, "max_tokens": 1, "temperature": 0.0, "min_score": 0.0, "seed": 0
}  # fmt: skip
"""One token: the decision that there is an object."""

Start = Callable[[Any, str], Awaitable[EngineStream]]
"""Starts the request to point at an object in an image."""


@dataclass(frozen=True, slots=True)
class Presence:
    """What the looks at the images gave. ``absences``: of each object whose probability is known, in order."""

    absences: tuple[ObjectAbsence, ...]
    results: tuple[EngineResult, ...]
    was_cancelled: bool

    def ending(self, max_absence: float, output: SkillOutput) -> Finished | None:
        """The outcome of the question if nothing is generated for it, because an object is absent with a probability
        above ``max_absence``, or a look was cancelled. ``output``: that of the question."""
        is_absent = any(each.absence > max_absence for each in self.absences)
        if not self.was_cancelled and not is_absent:
            return None
        output.finish()
        reason: FinishReason = "cancelled" if self.was_cancelled else "stop"
        abstained = not self.was_cancelled
        return Finished(output.output(), reason, (), logprobs_of(output), abstained=abstained)

    def added_to(self, result: EngineResult) -> EngineResult:
        """``result`` with the absences, and with the tokens and crops of the looks."""
        every = [result.metrics, *(each.metrics for each in self.results)]
        metrics = replace(
            result.metrics,
            input_tokens=sum(m.input_tokens for m in every),
            output_tokens=sum(m.output_tokens for m in every),
            cached_tokens=sum(m.cached_tokens for m in every),
            encoded_crops=sum(m.encoded_crops for m in every),
            reused_crops=sum(m.reused_crops for m in every),
        )
        looks = len(self.results) // max(1, len(result.images))
        return replace(
            result, metrics=metrics, absences=self.absences, num_looks=result.num_looks + looks
        )


async def find_absences(
    objects: Sequence[str], prepared: Sequence[Looks], start: Start
) -> Presence:
    """Looks for all objects in all images at the same time. An object is absent if no image shows it.

    Raises the first error; one of an object's name names its place in ``objects``.
    """
    streams: list[EngineStream] = []
    try:
        for index, name in enumerate(objects):
            for (image,) in prepared:
                try:
                    streams.append(await start(image, name))
                except RequestError as error:
                    if error.path != ("object",):
                        raise
                    raise error.at(("presupposes", index)) from error
        results = await asyncio.gather(*(stream.result() for stream in streams))
    finally:
        for stream in streams:
            await stream.aclose()
    absences = []
    for index, name in enumerate(objects):
        of_object = results[index * len(prepared) : (index + 1) * len(prepared)]
        known = [result.absence for result in of_object if result.absence is not None]
        if known:
            absences.append(ObjectAbsence(name, min(known)))
    was_cancelled = any(stream.is_cancelled for stream in streams)
    return Presence(tuple(absences), tuple(results), was_cancelled)
