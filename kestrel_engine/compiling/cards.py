"""The cards for which kernels are compiled where there is none."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import ConfigError

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What the code that launches kernels asks a card. Sizes are in bytes."""

    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    """Some kernels start as many programs, and are compiled for that number."""
    shared_memory_per_block: int
    memory: int


CARDS = {
    f"sm_{major}{minor}": Card(
        name=name,
        compute_capability=(major, minor),
        num_sms=num_sms,
        shared_memory_per_block=kib * 1024,
        memory=gib * GIB,
    )
    for name, major, minor, num_sms, kib, gib in (
        ("A100", 8, 0, 108, 163, 80),
        ("A10, A40 or RTX 30", 8, 6, 84, 99, 24),
        ("L4, L40 or RTX 40", 8, 9, 142, 99, 48),
        ("H100 or H200", 9, 0, 132, 227, 80),
        ("B200", 10, 0, 148, 227, 180),
        ("RTX 50", 12, 0, 170, 99, 32),
    )
}
"""By the name of the architecture. Shared memory is that of the compute capability (CUDA's programming guide)."""


def card_of(arch: str, num_sms: int | None = None) -> Card:
    """``num_sms``: the multiprocessors of a card with other than the usual number. Raises ConfigError."""
    card = CARDS.get(arch)
    if card is None:
        raise ConfigError("arch", arch, f"must be one of {', '.join(CARDS)}")
    if num_sms is None:
        return card
    if not 1 <= num_sms <= 1024:
        raise ConfigError("multiprocessors", num_sms, "must be from 1 to 1024")
    return replace(card, num_sms=num_sms)
