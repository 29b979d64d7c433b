"""DeliveryThread: from sampled tokens to updates, beside the step thread.

Owns the skill outputs (detokenising, paths, objects) and how often streams hear of them. The step thread puts one batch
a step into its queue and goes on; what comes out goes to ``deliver``, one call for all streams. Knows no scheduler,
runtime or event loop.

Whoever reads streams pays for every update, not for its length: a gRPC message takes some 50 us of the interpreter that
the step thread needs too. So the next call waits a while for every stream that the last one woke: 64 streams hear
of two or three steps at once, a few of each step at once. A request's first token and its end never wait.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import KestrelError, RuntimeFailure
from ..skills.base import SkillOutput
from ..types.events import FinishReason, StreamUpdate
from ..types.step import StepToken

logger = logging.getLogger(__name__)

PAUSE_PER_STREAM_S = 150e-6
"""Three times what a message costs, so that messages take at most a third of the interpreter."""

LONGEST_PAUSE_S = 0.010
"""No update waits longer than this."""


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
    """What a caller hears; ``outcome`` is set exactly once in a request's life, in its last delivery.

    ``updates``: each with the number of tokens generated when it was made.
    """

    sequence_id: int
    updates: list[tuple[int, StreamUpdate]] = field(default_factory=list)
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
        pending: dict[int, Delivery] = {}
        due = 0.0
        while True:
            try:
                timeout = max(0.0, due - time.monotonic()) if pending else None
                batch = self._batches.get(timeout=timeout)
            except queue.Empty:
                batch = []
            urgent: list[int] = []
            for progress in batch or ():
                if self._advance(progress, pending):
                    urgent.append(progress.sequence_id)
            now = time.monotonic()
            if pending and (now >= due or batch is None):
                due = now + min(LONGEST_PAUSE_S, PAUSE_PER_STREAM_S * len(pending))
                self._deliver(list(pending.values()))
                pending.clear()
            elif urgent:
                self._deliver([pending.pop(sequence_id) for sequence_id in urgent])
            if batch is None:
                return

    def _advance(self, progress: Progress, pending: dict[int, Delivery]) -> bool:
        """Adds what ``progress`` gives to what its stream has not heard yet. True: that should not wait."""
        sequence_id, end = progress.sequence_id, progress.end
        if sequence_id in self._broken:
            if end is not None:
                self._broken.discard(sequence_id)
            return False
        updates: list[StreamUpdate] = []
        outcome: Finished | KestrelError | None = None
        try:
            if progress.token is not None:
                updates = progress.output.push(progress.token)
            if isinstance(end, str):
                updates = [*updates, *progress.output.finish()]
                output = progress.output
                outcome = Finished(output.output(), end, output.token_ids)
            else:
                outcome = end
        except Exception:  # A skill's fault ends its own request only.
            logger.exception("the skill of sequence %d failed on a token", sequence_id)
            outcome = RuntimeFailure("the skill failed on a sampled token")
            if end is None:
                self._broken.add(sequence_id)
                self._on_broken(sequence_id)
        if not updates and outcome is None:
            return False
        delivery = pending.get(sequence_id)
        if delivery is None:
            delivery = pending[sequence_id] = Delivery(sequence_id)
        for update in updates:
            delivery.updates.append((progress.num_sampled, update))
        delivery.outcome = outcome
        return outcome is not None or progress.num_sampled == 1
