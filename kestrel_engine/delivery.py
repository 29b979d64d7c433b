"""DeliveryThread: from sampled tokens to updates, beside the step thread.

Owns the skill outputs (detokenising, paths, objects). The step thread puts one batch a step into its queue and goes on;
what comes out goes to ``deliver``, one call a batch. Knows no scheduler, runtime or event loop.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .errors import KestrelError, RuntimeFailure
from .events import FinishReason, StreamUpdate
from .skills.base import SkillOutput
from .step import StepToken

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Progress:
    """What one step did for one request: a token for its output, or its end, or both."""

    sequence_id: int
    output: SkillOutput
    num_sampled: int
    token: StepToken | None = None
    end: FinishReason | KestrelError | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """How a request ended well, or was cancelled: then ``output`` holds what there was."""

    output: dict[str, Any]
    reason: FinishReason
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class Delivery:
    """What a caller hears; ``outcome`` is set exactly once in a request's life, in its last delivery."""

    sequence_id: int
    updates: list[StreamUpdate] = field(default_factory=list)
    token_index: int = 0
    outcome: Finished | KestrelError | None = None


Deliver = Callable[[list[Delivery]], None]


class DeliveryThread:
    """``on_broken`` is told of sequences whose skill raised; their outcome was delivered as RuntimeFailure."""

    def __init__(self, deliver: Deliver, on_broken: Callable[[int], None]) -> None:
        self._deliver, self._on_broken = deliver, on_broken
        # Bounded by what is sampled: at most max_tokens entries a request that the engine admitted.
        self._batches: queue.SimpleQueue[list[Progress] | None] = queue.SimpleQueue()
        self._broken: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="kestrel-delivery", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, batch: list[Progress]) -> None:
        """Any thread; never waits."""
        self._batches.put(batch)

    def stop(self) -> None:
        """Waits until everything put before has been delivered."""
        self._batches.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            deliveries = [d for progress in batch if (d := self._advance(progress)) is not None]
            if deliveries:
                self._deliver(deliveries)

    def _advance(self, progress: Progress) -> Delivery | None:
        sequence_id, end = progress.sequence_id, progress.end
        if sequence_id in self._broken:
            if end is not None:
                self._broken.discard(sequence_id)
            return None
        delivery = Delivery(sequence_id, token_index=progress.num_sampled)
        try:
            if progress.token is not None:
                delivery.updates = progress.output.push(progress.token)
            if isinstance(end, str):
                delivery.updates = [*delivery.updates, *progress.output.finish()]
                output = progress.output
                delivery.outcome = Finished(output.output(), end, output.token_ids)
            else:
                delivery.outcome = end
        except Exception:  # A skill's fault ends its own request only.
            logger.exception("the skill of sequence %d failed on a token", sequence_id)
            delivery.outcome = RuntimeFailure("the skill failed on a sampled token")
            if end is None:
                self._broken.add(sequence_id)
                self._on_broken(sequence_id)
        return delivery if delivery.updates or delivery.outcome is not None else None
