"""What a device must do. Small enough to fake: see fake.py."""

from __future__ import annotations

from typing import Protocol

from ..types.step import RuntimeLimits, StepPlan, StepResult


class StepHandle(Protocol):
    """An enqueued step; opaque to everybody but the runtime that made it."""


class Runtime(Protocol):
    """Executes steps in the order they are launched. All calls come from one thread."""

    @property
    def limits(self) -> RuntimeLimits:
        """Fixed for the runtime's life."""
        ...

    def launch(self, plan: StepPlan) -> StepHandle:
        """Enqueues a step and returns without waiting for the device. Raises MemoryError if the device is full."""
        ...

    def collect(self, handle: StepHandle) -> StepResult:
        """Waits for this step only. A row whose numbers are not finite is named in the result, the other rows are good.
        Raises what the step raised, MemoryError if the device has no memory left; the pages that the step touched then
        hold garbage."""
        ...

    def close(self) -> None:
        """Frees the device. Idempotent."""
        ...
