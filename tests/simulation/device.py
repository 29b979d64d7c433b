"""The device: the fake runtime, with steps that take time, and faults that a seed chooses."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from kestrel_engine import clock
from kestrel_engine.types.requests import num_positions
from kestrel_engine.types.step import PREVIOUS, RuntimeLimits, StepPlan, StepResult
from tests.fake_runtime import FakeRuntime

_DECODE_S, _ROW_S, _CROP_S, _POSITION_S = 0.03, 0.005, 0.02, 0.0005


@dataclass(frozen=True, slots=True)
class Rates:
    """How often each fault happens: shares of the steps."""

    failing: float = 0.0
    refused: float = 0.0
    """Steps that cannot be launched."""
    out_of_memory: float = 0.0
    not_finite: float = 0.0
    slow: float = 0.0
    hangs_after: float = math.inf
    """Number of steps, after which no step ends any more."""


class Device(FakeRuntime):
    """Steps run one after the other; each is done at an instant that is known when it is launched. ``heard``: called
    with the name of a fault and the sequences that it may end."""

    def __init__(
        self,
        limits: RuntimeLimits,
        rng: random.Random,
        rates: Rates,
        heard: Callable[[str, set[int]], None],
    ) -> None:
        super().__init__(limits)
        self._rng, self._rates, self._heard = rng, rates, heard
        self._done_at: dict[int, float] = {}
        """Of the steps that are out, in the order of their launch."""
        self._failing: dict[int, Exception] = {}
        self._free_at = 0.0
        self.is_awaited_for_ever = False
        """Whether a step that hangs was read. Nothing would happen after that in one thread, so no turn may do it."""
        self._num_steps = 0

    @property
    def first_done_at(self) -> float:
        """When the first step that is out ends; 0 if none is out.

        Never if a step that is out hangs: a turn of the step loop may read several steps, and would wait for that one.
        """
        if self._free_at == math.inf and self._done_at:
            return math.inf
        return next(iter(self._done_at.values()), 0.0)

    def is_done(self, handle: StepPlan) -> bool:
        return self._done_at[handle.step_id] <= clock.now()

    def launch(self, plan: StepPlan) -> StepPlan:
        rng, rates = self._rng, self._rates
        self._num_steps += 1
        if rng.random() < rates.refused:
            self._heard("refused", _involved(plan))
            self.fail_launch = RuntimeError("scripted: the launch fails")
        handle = super().launch(plan)
        if rng.random() < rates.failing:
            self._heard("failing", _involved(plan))
            self._failing[plan.step_id] = RuntimeError("scripted: the step fails")
        elif rng.random() < rates.out_of_memory:
            self._heard("out of memory", _involved(plan))
            self._failing[plan.step_id] = MemoryError("scripted")
        rows = (*plan.prefill, *plan.decode)
        if rows and rng.random() < rates.not_finite:
            row = rng.choice(rows)
            self._heard("not finite", {row.sequence_id})
            self.bad_sequences.add(row.sequence_id)
        if plan.encode and rng.random() < rates.not_finite:
            image = rng.choice(plan.encode).image.key
            self._heard("bad image", set())
            self.bad_images.add(image)
        seconds = _cost(plan) * (rng.uniform(5, 100) if rng.random() < rates.slow else 1.0)
        if self._num_steps > rates.hangs_after:
            self._heard("hang", set())
            seconds = math.inf
        self._free_at = self._done_at[plan.step_id] = max(self._free_at, clock.now()) + seconds
        return handle

    def collect(self, handle: StepPlan) -> StepResult:
        done_at = self._done_at.pop(handle.step_id)
        if done_at == math.inf:
            self.is_awaited_for_ever = True
            raise RuntimeError("scripted: the step hangs")
        clock.sleep(max(0.0, done_at - clock.now()))
        self.fail_next = self._failing.pop(handle.step_id, None)
        return super().collect(handle)


def _involved(plan: StepPlan) -> set[int]:
    return {row.sequence_id for row in (*plan.prefill, *plan.decode)}


def _cost(plan: StepPlan) -> float:
    crops = sum(piece.last - piece.first for piece in plan.encode)
    known = [token for row in plan.prefill for token in row.tokens if token is not PREVIOUS]
    rows = len(plan.prefill) + len(plan.decode)
    decode = _DECODE_S + _ROW_S * rows if rows else 0.0
    return decode + _CROP_S * crops + _POSITION_S * num_positions(known)
