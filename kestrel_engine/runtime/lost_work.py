"""LostWork: removes work that depends on a failed step from the plans that follow it.

Steps are launched without waiting for earlier ones, so a later plan may hold rows and crops that depend on results that
a failed step did not compute. The scheduler ends their requests when it learns about the failure. Until then, the
runtime removes them from the plans.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..types.requests import ImageBlock
from ..types.step import Row, StepPlan


class LostWork:
    """The sequences and images whose computation was lost."""

    def __init__(self) -> None:
        self._sequences: set[int] = set()
        self._images: set[str] = set()

    def note(self, plan: StepPlan) -> None:
        """Records all rows and crops of a plan that raised an error."""
        self._sequences |= {row.sequence_id for row in plan.prefill + plan.decode}
        self._sequences |= {read.sequence_id for read in plan.reads}
        self._images |= {piece.image.key for piece in plan.encode}

    def note_sequences(self, sequence_ids: Iterable[int]) -> None:
        """Records sequences whose rows are lost in a step that raised no error."""
        self._sequences.update(sequence_ids)

    def without(self, plan: StepPlan) -> StepPlan:
        """Returns the plan without lost rows and crops.

        An image is no longer lost once its first crop is encoded again. A lost sequence stays lost until it ends.
        """
        self._sequences -= set(plan.ended)
        self._images -= {piece.image.key for piece in plan.encode if piece.first == 0}
        if not (self._sequences or self._images):
            return plan
        self._sequences |= {row.sequence_id for row in plan.prefill if self._reads_lost(row)}
        return replace(
            plan,
            encode=tuple(p for p in plan.encode if p.image.key not in self._images),
            reads=tuple(
                r
                for r in plan.reads
                if r.sequence_id not in self._sequences and r.image.key not in self._images
            ),
            prefill=tuple(r for r in plan.prefill if r.sequence_id not in self._sequences),
            decode=tuple(r for r in plan.decode if r.sequence_id not in self._sequences),
        )

    def _reads_lost(self, row: Row) -> bool:
        return any(isinstance(t, ImageBlock) and t.key in self._images for t in row.tokens)
