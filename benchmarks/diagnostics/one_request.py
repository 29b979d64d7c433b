"""Divides the time of a request that is alone in the engine into its parts: host, decoder and device.

python -m benchmarks.diagnostics.one_request --model moondream2 --random-weights --device cuda [--tokens 3]

The questions are those of the trace (benchmarks.trace), one in flight. Prints medians in ms, of questions about new
images and about known ones. The rows of the table follow one another, except those in parentheses, which are parts of
others.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kestrel_engine import ImageEvent, RequestEvent, StepEvent
from kestrel_engine.runtime.protocol import Runtime, StepHandle
from kestrel_engine.types.step import RuntimeLimits, StepPlan, StepResult

from ..models.opening import MODEL_FLAGS, Opened, engine_on, run_on_model, server_gc
from ..reports.program import Flag, Program
from ..reports.report import Report, Row, median
from ..trace import warm_up
from ..traffic.chart_trace import make_trace

PROGRAM = Program(
    "diagnostics.one_request",
    __doc__,
    Flag("--tokens", 3, "tokens of an answer"),
    Flag("--requests", 100, "questions", quick=lambda given: min(given, 5)),
    others=MODEL_FLAGS,
)


class TimedRuntime:
    """A runtime that notes how long the host takes to launch and to read each step."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.launches: list[tuple[float, float]] = []
        """The begin and the end of each launch, by the monotonic clock."""

    @property
    def limits(self) -> RuntimeLimits:
        return self._runtime.limits

    def launch(self, plan: StepPlan) -> StepHandle:
        began = time.monotonic()
        handle = self._runtime.launch(plan)
        self.launches.append((began, time.monotonic()))
        return handle

    def is_done(self, handle: StepHandle) -> bool:
        return self._runtime.is_done(handle)

    def collect(self, handle: StepHandle) -> StepResult:
        return self._runtime.collect(handle)

    def close(self) -> None:
        self._runtime.close()


class OneLog:
    """An observer that keeps the events of the request that runs."""

    def __init__(self) -> None:
        self.steps: list[StepEvent] = []
        self.request: RequestEvent | None = None

    def on_step(self, event: StepEvent) -> None:
        self.steps.append(event)

    def on_request(self, event: RequestEvent) -> None:
        self.request = event

    def on_image(self, event: ImageEvent) -> None:
        """Does nothing."""


@dataclass(frozen=True)
class Seen:
    """One request: when its caller began and had the whole answer, its events, and the launches of its steps."""

    began: float
    ended: float
    request: RequestEvent
    steps: Sequence[StepEvent]
    launches: Sequence[tuple[float, float]]

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part."""
        request, steps = self.request, self.steps
        prepared = request.prepared_at or request.accepted_at
        scheduled, token = request.scheduled_at, request.first_token_at
        assert scheduled is not None and token is not None
        begin, end = self.launches[0]
        vision, prompt = sum(s.vision_s for s in steps), sum(s.prefill_s for s in steps)
        return {
            "until the image is prepared": prepared - self.began,
            "(the decoder's work)": request.metrics.preprocess_time_ms / 1e3,
            "until the step is planned": scheduled - prepared,
            "until its launch begins": begin - scheduled,
            "the host launches the first step": end - begin,
            "until the first token is read": token - end,
            "(the device: images)": vision,
            "(the device: prompt)": prompt,
            "(waiting of the device, until the first token)": token - begin - vision - prompt,
            "until the last token is read": request.finished_at - token,
            "(the device: decode steps)": sum(s.decode_s for s in steps),
            "until the caller has it": self.ended - request.finished_at,
            "all": self.ended - self.began,
        }


async def measure(args: argparse.Namespace, opened: Opened, report: Report) -> None:
    log, timed = OneLog(), TimedRuntime(opened.built.runtime)
    timing: Any = timed
    watched = replace(opened, built=replace(opened.built, runtime=timing))
    trace = make_trace(opened.built.codec.encode, num_prompts=args.requests)
    seen: dict[str, list[Seen]] = {"new": [], "known": []}
    async with engine_on(watched, log) as running:
        await warm_up(running, 4, quick=args.quick)
        with server_gc():
            for question in trace.questions:
                log.steps.clear()
                timed.launches.clear()
                log.request = None
                began = time.monotonic()
                image = trace.images[question.image]
                await running.target.forced_query(image, question.text, args.tokens)
                ended = time.monotonic()
                while log.request is None:
                    await asyncio.sleep(0)
                found = Seen(began, ended, log.request, tuple(log.steps), tuple(timed.launches))
                seen["known" if question.is_repeat else "new"].append(found)
    for name, those in seen.items():
        if not those:
            continue
        for part in those[0].parts:
            row: Row = {"model": opened.name, "image": name, "requests": len(those), "part": part}
            row["ms"] = round(1e3 * median([each.parts[part] for each in those]), 3)
            report.add("One request at a time (medians in ms)", row)


def main(arguments: Sequence[str] | None = None) -> Report:
    return run_on_model(PROGRAM, measure, arguments)


if __name__ == "__main__":
    main()
