"""LostWork: keeps the failure of one step from spreading to steps that were launched before anybody knew of it.

Steps follow one another without waiting, so a later plan may hold rows and crops that build on what a failed step did
not compute. Their requests are ended by the scheduler as soon as it hears; until then a runtime leaves them out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..types.requests import ImageBlock
from ..types.step import Row, StepPlan


class LostWork:
    """note() a plan that raised, note_sequences() those whose rows are lost; without() cuts what builds on either from
    the plans that follow."""

    def __init__(self) -> None:
        self._sequences: set[int] = set()
        self._images: set[str] = set()

    def note(self, plan: StepPlan) -> None:
        self._sequences |= {row.sequence_id for row in plan.prefill + plan.decode}
        self._images |= {piece.image.key for piece in plan.encode}

    def note_sequences(self, sequence_ids: Iterable[int]) -> None:
        """Of a step that did not raise: rows of its own that are lost."""
        self._sequences.update(sequence_ids)

    def without(self, plan: StepPlan) -> StepPlan:
        """The plan without lost rows and crops. An image that begins again is no longer lost, a sequence never
        comes back."""
        self._sequences -= set(plan.ended)
        self._images -= {piece.image.key for piece in plan.encode if piece.first == 0}
        if not (self._sequences or self._images):
            return plan
        self._sequences |= {row.sequence_id for row in plan.prefill if self._reads_lost(row)}
        return replace(
            plan,
            encode=tuple(p for p in plan.encode if p.image.key not in self._images),
            prefill=tuple(r for r in plan.prefill if r.sequence_id not in self._sequences),
            decode=tuple(r for r in plan.decode if r.sequence_id not in self._sequences),
        )

    def _reads_lost(self, row: Row) -> bool:
        return any(isinstance(t, ImageBlock) and t.key in self._images for t in row.tokens)
