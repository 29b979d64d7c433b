"""WorkersConfig: how many processes serve, where, how often one may be replaced. Frozen; its flags are in flags.py."""

from __future__ import annotations

from dataclasses import dataclass

MOST_WORKERS = 64
INDEX = "{index}"
"""What stands for a worker's index in the pattern of its own address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersConfig:
    """By default one process serves, and nobody watches it."""

    count: int = 1
    devices: tuple[str, ...] = ()
    """Each worker's; empty: as the engine's ``device`` says."""
    listen: str | None = None
    """Pattern of each worker's own address: unix:PATH with {index}, or HOST:PORT, whose port grows with the index."""
    restarts: int = 5
    """Of one worker within restarts.WINDOW_S; one more ends the server."""

    def own_address(self, index: int) -> str | None:
        """Where worker ``index`` alone listens."""
        return None if self.listen is None else address_of(self.listen, index)


def address_of(pattern: str, index: int) -> str:
    """``pattern`` for one worker. Port 0 stays: each is given one."""
    if INDEX in pattern:
        return pattern.replace(INDEX, str(index))
    host, _, port = pattern.rpartition(":")
    return f"{host}:{int(port) + index if int(port) else 0}"
