"""MessageLimits: how large a message may be, and what is reserved for one that has not come yet."""

from __future__ import annotations

from dataclasses import dataclass

COPIES = 2
"""How often a message's bytes are in memory while its call runs: the message, and the image taken from it."""


@dataclass(frozen=True, slots=True)
class MessageLimits:
    """Bytes of a message."""

    largest: int
    """What the server takes, unpacked."""
    held: int | None
    """What all messages may hold together; None: no limit."""

    @property
    def received(self) -> int:
        """What gRPC receives. A somewhat larger message is refused with a reason, which gRPC's own refusal lacks."""
        return self.largest + self.largest // 4

    @property
    def reserved(self) -> int:
        """What is reserved before a message is asked for."""
        most = COPIES * self.largest
        return most if self.held is None else min(most, self.held)
