"""PrefixesUnderway: which image prefixes are being computed, and by which sequence, so that none is computed twice."""

from __future__ import annotations

from collections.abc import Collection, Hashable

from .sequence import Sequence


class PrefixesUnderway:
    """``begin`` when a sequence computes a prefix, ``end`` once it is cached or the computation was given up."""

    def __init__(self, *, shared: bool) -> None:
        """``shared``: whether prefixes are cached, so that waiting for one is of use."""
        self._shared = shared
        self._computing: dict[Hashable, int] = {}

    def key(self, sequence: Sequence) -> Hashable | None:
        """Names the prefix of ``sequence``; None if it has none that could be shared."""
        if sequence.image is None or not self._shared:
            return None
        return (sequence.submission.namespace, sequence.image.key)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._computing

    def begin(self, sequence: Sequence) -> None:
        key = self.key(sequence)
        if key is not None:
            self._computing[key] = sequence.sequence_id

    def end(self, sequence: Sequence) -> Hashable | None:
        """The key of what ``sequence`` was computing, which others may wait for; None if it computed none."""
        key = self.key(sequence)
        if key is None or self._computing.get(key) != sequence.sequence_id:
            return None
        del self._computing[key]
        return key

    def check(self, running: Collection[int]) -> None:
        """Raises AssertionError unless all that compute a prefix are ``running``."""
        assert all(sequence_id in running for sequence_id in self._computing.values())
