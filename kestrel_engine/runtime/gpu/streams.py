"""Streams of which no other part of the process has the same one, and their use with little work for the host.

torch deals the same 32 streams of each priority out in turn. After a few models were loaded, a runtime would get the
stream of another one that serves: while it captures a graph, the other's launches would become a part of that graph.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

import torch


class _Use:
    """An attribute of a stream that is in use, which ends with it.

    A weak reference to the stream itself would outlive it: torch's streams don't clear those (pytorch/pytorch#183403),
    and the next garbage collection would crash.
    """


_lock = threading.Lock()
_owned: WeakValueDictionary[tuple[str, object], _Use] = WeakValueDictionary()
"""The uses of streams, by device and handle."""
_used: set[tuple[str, object]] = set()
"""Those that were in use at some time. cuBLAS keeps its workspaces by stream, so a new owner should get such a stream:
else every model that is loaded and unloaded leaves some 200 MB."""
_DEALT = 32


def own_stream(device: torch.device, *, priority: int = 0) -> torch.cuda.Stream:
    """Returns a stream that no other caller gets while it is kept. Raises RuntimeError if all are in use."""
    with _lock:
        dealt = (torch.cuda.Stream(device, priority=priority) for _ in range(_DEALT))
        free = {key: each for each in dealt if (key := _key(each)) not in _owned}
        if not free:
            raise RuntimeError(
                f"all {_DEALT} streams of priority {priority} of {device} are in use"
            )
        key = next((key for key in free if key in _used), next(iter(free)))
        stream, use = free[key], _Use()
        vars(stream)["kestrel_use"] = _owned[key] = use
        _used.add(key)
        return stream


def _key(stream: torch.cuda.Stream) -> tuple[str, object]:
    return str(stream.device), stream.cuda_stream


@contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """As ``torch.cuda.stream(stream)``. That looks for the current device in the environment several times, which takes
    as long as a launch."""
    if torch.cuda.current_device() != stream.device_index:
        with torch.cuda.stream(stream):
            yield
        return
    before = torch.cuda.current_stream(stream.device_index)
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        torch.cuda.set_stream(before)


def record(event: torch.cuda.Event, device: torch.device) -> None:
    """Records ``event`` on the current stream of ``device``, which has an index. Without that, torch looks for the
    device as for a stream."""
    event.record(torch.cuda.current_stream(device.index))
