"""StepEvents: reports each step that has come back to the observer. Owns no state of the steps."""

from __future__ import annotations

import logging

from ..scheduler.scheduler import Scheduler
from ..types.observer import Observer, StepEvent
from ..types.requests import num_positions
from ..types.step import PREVIOUS, StepPlan, StepResult
from .active import ActiveRequests

logger = logging.getLogger(__name__)


class StepEvents:
    """On the step thread. A fault of ``observer`` is logged."""

    def __init__(self, observer: Observer, scheduler: Scheduler, requests: ActiveRequests) -> None:
        self._observer = observer
        self._scheduler = scheduler
        self._requests = requests

    def tell(
        self,
        plan: StepPlan,
        result: StepResult,
        *,
        launched_at: float,
        collected_at: float,
        failed: bool,
    ) -> None:
        """Before the step's tokens are taken and its requests end."""
        ids = [row.sequence_id for row in plan.prefill + plan.decode]
        ids += [read.sequence_id for read in plan.reads] + [r.sequence_id for r in plan.refine]
        encoded = {piece.image.key for piece in plan.encode}
        num_tokens, gaps = self._requests.gaps(result, collected_at)
        event = StepEvent(
            step_id=plan.step_id,
            launched_at=launched_at,
            collected_at=collected_at,
            vision_s=result.vision_s,
            prefill_s=result.prefill_s,
            decode_s=result.decode_s,
            num_crops=sum(piece.num_encoded for piece in plan.encode),
            num_reused_crops=sum(len(piece.reused) for piece in plan.encode),
            num_prefill_positions=sum(
                num_positions(tuple(t for t in row.tokens if t is not PREVIOUS))
                for row in plan.prefill
            ),
            num_decode=len(plan.decode),
            request_ids=self._requests.request_ids(ids),
            encoded_request_ids=self._requests.about(encoded) if encoded else (),
            failed=failed,
            stats=self._scheduler.stats,
            shared_groups=result.shared_groups,
            num_masked=sum(
                row.sample is not None and row.sample.rule.mask is not None
                for row in plan.prefill + plan.decode
            ),
            num_tokens=num_tokens,
            token_gaps=gaps,
        )
        try:
            self._observer.on_step(event)
        except Exception:  # A fault of the observer must not change what it observes.
            logger.exception("the observer failed on a step")
