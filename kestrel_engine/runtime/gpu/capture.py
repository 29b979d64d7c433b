"""captured: rehearses a pass, then captures it as a CUDA graph.

A rehearsal compiles and loads what the pass launches: Triton's kernels, cuBLAS's choices, cuDNN's plans. Nothing of
this may happen during a capture. Layers of one kind launch the same, so a rehearsal runs a few of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from .streams import own_stream

REHEARSED_LAYERS = 3
"""Layers of each kind that are enough: a first one, one between, and a last one. More launch the same kernels."""

_T = TypeVar("_T")
_thread = threading.local()


def captured(
    body: Callable[[], object], stream: torch.cuda.Stream | None, pool: Any
) -> torch.cuda.CUDAGraph:
    """Returns the graph of ``body``, which enqueues a pass on the current stream and does not wait.

    ``stream``: of a CUDA device. ``pool``: for the graph's memory, as torch.cuda.graph_pool_handle() returns it.
    """
    assert stream is not None, "graphs are captured on a stream of a CUDA device"
    with torch.cuda.stream(stream):
        with rehearsal():
            body()
        stream.synchronize()
        return record_graph(body, pool)


def record_graph(body: Callable[[], object], pool: Any) -> torch.cuda.CUDAGraph:
    """Captures ``body`` on the current stream."""
    graph = torch.cuda.CUDAGraph()
    # Other threads may use the device during startup, which must not break the capture.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        body()
    finally:
        graph.capture_end()
    return graph


def first_fork(stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """Returns a graph of two branches, captured and replayed, that computes nothing of use. Keep it.

    CUDA 13.0 runs the branches of the first graph of a process that has two one after the other, and those of nearly
    all later ones at the same time. So this graph is to be the first.
    """
    device = stream.device
    side = own_stream(device)
    counts = torch.zeros(2, device=device)

    def body() -> None:
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            counts[1].add_(1)
        counts[0].add_(1)
        stream.wait_stream(side)

    graph = captured(body, stream, torch.cuda.graph_pool_handle())
    with torch.cuda.stream(stream):
        graph.replay()
    stream.synchronize()
    return graph


@contextmanager
def rehearsal() -> Iterator[None]:
    """Inside the context, and in this thread, passes run only their `rehearsed` layers."""
    _thread.rehearses = True
    try:
        yield
    finally:
        _thread.rehearses = False


def rehearsed(layers: Sequence[_T], kind: Callable[[_T], Hashable] | None = None) -> Sequence[_T]:
    """Returns all ``layers``, or in a rehearsal the first two and the last one of each kind. ``kind``: that of a layer;
    None if all have one kind. A list of one length and kinds has its layers at the same places."""
    if not getattr(_thread, "rehearses", False):
        return layers
    places: dict[Hashable, list[int]] = {}
    for place, layer in enumerate(layers):
        places.setdefault(kind(layer) if kind else None, []).append(place)
    first = REHEARSED_LAYERS - 1
    chosen = {p for of_kind in places.values() for p in (*of_kind[:first], of_kind[-1])}
    return [layers[place] for place in sorted(chosen)]
