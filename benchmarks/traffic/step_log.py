"""StepLog: an engine's observer that records steps, and summarises them over a period."""

from __future__ import annotations

from dataclasses import dataclass

from kestrel_engine import ImageEvent, RequestEvent, StepEvent


@dataclass(frozen=True)
class Phases:
    """The shares of wall time in which the device worked, by its own clock if it has one. ``steps_s``: steps a
    second."""

    vision: float
    prefill: float
    decode: float
    steps_s: float
    mean_batch: float
    """Rows of the steps that decoded."""
    crops_s: float

    @property
    def busy(self) -> float:
        return self.vision + self.prefill + self.decode


class StepLog:
    """An observer. The step thread calls ``on_step``, and appending to a list needs no lock."""

    def __init__(self) -> None:
        self._events: list[StepEvent] = []

    def on_step(self, event: StepEvent) -> None:
        self._events.append(event)

    def on_request(self, event: RequestEvent) -> None:
        """Does nothing, because the callers measure requests."""

    def on_image(self, event: ImageEvent) -> None:
        """Does nothing."""

    def clear(self) -> None:
        self._events = []

    def events(self, begin: float, end: float) -> list[StepEvent]:
        """Returns the steps that were collected between two times of the monotonic clock."""
        return [e for e in self._events if begin <= e.collected_at <= end]

    def between(self, begin: float, end: float) -> Phases:
        """Returns the phases of steps that were collected between two times of the monotonic clock.

        With two lanes, phases of two steps overlap, so that their sum may exceed 1.
        """
        events = self.events(begin, end)
        wall = max(end - begin, 1e-9)
        decoding = [e.num_decode for e in events if e.num_decode]
        return Phases(
            vision=sum(e.vision_s for e in events) / wall,
            prefill=sum(e.prefill_s for e in events) / wall,
            decode=sum(e.decode_s for e in events) / wall,
            steps_s=len(events) / wall,
            mean_batch=sum(decoding) / len(decoding) if decoding else 0.0,
            crops_s=sum(e.num_crops for e in events) / wall,
        )
