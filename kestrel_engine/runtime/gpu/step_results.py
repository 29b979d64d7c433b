"""StepResults: brings the results of a step's passes to the host, and makes a StepResult of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.decode_io import RESULT_WIDTH, flag_rows
from ...types.model_config import ModelConfig
from ...types.step import Row, StepPlan, StepResult
from ..reading import PendingReading
from ..refinement import results_of
from .sampling.rows import spec_of
from .sampling.rules import TOP_WIDTH, decode_results
from .state.staging import Results


@dataclass(frozen=True, slots=True, eq=False)
class PassOutput:
    """The sampling ``rows`` of a pass with their ``results`` [rows, RESULT_WIDTH] int32. ``tops``: their likeliest ids,
    [rows, TOP_WIDTH] int32; None if no row asks for them."""

    rows: Sequence[Row]
    results: Tensor
    tops: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class PendingStep:
    """An enqueued step. ``outputs``: those of its passes. ``shared_groups``: as in StepResult. ``flags``: the prompt
    rows of each pass that has rows without sampling, with flags [rows, 1] int32 that are 1 for rows that are not
    finite. ``readings``: by sequence id. All are valid after the last of ``marks``, which time the parts of the step.
    So are ``refined``, the masks of ``plan.refine``, [rows, crop_size, crop_size] float32; None without such rows."""

    plan: StepPlan
    readings: dict[int, PendingReading]
    outputs: list[PassOutput]
    shared_groups: tuple[int, ...]
    flags: list[tuple[Sequence[Row], Tensor]]
    refined: Tensor | None
    marks: list[torch.cuda.Event | float]

    @property
    def is_done(self) -> bool:
        last = self.marks[-1]
        return last.query() if isinstance(last, torch.cuda.Event) else True

    def wait(self) -> None:
        """Returns when the step is done. Raises the errors of its kernels."""
        last = self.marks[-1]
        if isinstance(last, torch.cuda.Event):
            last.synchronize()


class StepResults:
    """Owns the pinned memory of the results: those of a pass are copied to it when they are enqueued, and its place is
    free again when they have been read. ``max_rows``: the most rows of a pass."""

    def __init__(self, config: ModelConfig, max_rows: int, device: torch.device) -> None:
        self._config = config
        self._results = Results(max_rows, RESULT_WIDTH, device)
        self._tops = Results(max_rows, TOP_WIDTH, device)
        self._flags = Results(max_rows, 1, device)

    def output(self, rows: Sequence[Row], results: Tensor, tops: Tensor | None) -> PassOutput:
        """Enqueues the copy of a pass's results to the host."""
        fetched = None if tops is None else self._tops.fetch(tops)
        return PassOutput(rows, self._results.fetch(results), fetched)

    def flags(self, hidden: Tensor) -> Tensor:
        """Enqueues the check of the rows of ``hidden`` [rows, dim], and the copy of its result to the host: [rows, 1]
        int32, 1 for rows that are not finite."""
        bad = torch.empty(len(hidden), 1, dtype=torch.int32, device=hidden.device)
        flag_rows(hidden, bad)
        return self._flags.fetch(bad)

    def read(self, step: PendingStep) -> StepResult:
        """Waits for ``step`` and returns its results. Call it once for each step. Raises torch's own errors."""
        tokens = {}
        readings = {}
        non_finite: set[int] = set()
        step.wait()
        for each in step.outputs:
            specs = [spec_of(row) for row in each.rows]
            found = decode_results(each.results, specs, self._config, each.tops)
            self._results.release(each.results)
            if each.tops is not None:
                self._tops.release(each.tops)
            for row, token in zip(each.rows, found, strict=True):
                if token is None:
                    non_finite.add(row.sequence_id)
                else:
                    tokens[row.sequence_id] = token
        for prompts, flags in step.flags:
            bad = flags[:, 0].tolist()
            self._flags.release(flags)
            non_finite |= {r.sequence_id for r, b in zip(prompts, bad, strict=True) if b}
        for sequence_id, fetched in step.readings.items():
            if fetched.is_finite:
                readings[sequence_id] = fetched.value()
            else:
                non_finite.add(sequence_id)
        refined = {}
        if step.refined is not None:
            refined = results_of(step.plan.refine, step.refined.numpy())
        decode_s, vision_s, prefill_s = _seconds(step.marks)
        return StepResult(
            tokens=tokens,
            readings=readings,
            non_finite=frozenset(non_finite),
            refined=refined,
            shared_groups=step.shared_groups,
            vision_s=vision_s,
            prefill_s=prefill_s,
            decode_s=decode_s,
        )


def _seconds(marks: list[torch.cuda.Event | float]) -> list[float]:
    """Returns the seconds between each two consecutive marks."""
    spans = []
    for before, after in itertools.pairwise(marks):
        if before is after:
            spans.append(0.0)
        elif isinstance(before, torch.cuda.Event):
            assert isinstance(after, torch.cuda.Event)
            spans.append(before.elapsed_time(after) / 1000)
        else:
            assert isinstance(after, float)
            spans.append(after - before)
    return spans
