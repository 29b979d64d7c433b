"""Device time: which requests a step's seconds on the device belong to. Owns no state.

Each phase of a step is divided by what its rows computed: decoding equally by rows (one position each), prefill by
positions, and vision by crops that passed through the tower, where a mask that was refined counts as a crop. An image
that several requests share belongs to the request for which it was encoded. What rows of requests that have ended took
belongs to none, and so does a failed step.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..types.requests import num_positions
from ..types.step import PREVIOUS, StepPlan, StepResult


def of_each_decode(plan: StepPlan, result: StepResult) -> float:
    """Seconds that belong to each row of ``plan.decode``. The caller adds them where it handles the row's token."""
    return result.decode_s / len(plan.decode) if plan.decode else 0.0


def of_new_work(plan: StepPlan, result: StepResult) -> Iterator[tuple[int, float]]:
    """Pairs (sequence id, seconds). Their sum is that of prefill and vision. An id may occur twice."""
    if plan.prefill:
        positions = [
            (row.sequence_id, num_positions([t for t in row.tokens if t is not PREVIOUS]))
            for row in plan.prefill
        ]
        yield from _divided(positions, result.prefill_s)
    if plan.encode or plan.refine:
        crops = [(piece.sequence_id, piece.num_encoded) for piece in plan.encode]
        yield from _divided([*crops, *((r.sequence_id, 1) for r in plan.refine)], result.vision_s)


def _divided(parts: list[tuple[int, int]], seconds: float) -> Iterator[tuple[int, float]]:
    whole = sum(count for _, count in parts)
    for sequence_id, count in parts:
        if count:
            yield sequence_id, seconds * count / whole
