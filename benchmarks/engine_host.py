"""Measures the step thread's host time from a step's collect to the next launch, on a device that computes nothing.

python -m benchmarks.engine_host [--quick] [--json FILE]

It uses the real EngineLoop, scheduler, controls and delivery thread. Every sequence has an image prefix of 730
positions in pages of 10 and decodes at least 1,000 tokens. The garbage collector has the server's settings. Delivery
runs but is not measured: a step of the device lasts until delivery has caught up, so delivery and step thread do not
compete for the GIL during the measured time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence

import numpy as np

from kestrel_engine.runtime.protocol import StepHandle
from kestrel_engine.scheduler.budget import StepBudget
from kestrel_engine.scheduler.policy import SchedulerPolicy
from kestrel_engine.skills.base import SkillContext
from kestrel_engine.skills.text.answer import AnswerControl, AnswerOutput
from kestrel_engine.steps.active import SkillSubmission
from kestrel_engine.steps.delivery import Delivery, DeliveryThread
from kestrel_engine.steps.loop import PIPELINE_DEPTH, EngineLoop
from kestrel_engine.types.events import StreamUpdate
from kestrel_engine.types.model_config import parse_model_config
from kestrel_engine.types.requests import ImageBlock, PreparedImage, SamplingParams
from kestrel_engine.types.step import RuntimeLimits, StepPlan, StepResult, StepToken
from kestrel_engine.types.submission import Submission
from kestrel_grpc.process.interpreter import GC_THRESHOLDS

from .reports.program import Program
from .reports.report import Report, median, quantile

PREFIX, PAGE_SIZE = 730, 10
WARM_UP = 50
"""Steps before the measurement."""


class LetterCodec:
    """A tokenizer in which every id is one letter."""

    def encode(self, text: str) -> list[int]:
        return [100 + ord(c) for c in text]

    def decode(self, ids: list[int] | tuple[int, ...]) -> str:
        return "a" * len(ids)


class CountingOutput(AnswerOutput):
    """Counts all delivered tokens. Only the delivery thread writes the counter."""

    num_delivered = 0

    def push(self, token: StepToken) -> list[StreamUpdate]:
        updates = super().push(token)
        CountingOutput.num_delivered += 1
        return updates


class NullRuntime:
    """Samples id 200 in every row without delay. Records the time from each collect to the next launch."""

    def __init__(self, limits: RuntimeLimits, batch_size: int) -> None:
        self._limits, self._batch_size = limits, batch_size
        self._token = StepToken(200)
        self._num_sampled = 0
        self._collected_at = self._launched_at = 0.0
        self.before_launch: list[float] = []
        self.after_launch: list[float] = []
        """Seconds from each launch to the next collect, which the loop spends as well."""

    @property
    def limits(self) -> RuntimeLimits:
        return self._limits

    def launch(self, plan: StepPlan) -> StepPlan:
        if len(plan.decode) == self._batch_size:
            self.before_launch.append(time.perf_counter() - self._collected_at)
        self._launched_at = time.perf_counter()
        return plan

    def is_done(self, handle: StepHandle) -> bool:
        return True

    def collect(self, handle: StepHandle) -> StepResult:
        assert isinstance(handle, StepPlan)
        if len(handle.decode) == self._batch_size:
            self.after_launch.append(time.perf_counter() - self._launched_at)
        while CountingOutput.num_delivered < self._num_sampled:
            time.sleep(20e-6)
        rows = handle.prefill + handle.decode
        tokens = {row.sequence_id: self._token for row in rows if row.sample is not None}
        self._num_sampled += len(tokens)
        result = StepResult(tokens=tokens)
        self._collected_at = time.perf_counter()
        return result

    def close(self) -> None:
        pass


def work(number: int, max_tokens: int, context: SkillContext) -> SkillSubmission:
    """Returns a caption request about an image of its own."""
    image = PreparedImage(f"p{number}", np.zeros((2, 1, 1, 3), np.uint8), (1, 1), 1, 1)
    control = AnswerControl(context)
    submission = Submission(
        sequence_id=number,
        prompt=(0, ImageBlock(image.key, PREFIX - 1), 1, 2, 3),
        images=(image,),
        sampling=SamplingParams(),
        rule=control.rule(0),
        max_tokens=max_tokens,
        arrived_at=time.monotonic(),
        deadline_at=time.monotonic() + 3600,
    )
    output = CountingOutput("caption", context)
    return SkillSubmission(str(number), submission, control, output)


def limits_for(batch_size: int, max_tokens: int) -> RuntimeLimits:
    """Returns limits with pages for ``batch_size`` requests of ``work``, and for one more."""
    positions = PREFIX + 3 + max_tokens
    return RuntimeLimits(
        num_pages=(batch_size + 1) * (positions // PAGE_SIZE + 2),
        page_size=PAGE_SIZE,
        max_batch_size=batch_size,
        max_seq_length=positions,
        vocab_size=1000,
    )


def loop_with(
    runtime: NullRuntime, delivery: DeliveryThread, num_requests: int, max_tokens: int
) -> EngineLoop:
    """Returns a loop, not started, that has ``num_requests`` requests of ``work``."""
    model = parse_model_config({"config": {}}, family="moondream3")
    context = SkillContext(model=model, codec=LetterCodec())
    policy = SchedulerPolicy(budget=StepBudget(prefill_positions=10**9, crops=10**9))
    loop = EngineLoop(runtime, delivery, policy=policy)
    for number in range(num_requests):
        loop.submit(work(number, max_tokens, context))
    return loop


def measure(batch_size: int, queue_length: int, num_steps: int) -> dict[str, float | int | str]:
    """Runs ``num_steps`` full decode steps with ``queue_length`` waiting requests."""
    max_tokens = num_steps + WARM_UP + PIPELINE_DEPTH + 10
    CountingOutput.num_delivered = 0
    runtime = NullRuntime(limits_for(batch_size, max_tokens), batch_size)

    def deliver(deliveries: list[Delivery]) -> None:
        """Stands for the engine's call into its event loop."""

    delivery = DeliveryThread(deliver, lambda number: None)
    loop = loop_with(runtime, delivery, batch_size + queue_length, max_tokens)
    delivery.start()
    loop.start()
    while len(runtime.after_launch) < WARM_UP + num_steps:
        assert loop.alive, "the loop died"
        time.sleep(0.01)
    loop.stop()
    delivery.stop()
    before = [1e6 * s for s in runtime.before_launch[WARM_UP : WARM_UP + num_steps]]
    after = [1e6 * s for s in runtime.after_launch[WARM_UP : WARM_UP + num_steps]]
    return {
        "batch": batch_size,
        "queue": queue_length,
        "us": median(before),
        "us a row": median(before) / batch_size,
        "us p95": quantile(before, 0.95),
        "us after": median(after),
    }


def main(arguments: Sequence[str] | None = None) -> Report:
    with Program("engine_host", __doc__).reporting(arguments) as (args, _, report):
        steps = 10 if args.quick else 1000
        gc.set_threshold(*GC_THRESHOLDS)
        title = "Host time from collect to launch, and from launch to collect (us after)"
        by_batch = {}
        for batch_size in (1, 4, 16, 64, 256, 512):
            row = by_batch[batch_size] = measure(batch_size, 10, steps)
            report.add(title, row)
        by_queue = {}
        for queue_length in (10, 100, 1000, 10_000):
            row = by_queue[queue_length] = measure(64, queue_length, steps)
            report.add(title, row)
        us = {key: float(row["us"]) for key, row in by_batch.items()}
        report.bar("us from collect to launch at a batch of 64", us[64], 300.0)
        # Fixed costs dominate a small batch, so growth is compared between batches in which they are negligible.
        report.bar("batch 512 over batch 64 (linear: 8)", us[512] / us[64], 8.0 * 1.1)
        waiting = {key: float(row["us"]) for key, row in by_queue.items()}
        report.bar("queue of 10,000 over queue of 10", waiting[10_000] / waiting[10], 1.2)
    return report


if __name__ == "__main__":
    main()
