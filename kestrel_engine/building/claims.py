"""Claims: the memory that this process's models hold on a device, and what they may still take of its free memory.

A running model takes memory in its passes and gives it back. The host gives memory to the pages of a KV cache when they
are first written. A model that is loaded later must leave both. Models of other processes are not known here.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ..checkpoint.weights import memory
from ..runtime.protocol import Runtime
from .kv_pool import size_text

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Claim:
    """``holds``: bytes of weights, KV cache and what else stays. ``growth``: returns the bytes that the model may still
    take; it holds no runtime, so that a claim ends when the runtime is freed."""

    model: str
    device: str
    holds: int
    growth: Callable[[], int]


class Claims:
    """Thread-safe."""

    def __init__(self) -> None:
        self._live: WeakKeyDictionary[Runtime, Claim] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._turns: dict[str, threading.Lock] = defaultdict(threading.Lock)

    @contextmanager
    def turn(self, device: torch.device) -> Iterator[None]:
        """Waits for other models that are being loaded to the device, so that two do not plan with the same bytes."""
        with self._lock:
            turn = self._turns[_name(device)]
        with turn:
            yield

    def add(self, runtime: Runtime, claim: Claim) -> None:
        """The claim ends with the life of ``runtime``."""
        with self._lock:
            self._live[runtime] = claim

    def available(self, device: torch.device) -> int | None:
        """The bytes that a further model may take; None if the device does not report them."""
        free = memory.device_available(device)
        if free is None:
            return None
        return max(0, free - sum(claim.growth() for claim in self.of(device)))

    def described(self, device: torch.device) -> str:
        """What other models hold, as the end of a message; empty if there are none."""
        parts = []
        for claim in self.of(device):
            growth = claim.growth()
            more = f" and may take {size_text(growth)} more" if growth else ""
            parts.append(f"{claim.model} holds {size_text(claim.holds)}{more}")
        return f"; on {_name(device)}, {', '.join(parts)}" if parts else ""

    def of(self, device: torch.device) -> list[Claim]:
        name = _name(device)
        with self._lock:
            return [claim for claim in self._live.values() if claim.device == name]


def _name(device: torch.device) -> str:
    """The device's name, with its number: "cuda" is the current one."""
    if device.type == "cuda" and device.index is None:
        import torch

        return f"cuda:{torch.cuda.current_device()}"
    return str(device)


def claim_of(model: str, device: torch.device, holds: int, growth: Callable[[], int]) -> Claim:
    return Claim(model, _name(device), holds, growth)


CLAIMS = Claims()
"""Those of this process."""
