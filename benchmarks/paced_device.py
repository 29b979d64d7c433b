"""PacedRuntime: a device that takes a set time for a step and computes nothing, and an engine's parts around it.

It does to the interpreter what a GPU's runtime does: ``launch`` holds it while inputs are staged, ``collect`` waits
without it until the step's end, and steps follow one another without a gap as long as the next was launched in time.
What is missing from a rate of 1 / ``step_s`` is what the host cost the device.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import kestrel_engine
from kestrel_engine import EngineInfo, RuntimeConfig
from kestrel_engine.factory import Built
from kestrel_engine.model_config import parse_model_config
from kestrel_engine.preprocess.prompt import Tokenizer
from kestrel_engine.step import RuntimeLimits, StepPlan, StepResult, StepToken

TOKENIZER = Path(kestrel_engine.__file__).parent / "bundled" / "kestrel_tiny" / "tokenizer.json"
PAGE_SIZE = 10
NAMES = {"MainThread": "event loop", "kestrel-steps": "steps", "kestrel-delivery": "delivery"}
"""Threads of a server that are told apart; all others are gRPC's and the pool's."""


@dataclass
class Window:
    """What happened from one full step to a later one: seconds by the wall, and of CPU by thread name."""

    steps: int
    wall_s: float
    cpu_s: float
    by_thread: dict[str, float]
    late_s: list[float]
    """From the end of each step to the step thread's return: the sleep's own delay and the wait for the interpreter."""
    host_s: list[float]
    """From that return to the end of the next launch: the step thread's work, and its waits on the way."""


@dataclass
class _Snapshot:
    step: int
    wall: float
    cpu: float
    by_thread: dict[str, float] = field(default_factory=dict)


class PacedRuntime:
    """``batch_size`` rows make a full step; the window runs from the ``warm_up``-th of these to the latest."""

    def __init__(
        self, limits: RuntimeLimits, *, step_s: float, staging_s: float, warm_up: int = 20
    ) -> None:
        self._limits, self._step_s, self._staging_s = limits, step_s, staging_s
        self._warm_up = warm_up
        self._free_at = 0.0
        self._ends: dict[int, float] = {}
        words = [i for i, text in _plain_tokens() if text]
        self._tokens = itertools.cycle([StepToken(i) for i in words])
        self._full = 0
        self._late: list[float] = []
        self._host: list[float] = []
        self._returned_at = 0.0
        self._first: _Snapshot | None = None
        self._last: _Snapshot | None = None

    @property
    def limits(self) -> RuntimeLimits:
        return self._limits

    def launch(self, plan: StepPlan) -> StepPlan:
        now = time.perf_counter()
        while time.perf_counter() < now + self._staging_s:
            pass
        now = time.perf_counter()
        if len(plan.decode) == self._limits.max_batch_size:
            self._host.append(now - self._returned_at)
        self._free_at = max(now, self._free_at) + self._step_s
        self._ends[plan.step_id] = self._free_at
        return plan

    def collect(self, handle: StepPlan) -> StepResult:
        ends_at = self._ends.pop(handle.step_id)
        left = ends_at - time.perf_counter()
        time.sleep(max(0.0, left))
        self._returned_at = time.perf_counter()
        if len(handle.decode) == self._limits.max_batch_size:
            if left > 0:
                self._late.append(self._returned_at - ends_at)
            self._note()
        rows = handle.prefill + handle.decode
        return StepResult(
            tokens={r.sequence_id: next(self._tokens) for r in rows if r.sample is not None}
        )

    def close(self) -> None:
        pass

    def window(self) -> Window:
        """Raises RuntimeError if the batch was never full for long enough."""
        first, last = self._first, self._last
        if first is None or last is None or last.step <= first.step:
            raise RuntimeError("the batch was never full: ask for more tokens")
        return Window(
            steps=last.step - first.step,
            wall_s=last.wall - first.wall,
            cpu_s=last.cpu - first.cpu,
            by_thread={n: s - first.by_thread.get(n, 0.0) for n, s in last.by_thread.items()},
            late_s=self._late,
            host_s=self._host,
        )

    def _note(self) -> None:
        self._full += 1
        if self._full == self._warm_up:
            self._first = _snapshot(self._full)
        elif self._full % 10 == 0 and self._first is not None:
            self._last = _snapshot(self._full)


def paced_build(config: RuntimeConfig, *, step_s: float, staging_s: float) -> Built:
    """The parts of an engine that thinks it serves Moondream 2 on a device of its own."""
    model = parse_model_config({"config": {}}, family="moondream2")
    positions = model.text.max_context
    limits = RuntimeLimits(
        num_pages=(config.max_batch_size + 1) * (positions // PAGE_SIZE + 2),
        page_size=PAGE_SIZE,
        max_batch_size=config.max_batch_size,
        max_seq_length=positions,
        vocab_size=model.text.vocab_size,
    )
    info = EngineInfo(
        model="paced",
        family=model.family,
        skills=model.skills,
        max_context=positions,
        image_positions=model.image_positions,
        vocab_size=limits.vocab_size,
        num_parameters=0,
        weights_bytes=0,
        weights_fingerprint="",
        device="paced",
        dtype="none",
        max_batch_size=limits.max_batch_size,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        max_queue=config.max_queue,
        torch_version="",
    )
    runtime = PacedRuntime(limits, step_s=step_s, staging_s=staging_s)
    return Built(runtime, model, Tokenizer.from_file(TOKENIZER), info)


def _plain_tokens() -> list[tuple[int, str]]:
    """Ids whose text is plain, so that every token gives text at once; none of the first few, which are special."""
    vocabulary = json.loads(TOKENIZER.read_text())["model"]["vocab"]
    return [
        (i, text) for text, i in vocabulary.items() if i > 20 and text.removeprefix("Ġ").isascii()
    ]


def _snapshot(step: int) -> _Snapshot:
    by_thread: dict[str, float] = {}
    for thread in threading.enumerate():
        if thread.ident is not None and thread.is_alive():
            name = NAMES.get(thread.name, "others")
            clock = time.pthread_getcpuclockid(thread.ident)
            by_thread[name] = by_thread.get(name, 0.0) + time.clock_gettime(clock)
    cpu = time.process_time()
    by_thread["others"] = cpu - sum(s for name, s in by_thread.items() if name != "others")
    return _Snapshot(step, time.perf_counter(), cpu, by_thread)
