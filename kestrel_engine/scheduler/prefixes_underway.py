"""PrefixesUnderway: which prompts up to an image are being computed, and by which sequence, so that no image is
computed twice for the same beginning of a prompt."""

from __future__ import annotations

from collections.abc import Collection, Hashable

from .sequence import Sequence


class PrefixesUnderway:
    """``begin`` when a sequence computes prefixes, ``end`` once they are cached or their computation ended early."""

    def __init__(self, *, shared: bool) -> None:
        """``shared``: whether prefixes are cached, so that other sequences can use one."""
        self._shared = shared
        self._computing: dict[Hashable, int] = {}

    def __contains__(self, prefix: Hashable) -> bool:
        return prefix in self._computing

    def begin(self, sequence: Sequence) -> None:
        """``sequence`` computes the prefixes that end after its cursor."""
        if not self._shared:
            return
        for run in sequence.images.runs:
            if run.prefix is not None and run.last > sequence.cursor:
                self._computing[run.prefix] = sequence.sequence_id

    def end(self, sequence: Sequence, num_pages: int | None = None) -> list[Hashable]:
        """The prefixes that ``sequence`` was computing and that its first ``num_pages`` pages hold; None: all."""
        ended: list[Hashable] = []
        for run in sequence.images.runs:
            if num_pages is not None and run.end > num_pages:
                break
            if run.prefix is None or self._computing.get(run.prefix) != sequence.sequence_id:
                continue
            del self._computing[run.prefix]
            ended.append(run.prefix)
        return ended

    def check(self, running: Collection[int]) -> None:
        """Raises AssertionError unless all sequences that compute a prefix are ``running``."""
        assert all(sequence_id in running for sequence_id in self._computing.values())
