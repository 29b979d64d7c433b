"""Checks that sequences, pages and images agree. The scheduler's ``check`` runs them; tests call it at every move."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from .memory.image_memory import ImageMemory
from .memory.pages import PagePool
from .memory.prefix_cache import PrefixCache
from .sequence import Phase, Sequence


def check_phases(
    sequences: Mapping[int, Sequence], running: Collection[int], waiting: Collection[int]
) -> None:
    """Raises AssertionError unless each sequence either runs or waits, and its account counts it so."""
    assert len(set(waiting)) == len(waiting)
    assert set(running) | set(waiting) == sequences.keys()
    assert not set(running) & set(waiting)
    for sequence in sequences.values():
        assert (sequence.phase is Phase.RUNNING) == (sequence.sequence_id in running)
    accounts = {s.account for s in sequences.values()}
    for account in accounts:
        assert account is not None
        own = [s.is_waiting for s in sequences.values() if s.account is account]
        assert (account.num_waiting, account.held) == (sum(own), len(own) - sum(own))
        urgent = [s for s in sequences.values() if s.account is account and s.priority == 0]
        assert account.num_urgent == sum(not s.is_waiting for s in urgent)


def check_holdings(
    sequences: Iterable[Sequence],
    page_size: int,
    pool: PagePool,
    cache: PrefixCache,
    images: ImageMemory,
) -> None:
    """Raises AssertionError unless every reference to a page and every use of an image has its owner.

    A sequence without a batch place holds something only while a step writes to its pages.
    """
    references = [0] * pool.num_pages
    users: dict[str, int] = {}
    for sequence in sequences:
        holds = sequence.phase is Phase.RUNNING or sequence.steps_out
        assert holds or not (sequence.pages or sequence.node or sequence.needed)
        assert len(sequence.pages) * page_size >= sequence.num_scheduled
        for piece in sequence.needed:
            users[piece.image.key] = users.get(piece.image.key, 0) + 1
        for page in sequence.pages:
            references[page] += 1
    assert users == images.users(), "an image has users that do not exist"
    held = sum(pool.references(page) for page in range(pool.num_pages))
    assert held == sum(references) + cache.num_pages, "a page is lost or has no owner"
