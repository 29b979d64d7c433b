"""Batch: which sequences run, which wait, and what they hold: pages, cached prefixes, images.

Waiting sequences join when a batch place and the pages of their prompt are free; pages for sampled tokens are allocated
when they are needed. When no page is free, cached prefixes are evicted first. Then the youngest sequence of the least
priority is preempted: it waits again and recomputes its positions, those of sampled tokens included.

Principals share the batch (shares.py). A principal may fill it while no other has work, and gives places back when a
principal with less than its share waits (order/place_taker.py).
"""

from __future__ import annotations

from collections.abc import Hashable

from ..types.info import SchedulerStats
from ..types.step import RuntimeLimits
from ..types.submission import Submission
from .audit import check_holdings, check_phases
from .memory.image_memory import ImageMemory
from .memory.pages import PagePool
from .memory.prefix_cache import PrefixCache
from .order.place_taker import PlaceTaker
from .order.waiting import WaitingQueue
from .policy import SchedulerPolicy
from .prefixes_underway import PrefixesUnderway
from .sequence import Phase, Sequence
from .shares import Shares


class Batch:
    """The scheduler's. A sequence is added once, joins and leaves the batch, and ends once."""

    def __init__(self, limits: RuntimeLimits, policy: SchedulerPolicy, shares: Shares) -> None:
        self._limits = limits
        self._policy = policy
        self._shares = shares
        self._pool = PagePool(limits.num_pages, policy.prefix_pages)
        self._cache = PrefixCache(self._pool)
        self.images = ImageMemory(policy.kept_embeddings, policy.kept_crops)
        self._queue = WaitingQueue(policy.aging_s, shares)
        self._places = PlaceTaker(limits.max_batch_size, shares)
        self._underway = PrefixesUnderway(shared=policy.prefix_cache)
        self.running: dict[int, Sequence] = {}
        self._sequences: dict[int, Sequence] = {}
        self._leaving: dict[int, Sequence] = {}
        """Sequences that ended while a step of NEW_WORK writes to their pages. They keep pages and batch places."""
        self._ended: list[int] = []
        self._admitted: list[Sequence] = []
        self._preemptions = self._cached_positions = self._prompt_positions = 0

    def __len__(self) -> int:
        """Sequences that have not ended."""
        return len(self._sequences)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_free_pages(self) -> int:
        """Pages that hold nothing, cached prefixes neither."""
        return self._pool.num_free

    @property
    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self.running),
            waiting=len(self._queue),
            pages_free=self._pool.num_free,
            pages_cached=self._cache.num_pages,
            pages_evictable=self._cache.num_evictable,
            pages_total=self._pool.num_pages,
            preemptions=self._preemptions,
            cached_positions=self._cached_positions,
            prompt_positions=self._prompt_positions,
        )

    def fits(self, num_prompt_positions: int, max_tokens: int) -> bool:
        """Whether a sequence of that size can ever run to its end; the last sampled token is never fed."""
        positions = num_prompt_positions + max_tokens - 1
        return (
            positions <= self._limits.max_seq_length
            and self._num_pages(positions) <= self._limits.num_pages
        )

    def add(self, submission: Submission) -> Sequence:
        sequence = Sequence(submission, self._limits.page_size)
        assert sequence.sequence_id not in self._sequences
        assert self.fits(sequence.num_prompt_positions, submission.max_tokens), (
            "callers check fits() first"
        )
        sequence.account = self._shares.begin(submission.principal, submission.weight)
        self._sequences[sequence.sequence_id] = sequence
        self._queue.add(sequence)
        return sequence

    def find(self, sequence_id: int) -> Sequence | None:
        """The sequence, unless it has ended."""
        return self._sequences.get(sequence_id)

    def expired(self, now: float) -> list[int]:
        return self._queue.expired(now)

    def take_admitted(self) -> list[Sequence]:
        admitted, self._admitted = self._admitted, []
        return admitted

    def take_ended(self) -> tuple[int, ...]:
        """Sequences that ended since the last call, and to whose pages no step writes."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def admit(self, now: float) -> Sequence | None:
        """Admits the next waiting sequence if it has room. No sequence overtakes it, unless it waits for an image
        prefix that another sequence computes."""
        if self._is_full:
            return None
        sequence = self._next(now)
        if sequence is None or not self._take_pages(sequence, now):
            return None
        self._join(sequence, now)
        return sequence

    def replace_running(self, now: float) -> None:
        """If the batch is full, lets the next waiting sequence replace a running one that has a weaker claim."""
        if not self._is_full or not self._places.next_step():
            return
        if len(self._shares.members) == 1 and not self._queue.has_best_priority:
            return
        sequence = self._next(now)
        victim = sequence and self._places.victim(sequence, self.running.values())
        if sequence is None or victim is None or not self._take_pages(sequence, now):
            return
        self._preempt(victim)
        self._places.took()
        self._join(sequence, now)

    def grow(self, sequence: Sequence, served: set[int]) -> bool:
        """Makes room for one more position, by preemption if necessary. False if ``sequence`` itself was preempted, or
        if no sequence can be until a step has come back."""
        if sequence.num_scheduled < len(sequence.pages) * self._limits.page_size:
            return True
        while True:
            pages = self._allocate(1)
            if pages is not None:
                sequence.pages += pages
                return True
            # A sequence with a row in this step keeps its pages: two rows must not write to one page.
            running = self.running.items()
            candidates = [s for i, s in running if i not in served and not s.steps_out]
            if not candidates:
                return False
            victim = max(candidates, key=preemption_rank)
            self._preempt(victim)
            if victim is sequence:
                return False

    def keep_prefix(self, sequence: Sequence) -> None:
        """Adds the whole pages of committed positions to the prefix cache, unless the sequence shares pages that have
        left it: these may hold numbers that are not finite, and other sequences may hold them, too."""
        if sequence.node is not None and sequence.node.is_forgotten:
            self._release_waiting(sequence)
            return
        if self._policy.prefix_cache and sequence.num_committed:
            size = self._limits.page_size
            count = sequence.num_committed // size
            atoms = sequence.atoms(count)
            num_pages = sum(atom.num_pages for atom in atoms)
            namespace = sequence.submission.namespace
            node = self._cache.insert(namespace, atoms, sequence.pages[:num_pages])
            if sequence.node is not None:
                self._cache.unlock(sequence.node)
            sequence.node = node
            self._release_waiting(sequence, count)

    def end(self, sequence: Sequence, *, keep: bool) -> None:
        """Ends a sequence in any phase and frees what it holds, if need be after the steps that write to its pages.

        ``keep``: its computed prefix stays in the prefix cache as long as there is room.
        """
        is_written = bool(sequence.steps_out)
        if sequence.phase is Phase.RUNNING:
            if keep:
                self.keep_prefix(sequence)
            self._leave_batch(sequence)
            if is_written:
                self._leaving[sequence.sequence_id] = sequence
            else:
                self._free(sequence)
        else:
            self._queue.remove(sequence.sequence_id)
        sequence.move(Phase.FINISHED)
        assert sequence.account is not None
        self._shares.leave(sequence.account)
        del self._sequences[sequence.sequence_id]
        if not is_written:
            self._ended.append(sequence.sequence_id)

    def discard(self, sequence: Sequence) -> None:
        """Ends a sequence whose row was not finite. The pages that it wrote leave the prefix cache, with all nodes
        below them. The embeddings from which it computed are dropped. Pages of other sequences stay."""
        shared = sequence.num_shared_pages
        if sequence.node is not None:
            self._cache.forget(sequence.node, set(sequence.pages[shared:]))
        for piece in sequence.images.pieces:
            if piece.start >= shared * self._limits.page_size and piece not in sequence.needed:
                self.images.spoil(piece.image.key)
                self.images.crops.forget(piece.image.crop_keys or ())
        self.end(sequence, keep=False)

    def step_came_back(self, sequence: Sequence, step_id: int) -> None:
        """A step of NEW_WORK no longer writes to the pages of ``sequence``."""
        sequence.steps_out.remove(step_id)
        if sequence.sequence_id in self._leaving and not sequence.steps_out:
            del self._leaving[sequence.sequence_id]
            self._free(sequence)
            self._ended.append(sequence.sequence_id)

    def flush(self) -> None:
        self._cache.flush()
        self.images.flush()

    def reset(self) -> None:
        """Drops cached prefixes without users, and all embeddings: what the device holds is not trusted any more."""
        self._cache.flush()
        self.images.reset()

    def check(self) -> None:
        self._pool.check()
        self._cache.check()
        self.images.check()
        self._shares.check()
        self._underway.check(self.running.keys() | self._leaving.keys())
        assert len(self.running) + len(self._leaving) <= self._limits.max_batch_size
        check_phases(self._sequences, self.running, [s.sequence_id for s in self._queue])
        size = self._limits.page_size
        holders = [*self._sequences.values(), *self._leaving.values()]
        check_holdings(holders, size, self._pool, self._cache, self.images)

    @property
    def _is_full(self) -> bool:
        return len(self.running) + len(self._leaving) == self._limits.max_batch_size

    def _next(self, now: float) -> Sequence | None:
        """The next waiting sequence, after parking those that wait for an image prefix; None if there is none."""
        while (sequence := self._queue.head(now)) is not None and not sequence.in_flight:
            prefix = self._awaited_prefix(sequence)
            if prefix is None:
                return sequence
            self._queue.park(sequence, prefix)
        return None

    def _join(self, sequence: Sequence, now: float) -> None:
        """Moves a waiting sequence that has its pages into the batch."""
        self._queue.take(sequence, now)
        sequence.move(Phase.RUNNING)
        self.running[sequence.sequence_id] = sequence
        assert sequence.account is not None
        self._shares.hold(sequence.account, 1)
        sequence.account.num_urgent += sequence.priority == 0
        sequence.needed = [p for p in sequence.images.pieces if p.first >= sequence.cursor]
        for piece in sequence.needed:
            self.images.acquire(piece.image)
        if sequence.needed:
            self._underway.begin(sequence)

    def _awaited_prefix(self, sequence: Sequence) -> Hashable | None:
        """The prefix of ``sequence`` that another sequence is computing; None if it can begin."""
        namespace = sequence.submission.namespace
        for run in sequence.images.runs:
            if run.prefix in self._underway and not self._cache.contains(
                namespace, sequence.atoms(run.end)
            ):
                return run.prefix
        return None

    def _take_pages(self, sequence: Sequence, now: float) -> bool:
        """Reserves the pages of all tokens so far and shares cached ones. False, without effect, if too few are free.

        One page for each running sequence stays free, so that an admission does not preempt at once.
        """
        size = self._limits.page_size
        total = sequence.num_positions
        # At least one position is computed, or there would be nothing to sample from.
        atoms = sequence.atoms((total - 1) // size) if self._policy.prefix_cache else []
        match = self._cache.match(sequence.submission.namespace, atoms)
        needed = self._num_pages(total) - len(match.pages)
        if needed + len(self.running) > self._pool.num_free + self._cache.num_evictable:
            if match.node is not None:
                self._cache.unlock(match.node)
            return False
        self._pool.share(match.pages)
        fresh = self._allocate(needed)
        assert fresh is not None, "evictable pages were counted wrongly"
        sequence.node = match.node
        sequence.replace_pages(match.pages + fresh)
        sequence.num_shared_pages = len(match.pages)
        sequence.num_scheduled = sequence.num_committed = len(match.pages) * size
        sequence.cursor = sequence.images.num_tokens(sequence.num_scheduled)
        if sequence.admitted_at is None:
            sequence.admitted_at = now
            self._admitted.append(sequence)
            sequence.num_cached = sequence.num_scheduled
            self._cached_positions += sequence.num_scheduled
            self._prompt_positions += total
        return True

    def _allocate(self, count: int) -> list[int] | None:
        missing = count - self._pool.num_ready
        if missing > 0:
            self._cache.evict(missing)
            if count > self._pool.num_free:
                return None
        return self._pool.allocate(count)

    def _preempt(self, sequence: Sequence) -> None:
        """Releases all that a running sequence holds. It keeps its sampled tokens, to compute their positions again."""
        self._preemptions += 1
        self.keep_prefix(sequence)
        self._give_back(sequence)
        sequence.move(Phase.WAITING)
        sequence.cursor = sequence.num_scheduled = sequence.num_committed = 0
        sequence.epoch += 1
        self._queue.add_first(sequence)

    def _release_waiting(self, sequence: Sequence, num_pages: int | None = None) -> None:
        """Releases the sequences that wait for prefixes of ``sequence``: its first ``num_pages`` pages are cached, or
        its computation has ended."""
        for prefix in self._underway.end(sequence, num_pages):
            self._queue.release(prefix)

    def _give_back(self, sequence: Sequence) -> None:
        """Frees batch place, pages, lock and image of a running sequence."""
        self._leave_batch(sequence)
        self._free(sequence)

    def _leave_batch(self, sequence: Sequence) -> None:
        del self.running[sequence.sequence_id]
        assert sequence.account is not None
        self._shares.hold(sequence.account, -1)
        sequence.account.num_urgent -= sequence.priority == 0

    def _free(self, sequence: Sequence) -> None:
        """Frees pages, lock and image of a sequence that has left the batch."""
        self._pool.release(sequence.pages)
        sequence.replace_pages([])
        if sequence.node is not None:
            self._cache.unlock(sequence.node)
            sequence.node = None
        for piece in sequence.needed:
            self.images.release(piece.image.key)
        sequence.needed = []
        self._release_waiting(sequence)

    def _num_pages(self, positions: int) -> int:
        return -(-positions // self._limits.page_size)


def preemption_rank(sequence: Sequence) -> tuple[int, float, int]:
    """The running sequence with the greatest rank is preempted first."""
    return sequence.priority, sequence.submission.arrived_at, sequence.sequence_id
