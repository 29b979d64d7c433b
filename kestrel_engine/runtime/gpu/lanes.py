"""Lanes: the streams of a runtime, and which steps wait for which (types.step.Lane).

docs/lab/measurements.md (Decoding beside images) has what the second lane gives and costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...kernels.spacing import spaced
from ...types.step import Lane, StepPlan
from .streams import on_stream, own_stream

HIGH_PRIORITY = -1
"""Kernels of a stream with this priority start before waiting blocks of the other streams' kernels."""


class Lanes:
    """``stream``: for steps of ALL and NEW_WORK. ``decode_stream``: for steps of DECODE, the same one with one lane.
    Both are None without CUDA."""

    def __init__(self, device: torch.device, *, two: bool) -> None:
        self.stream = self.decode_stream = None
        self.decode_priority = HIGH_PRIORITY if two else 0
        if device.type == "cuda":
            self.stream = self.decode_stream = own_stream(device)
            if two:
                self.decode_stream = own_stream(device, priority=HIGH_PRIORITY)
        self._began = torch.zeros(1, dtype=torch.int64, device=device)
        """When the last spaced step of DECODE began, by the device's clock."""
        self._decoded: torch.cuda.Event | None = None
        """The end of the last step of DECODE."""
        self._ends: dict[int, torch.cuda.Event] = {}
        """The ends of steps of NEW_WORK that may still run, by step id."""

    @contextmanager
    def of(self, plan: StepPlan) -> Iterator[None]:
        """Makes the stream of the plan's lane the current one, after it waits for the steps that it depends on, and
        until ``spacing_s`` after the spaced step before began."""
        if self.stream is None or self.decode_stream is None:
            yield
            return
        stream = self.decode_stream if plan.lane is Lane.DECODE else self.stream
        if plan.lane is Lane.DECODE:
            end = None if plan.after is None else self._ends.get(plan.after)
            if end is not None:
                stream.wait_event(end)
        elif self._decoded is not None:
            stream.wait_event(self._decoded)
        with on_stream(stream):
            if plan.spacing_s:
                spaced(self._began, plan.spacing_s)
            yield

    def enqueued(self, plan: StepPlan, end: torch.cuda.Event | float) -> None:
        """Notes the ``end`` of a step, on the stream of its lane."""
        if not isinstance(end, torch.cuda.Event):
            return
        if plan.lane is Lane.DECODE:
            self._decoded = end
        elif plan.lane is Lane.NEW_WORK:
            self._ends[plan.step_id] = end
            for step_id in [
                i for i, each in self._ends.items() if i != plan.step_id and each.query()
            ]:
                del self._ends[step_id]

    def warm_up(self) -> None:
        """Compiles the kernel that spaces steps, if there are two lanes."""
        if self.decode_stream is not self.stream:
            with torch.cuda.stream(self.decode_stream):
                spaced(self._began, 1e-6)

    def synchronize(self) -> None:
        for stream in {self.stream, self.decode_stream}:
            if stream is not None:
                stream.synchronize()
