"""Streams of which no other part of the process has the same one.

torch deals the same 32 streams of each priority out in turn. After a few models were loaded, a runtime would get the
stream of another one that serves: while it captures a graph, the other's launches would become a part of that graph.
"""

from __future__ import annotations

import threading
from weakref import WeakValueDictionary

import torch

_lock = threading.Lock()
_owned: WeakValueDictionary[tuple[str, object], torch.cuda.Stream] = WeakValueDictionary()
"""The streams in use, by device and handle."""
_DEALT = 32


def own_stream(device: torch.device, *, priority: int = 0) -> torch.cuda.Stream:
    """Returns a stream that no other caller gets while this one keeps it. Raises RuntimeError if all
    are in use."""
    with _lock:
        for _ in range(_DEALT):
            stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=priority)
            key = (str(stream.device), stream.cuda_stream)
            if key not in _owned:
                _owned[key] = stream
                return stream
    raise RuntimeError(f"all {_DEALT} streams of priority {priority} of {device} are in use")
