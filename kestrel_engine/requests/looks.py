"""LookGroup: the sequences of one request, one for each look at its image, which have one outcome.

Owns what they gave so far, on the event loop. Knows no scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import KestrelError
from ..skills.base import SkillRequest
from ..skills.objects.request import Merging, ObjectsRequest
from ..steps.delivery import Finished, RequestEnd
from ..types.events import FinishReason
from ..types.requests import Edges
from ..types.submission import Submission
from ..types.timings import StepTimings
from .merging import Found, merge, suppressed

_WHOLE = (0.0, 0.0, 1.0, 1.0)
_WEIGHT: tuple[FinishReason, ...] = ("stop", "length", "cancelled")
"""The reason of a look that the request takes, the least one first."""


@dataclass(slots=True, eq=False)
class LookGroup:
    """``size``: the number of sequences. ``merging``: the skill's. ``abort``: ends all sequences as "cancelled"."""

    size: int
    merging: Merging
    abort: Callable[[], None]
    _num_sampled: dict[int, int] = field(default_factory=dict)
    """Tokens of each sequence so far."""
    _ends: dict[int, tuple[Submission, RequestEnd]] = field(default_factory=dict)

    def total_sampled(self, sequence_id: int, count: int) -> int:
        """The tokens of all sequences, now that this one has ``count``."""
        self._num_sampled[sequence_id] = count
        return sum(self._num_sampled.values())

    def end(self, sequence_id: int, submission: Submission, end: RequestEnd) -> bool:
        """Takes the end of one sequence. A failure aborts the others. Returns whether all have ended."""
        had_failed = self.error is not None
        self._ends[sequence_id] = submission, end
        if isinstance(end.outcome, KestrelError) and not had_failed:
            self.abort()
        return len(self._ends) == self.size

    @property
    def submissions(self) -> list[Submission]:
        """Those of the sequences that have ended, in the order of the looks."""
        return [submission for _, (submission, _) in sorted(self._ends.items())]

    @property
    def error(self) -> KestrelError | None:
        """The first failure."""
        failures = (
            e.outcome for _, e in self._ends.values() if isinstance(e.outcome, KestrelError)
        )
        return next(failures, None)

    @property
    def timings(self) -> StepTimings:
        """Those of all sequences together."""
        every = [end.timings for _, end in self._ends.values()]
        first_tokens = [t.first_token_at for t in every if t.first_token_at is not None]
        last_tokens = [t.last_token_at for t in every if t.last_token_at is not None]
        scheduled = [t.scheduled_at for t in every if t.scheduled_at is not None]
        return StepTimings(
            scheduled_at=min(scheduled, default=None),
            first_token_at=min(first_tokens, default=None),
            last_token_at=max(last_tokens, default=None),
            finished_at=max(t.finished_at for t in every),
            cached_tokens=sum(t.cached_tokens for t in every),
            encoded_crops=sum(t.encoded_crops for t in every),
            reused_crops=sum(t.reused_crops for t in every),
        )

    def merged(self) -> Finished:
        """The outcome of all sequences, when they have ended and none has failed. Any thread."""
        looks: list[tuple[list[Found], Edges]] = []
        parts: list[Finished] = []
        for _, (submission, end) in sorted(self._ends.items()):
            assert isinstance(end.outcome, Finished), "a failure ends the request"
            region = submission.images[0].region
            edges = _WHOLE if region is None else region.edges
            looks.append((end.outcome.output[self.merging.key], edges))
            parts.append(end.outcome)
        # One look gives its objects in the order in which the model found them.
        found = merge(looks) if len(looks) > 1 else looks[0][0]
        found, most = suppressed(found, self.merging.max_overlap), self.merging.max_objects
        reasons: list[FinishReason] = [part.reason for part in parts]
        if len(found) > most:
            reasons.append("length")
        absences = [part.absence for part in parts if part.absence is not None]
        return Finished(
            {**parts[0].output, self.merging.key: found[:most]},
            max(reasons, key=_WEIGHT.index),
            tuple(token for part in parts for token in part.token_ids),
            # The object is absent only if no look sees it.
            absence=min(absences, default=None),
        )


def group_of(work: SkillRequest, num_looks: int, abort: Callable[[], None]) -> LookGroup | None:
    """The group of a request's sequences; None for one sequence whose objects stay as they are."""
    if isinstance(work, ObjectsRequest):
        if num_looks > 1 or work.merging.max_overlap is not None:
            return LookGroup(num_looks, work.merging, abort)
    return None
