"""Presupposed: the objects that a question is about, and whether its images show them.

Requests to point at each of them end with their first decision (docs/use/scores.md). If an object is absent, the
question ends without a token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import RequestError
from ..types.events import EngineMetrics, EngineResult, FinishReason, ObjectAbsence
from ..types.requests import PreparedImage
from ..types.stream import EngineStream
from .base import EngineServices

_LOOK = "point"
"""The skill of a look."""
_LOOK_SETTINGS: Mapping[str, Any] = {
    "max_objects": 1, "max_tokens": 1, "temperature": 0.0, "min_score": 0.0, "seed": 0
}  # fmt: skip
"""One token: the decision that there is an object."""


@dataclass(frozen=True, slots=True)
class Presence:
    """What the looks at the images gave. ``absences``: of each object whose probability is known, in order."""

    absences: tuple[ObjectAbsence, ...]
    results: tuple[EngineResult, ...]
    was_cancelled: bool

    def ending(self, max_absence: float) -> FinishReason | None:
        """Why nothing is generated for the question: a look was cancelled, or an object is absent with a probability
        above ``max_absence``."""
        if self.was_cancelled:
            return "cancelled"
        return "stop" if any(each.absence > max_absence for each in self.absences) else None

    def added_to(self, result: EngineResult) -> EngineResult:
        """``result`` with the absences, and with the tokens and crops of the looks."""
        every = [result.metrics, *(each.metrics for each in self.results)]
        metrics = replace(result.metrics, **EngineMetrics.work_of(every))
        looks = len(self.results) // max(1, len(result.images))
        return replace(
            result, metrics=metrics, absences=self.absences, num_looks=result.num_looks + looks
        )


@dataclass(frozen=True, slots=True)
class Presupposed:
    """The request is about ``objects``. If one of them is absent from its images with a probability above
    ``max_absence``, nothing is generated."""

    objects: tuple[str, ...]
    max_absence: float

    async def found(self, engine: EngineServices, images: Sequence[PreparedImage]) -> Presence:
        """Looks for all objects in all images at the same time. An object is absent if no image shows it.

        Raises the first error; one of an object's name names its place in ``objects``.
        """
        return await engine.wait(
            _find(self.objects, images, engine),
            "before the objects that the question presupposes were looked for",
        )


async def _find(
    objects: Sequence[str], images: Sequence[PreparedImage], engine: EngineServices
) -> Presence:
    streams: list[EngineStream] = []
    try:
        for index, name in enumerate(objects):
            for image in images:
                try:
                    look = await engine.ask(_LOOK, image, {"object": name}, _LOOK_SETTINGS)
                    streams.append(look)
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
        of_object = results[index * len(images) : (index + 1) * len(images)]
        known = [result.absence for result in of_object if result.absence is not None]
        if known:
            absences.append(ObjectAbsence(name, min(known)))
    was_cancelled = any(stream.is_cancelled for stream in streams)
    return Presence(tuple(absences), tuple(results), was_cancelled)
