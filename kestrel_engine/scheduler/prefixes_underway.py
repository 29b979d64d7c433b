"""PrefixesUnderway: which image prefixes are being computed, and by which sequence, so that no prefix is
computed twice."""

from __future__ import annotations

from collections.abc import Collection, Hashable

from .sequence import Sequence


class PrefixesUnderway:
    """``begin`` when a sequence computes a prefix, ``end`` once it is cached or its computation ended early."""

    def __init__(self, *, shared: bool) -> None:
        """``shared``: whether prefixes are cached, so that other sequences can use one."""
        self._shared = shared
        self._computing: dict[Hashable, int] = {}

    def key(self, sequence: Sequence) -> Hashable | None:
        """The key of the prefix of ``sequence``; None if it has no prefix that can be shared."""
        if sequence.image is None or not sequence.image_prefix or not self._shared:
            return None
        return (sequence.submission.namespace, sequence.image.key)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._computing

    def begin(self, sequence: Sequence) -> None:
        key = self.key(sequence)
        if key is not None:
            self._computing[key] = sequence.sequence_id

    def end(self, sequence: Sequence) -> Hashable | None:
        """The key of the prefix that ``sequence`` was computing; None if it computed no prefix."""
        key = self.key(sequence)
        if key is None or self._computing.get(key) != sequence.sequence_id:
            return None
        del self._computing[key]
        return key

    def check(self, running: Collection[int]) -> None:
        """Raises AssertionError unless all sequences that compute a prefix are ``running``."""
        assert all(sequence_id in running for sequence_id in self._computing.values())
