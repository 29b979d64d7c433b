"""MessageLimits: the limits on the bytes of messages, and the reservation for a message that is to be read."""

from __future__ import annotations

from dataclasses import dataclass

COPIES = 2
"""Number of copies of a message's bytes in memory during its call: the message, and the image in it."""

ADAPTED_COPIES = 3
"""For a message that an adapter translates into one of kestrel.v1, which has the image once more."""


@dataclass(frozen=True, slots=True)
class MessageLimits:
    """Limits in bytes."""

    largest: int
    """Limit on one decompressed message."""
    held: int | None
    """Limit on all messages in memory together; None for no limit."""

    @property
    def received(self) -> int:
        """Limit for gRPC itself. It is larger than ``largest``, so that this server refuses slightly larger messages
        with a reason, which gRPC's own refusal lacks."""
        return self.largest + self.largest // 4

    @property
    def reserved(self) -> int:
        """Bytes to reserve before a message of kestrel.v1 is read."""
        return self.reserved_for(COPIES)

    def reserved_for(self, copies: int) -> int:
        """Bytes to reserve before a message is read of which ``copies`` are in memory during its call."""
        most = copies * self.largest
        return most if self.held is None else min(most, self.held)
