"""WaitingQueue: which sequence is next. Owns the order of waiting sequences: priority, share, arrival.

Within a priority the principal that has used least of the device goes first (shares.py), and a principal's own requests
go in order of arrival. Between priorities the better one wins. A priority that was not served for ``aging_s`` seconds
counts as one better, so that no request starves. A sequence that would bring its principal beyond its share of the
batch, while others have work, counts as one of the least priority. The cost of an operation does not grow with the
queue.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator

from ...types.submission import NUM_PRIORITIES
from ..sequence import Sequence
from ..shares import Account, Shares

_SPARE_ENTRIES = 8


class _Flow(OrderedDict[int, Sequence]):
    """The waiting sequences of one principal at one priority, by sequence id. Compared by identity."""

    def __init__(self, account: Account) -> None:
        super().__init__()
        self.account = account

    def first(self) -> Sequence:
        return next(iter(self.values()))


class _Level:
    """One priority: a flow for each principal, and the order of the flows."""

    def __init__(self) -> None:
        self.flows: dict[Account, _Flow] = {}
        self.served_at = -math.inf
        self._ties = itertools.count()
        # (used, tie, flow). ``used`` only grows, so an entry is never too late; one that is too early, or whose flow
        # is empty, is put right when it comes up.
        self._heap: list[tuple[float, int, _Flow]] = []

    def flow(self, account: Account) -> _Flow:
        """The account's flow; a new one if it has none."""
        flow = self.flows.get(account)
        if flow is None:
            flow = self.flows[account] = _Flow(account)
            if len(self._heap) > 2 * len(self.flows) + _SPARE_ENTRIES:
                self._heap = [entry for entry in self._heap if entry[2]]
                heapq.heapify(self._heap)
            heapq.heappush(self._heap, (account.used, next(self._ties), flow))
        return flow

    def remove(self, sequence: Sequence) -> bool:
        """Removes the sequence. False: it was not there."""
        account = sequence.account
        flow = None if account is None else self.flows.get(account)
        if flow is None or account is None or flow.pop(sequence.sequence_id, None) is None:
            return False
        if not flow:
            del self.flows[account]
        return True

    def head(self, fits: Callable[[Account], bool]) -> Sequence | None:
        """The first sequence of the principal that has used least. Principals that fit go before all others. Those that
        do not fit have running sequences, so there are at most as many as places in the batch."""
        passed_over = []
        while (entry := self._least()) is not None and not fits(entry[2].account):
            passed_over.append(heapq.heappop(self._heap))
        for each in passed_over:
            heapq.heappush(self._heap, each)
        entry = entry or self._least()
        return None if entry is None else entry[2].first()

    def _least(self) -> tuple[float, int, _Flow] | None:
        heap = self._heap
        while heap:
            used, tie, flow = heap[0]
            if not flow:
                heapq.heappop(heap)
            elif used < flow.account.used:
                heapq.heapreplace(heap, (flow.account.used, tie, flow))
            else:
                return heap[0]
        return None


class WaitingQueue:
    """Sequences in order; some are parked until an image prefix is cached. Each has its ``account``."""

    def __init__(self, aging_s: float, shares: Shares) -> None:
        self._aging_s, self._shares = aging_s, shares
        self._levels = [_Level() for _ in range(NUM_PRIORITIES)]
        self._waiting: dict[int, Sequence] = {}
        self._parked: dict[Hashable, OrderedDict[int, Sequence]] = {}
        self._parked_at: dict[int, Hashable] = {}
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        for level in self._levels:
            for flow in level.flows.values():
                yield from flow.values()
        for parked in self._parked.values():
            yield from parked.values()

    @property
    def has_best_priority(self) -> bool:
        """Whether a sequence of the best priority waits and isn't parked."""
        return bool(self._levels[0].flows)

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence behind those of its principal and priority."""
        account = self._enter(sequence)
        self._levels[sequence.priority].flow(account)[sequence.sequence_id] = sequence
        deadline_at = sequence.submission.deadline_at
        if deadline_at is not None:
            if len(self._deadlines) > 2 * len(self._waiting) + _SPARE_ENTRIES:
                # Entries of sequences that left would stay until their deadlines, which may be minutes away.
                self._deadlines = [each for each in self._deadlines if each[1] in self._waiting]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (deadline_at, sequence.sequence_id))

    def add_first(self, sequence: Sequence) -> None:
        """Adds a preempted sequence ahead of those of its principal and priority."""
        self._enter(sequence)
        self._put_first(sequence)

    def head(self, now: float) -> Sequence | None:
        """The next sequence to admit; None if none waits or all are parked."""
        best, best_rank = None, (math.inf, math.inf)
        has_place_left = self._shares.has_place_left
        for level in self._levels:
            sequence = level.head(has_place_left)
            if sequence is None:
                continue
            account = sequence.account
            assert account is not None
            waited = now - max(sequence.submission.arrived_at, level.served_at)
            priority = sequence.priority if has_place_left(account) else NUM_PRIORITIES - 1
            rank = (priority - waited / self._aging_s, account.used)
            if rank < best_rank:
                best, best_rank = sequence, rank
        return best

    def take(self, sequence: Sequence, now: float) -> None:
        """Removes the sequence at the head, because it is admitted."""
        level = self._levels[sequence.priority]
        assert level.remove(sequence), f"sequence {sequence.sequence_id} does not wait"
        level.served_at = now
        assert sequence.account is not None
        self._shares.served(sequence.account)
        self._leave(sequence)

    def remove(self, sequence_id: int) -> Sequence | None:
        """Removes a sequence that ends while it waits, parked or not; None if it does not wait."""
        sequence = self._waiting.get(sequence_id)
        if sequence is None:
            return None
        if sequence_id in self._parked_at:
            reason = self._parked_at.pop(sequence_id)
            del self._parked[reason][sequence_id]
            if not self._parked[reason]:
                del self._parked[reason]
        else:
            self._levels[sequence.priority].remove(sequence)
        self._leave(sequence)
        return sequence

    def park(self, sequence: Sequence, reason: Hashable) -> None:
        """Sets a waiting sequence aside until release(reason)."""
        self._levels[sequence.priority].remove(sequence)
        self._parked.setdefault(reason, OrderedDict())[sequence.sequence_id] = sequence
        self._parked_at[sequence.sequence_id] = reason

    def release(self, reason: Hashable) -> None:
        """Puts the sequences parked for ``reason`` back, in order, ahead of the others of their principals."""
        parked = self._parked.pop(reason, None)
        for sequence in reversed(parked.values() if parked else ()):
            del self._parked_at[sequence.sequence_id]
            self._put_first(sequence)

    def expired(self, now: float) -> list[int]:
        """Ids of waiting sequences that were never admitted and whose deadline has passed. Each is returned once."""
        ids = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, sequence_id = heapq.heappop(self._deadlines)
            sequence = self._waiting.get(sequence_id)
            if sequence is not None and sequence.admitted_at is None:
                ids.append(sequence_id)
        return ids

    def _put_first(self, sequence: Sequence) -> None:
        assert sequence.account is not None
        flow = self._levels[sequence.priority].flow(sequence.account)
        flow[sequence.sequence_id] = sequence
        flow.move_to_end(sequence.sequence_id, last=False)

    def _enter(self, sequence: Sequence) -> Account:
        assert sequence.account is not None
        self._shares.begin_waiting(sequence.account)
        self._waiting[sequence.sequence_id] = sequence
        return sequence.account

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.account is not None
        sequence.account.num_waiting -= 1
        del self._waiting[sequence.sequence_id]
