"""The interface of a runtime, which executes steps on a device. tests/fake_runtime.py implements it without torch."""

from __future__ import annotations

from typing import Protocol

from ..types.step import RuntimeLimits, StepPlan, StepResult


class StepHandle(Protocol):
    """An enqueued step. Only the runtime that returned it reads its contents."""


class Runtime(Protocol):
    """Executes steps in the order that `Lane` describes. One thread makes all calls."""

    @property
    def limits(self) -> RuntimeLimits:
        """The limits of the runtime. They never change."""
        ...

    def launch(self, plan: StepPlan) -> StepHandle:
        """Enqueues a step and returns without waiting for the device. Raises MemoryError if the device is full."""
        ...

    def is_done(self, handle: StepHandle) -> bool:
        """Returns whether `collect` would not wait for the device."""
        ...

    def collect(self, handle: StepHandle) -> StepResult:
        """Waits for this step, not for later ones, and returns its result. Steps of a lane are collected in the order
        of their launch, and a step after the step that its ``after`` names.

        The result names the rows whose values are not finite; all other rows are valid. Raises the error that the step
        raised, or MemoryError if the device has no memory left. After an error, the pages that the step wrote hold
        undefined values.
        """
        ...

    def close(self) -> None:
        """Frees the device's memory. Further calls have no effect."""
        ...
