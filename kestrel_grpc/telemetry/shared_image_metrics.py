"""SharedImageMetrics: the instruments of the store that several servers share for images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from opentelemetry.metrics import Histogram, Observation

from ..images.shared.shared_images import SharedImageEvent
from . import names
from .names import Metric

_NOT_TRIED = ("paused", "full")


class SharedImageMetrics:
    def __init__(
        self,
        observe: Callable[[Metric, Callable[[], Iterable[Observation]]], Any],
        histogram: Callable[[Metric], Histogram],
    ) -> None:
        self._observe = observe
        self._operations: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[str] = Counter()
        self._duration = histogram(names.SHARED_IMAGE_DURATION)
        observe(names.SHARED_IMAGES, self._read_operations)
        observe(
            names.SHARED_IMAGE_BYTES,
            lambda: [
                Observation(count, {names.OPERATION_OF_STORE: operation})
                for operation, count in self._bytes.copy().items()
            ],
        )

    def show(self, is_used: Callable[[], bool]) -> None:
        self._observe(names.SHARED_IMAGES_USED, lambda: [Observation(int(is_used()))])

    def on_event(self, event: SharedImageEvent) -> None:
        self._operations[event.operation, event.outcome] += 1
        if event.num_bytes:
            self._bytes[event.operation] += event.num_bytes
        if event.outcome not in _NOT_TRIED:
            self._duration.record(event.seconds, {names.OPERATION_OF_STORE: event.operation})

    def _read_operations(self) -> list[Observation]:
        return [
            Observation(count, {names.OPERATION_OF_STORE: operation, names.OUTCOME: outcome})
            for (operation, outcome), count in self._operations.copy().items()
        ]
