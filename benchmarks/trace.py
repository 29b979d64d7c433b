"""Runs the trace through the engine: requests from encoded JPEG bytes to the last token, in one process.

python -m benchmarks.trace --model moondream2 --random-weights --device cuda --in-flight 64 1 --tokens 3 30 --json F
python -m benchmarks.trace --model tests/models/kestrel-tiny --num-prompts 50 --in-flight 8

Every combination of --in-flight and --tokens starts with empty caches, on one loaded model. The length of an answer is
forced: the skill ``forced_query`` is a greedy query whose rule forbids the end token. A caller sends the next question
of the trace when its last one is answered (closed loop), so an image's second question is asked while its first one is
answered, or shortly after. --saturate measures long answers of as many streams instead.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace

from .models.opening import MODEL_FLAGS, Opened, RunningEngine, engine_on, run_on_model, server_gc
from .reports import bars
from .reports.program import Flag, Program
from .reports.report import Report, Row
from .traffic.chart_trace import TRACE_FLAGS, ChartTrace, Question, draw_images, trace_from
from .traffic.step_log import StepLog
from .traffic.trace_run import (
    RunPlan,
    Steady,
    part_summary,
    parts,
    run_trace,
    span,
    steady,
    summary,
)

WARM_UP_FROM = 1_000_000
"""The images of the warm-up, which are not in the trace."""
WARM_UP_IMAGES = 24
RUN_FLAGS = (
    Flag("--in-flight", (64,), "callers at once", quick=lambda given: [min(n, 4) for n in given]),
    Flag(
        "--tokens",
        None,
        "tokens of an answer [3; with --saturate, the trace runs only if this is set]",
        nargs="+",
        type=int,
    ),
    Flag("--limit", (600.0,), "seconds of a run: one for all, or one for each --in-flight"),
    Flag(
        "--saturate",
        False,
        "measure tokens/s of long answers of all streams at once, each about a different image",
    ),
    Flag(
        "--saturate-tokens",
        768,
        "tokens of each answer with --saturate",
        quick=lambda given: min(given, 12),
    ),
    *TRACE_FLAGS,
)
PROGRAM = Program("trace", __doc__, *RUN_FLAGS, others=MODEL_FLAGS)


def settle(args: argparse.Namespace) -> None:
    """Limits the trace to the images that a run needs, and with --quick to a hundredth."""
    if args.tokens is None:
        args.tokens = [] if args.saturate else [3]
    if not args.tokens:
        args.num_prompts = args.num_prompts or 2 * max(args.in_flight)
    if args.quick:
        args.num_prompts = min(args.num_prompts or 6, 6)


def plan_of(args: argparse.Namespace, in_flight: int, tokens: int, namespace: str = "") -> RunPlan:
    limit_s = args.limit[args.in_flight.index(in_flight) % len(args.limit)]
    return RunPlan(in_flight, tokens, limit_s, namespace)


async def warm_up(running: RunningEngine, in_flight: int, *, quick: bool) -> None:
    """Runs every path once with images of the trace's sizes, so that nothing is compiled during the measurement."""
    count = 1 if quick else min(max(in_flight // 2, 3), WARM_UP_IMAGES)
    images = draw_images(count, first=WARM_UP_FROM)
    base = ChartTrace(images, ())
    for repeat in (False, True):
        trace = replace(base, questions=warm_up_questions(count, repeat=repeat))
        await run_trace(running.target, trace, RunPlan(in_flight, 8))
    await running.engine.flush_caches()


def warm_up_questions(count: int, *, repeat: bool) -> tuple[Question, ...]:
    text = "how many bars are there" if repeat else "what is the value of the last bar"
    return tuple(Question(i, text, 0, repeat) for i in range(count))


async def measure_trace(
    opened: Opened,
    running: RunningEngine,
    log: StepLog,
    trace: ChartTrace,
    plan: RunPlan,
    report: Report,
) -> None:
    """Runs the trace once and reports its tables and figures."""
    await running.engine.flush_caches()
    log.clear()
    print(f"{opened.name}: {plan.in_flight} in flight, {plan.tokens} tokens", flush=True)
    asked = await run_trace(running.target, trace, plan)
    expected = plan.tokens
    assert all(a.answer.output_tokens == expected for a in asked), "an answer of another length"
    whole, phases = summary(asked), log.between(*span(asked))
    key: Row = {"model": opened.name, "in flight": plan.in_flight, "tokens": plan.tokens}
    report.add("Trace through the engine (times in ms)", {**key, **whole})
    for part, those in parts(asked).items():
        report.add("Uncached images and repeats (ms)", {**key, "of": part, **part_summary(those)})
    report.add(
        "The device, by the runtime's own clocks (shares of the wall)",
        {
            **key,
            "busy": phases.busy,
            "vision": phases.vision,
            "prefill": phases.prefill,
            "decode": phases.decode,
            "steps/s": phases.steps_s,
            "mean batch": phases.mean_batch,
            "crops/s": phases.crops_s,
        },
    )
    judge = opened.on_cuda
    in_fp8 = opened.config.fp8_gemms == "all" and opened.kv_in_fp8
    run = (f"{opened.name} fp8" if in_fp8 else opened.name, plan.in_flight, plan.tokens)
    name = f"{run[0]}: {plan.in_flight} in flight, {plan.tokens} tokens"
    limits = bars.of_run(bars.TRACE, *run) if judge else bars.NONE
    report.figure(f"{name}: requests/s", float(whole["requests/s"]), "1/s", limits)
    limits = bars.of_run(bars.TRACE_GAP_P95_MS, *run) if judge else bars.NONE
    if plan.tokens > 3:
        gap = float(whole["itl p95"])
        report.figure(f"{name}: p95 gap between tokens", gap, "ms", limits, at_least=False)
    for part, those in parts(asked).items():
        limits = bars.of_run(bars.TRACE_P50_MS, *run, part) if judge else bars.NONE
        if those:
            p50 = float(part_summary(those)["p50"])
            report.figure(f"{name}: p50 of {part}", p50, "ms", limits, at_least=False)


async def measure_saturated(
    opened: Opened,
    running: RunningEngine,
    log: StepLog,
    trace: ChartTrace,
    plan: RunPlan,
    report: Report,
) -> Steady:
    """Measures tokens/s while ``plan.in_flight`` streams of long answers decode."""
    print(f"{opened.name}: {plan.in_flight} streams of {plan.tokens} tokens", flush=True)
    numbers = saturating(trace.questions, plan.in_flight)
    # Their images are cached first, so that all begin to decode at about the same time.
    await run_trace(running.target, trace, replace(plan, tokens=1), numbers)
    log.clear()
    asked = await run_trace(running.target, trace, plan, numbers)
    found = steady([a.answer for a in asked])
    phases = log.between(found.begin, found.end)
    report.add(
        "Saturated decode, engine alone",
        {
            "model": opened.name,
            "streams": plan.in_flight,
            "tokens": plan.tokens,
            "tokens/s": found.tokens_s,
            "seconds": found.end - found.begin,
            "decode busy": phases.decode,
            "steps/s": phases.steps_s,
            "mean batch": phases.mean_batch,
        },
    )
    name = f"{opened.name}: {plan.in_flight} streams, engine alone"
    report.figure(f"{name}: tokens/s", found.tokens_s, "1/s")
    report.figure(f"{name}: device busy by its own clocks", phases.busy, "of the wall")
    return found


def saturating(questions: Sequence[Question], streams: int) -> list[int]:
    """Returns one first question about an image for each stream. Repeats them if there are too few."""
    first = [i for i, q in enumerate(questions) if not q.is_repeat]
    assert first, "a trace without questions"
    return [first[i % len(first)] for i in range(streams)]


async def measure(args: argparse.Namespace, opened: Opened, report: Report) -> None:
    settle(args)
    log = StepLog()
    async with engine_on(opened, log) as running:
        trace = trace_from(args, opened.built.codec.encode)
        began = time.perf_counter()
        await warm_up(running, max(args.in_flight), quick=args.quick)
        print(f"warmed up in {time.perf_counter() - began:.1f} s", flush=True)
        with server_gc():
            if args.saturate:
                for in_flight in args.in_flight:
                    plan = plan_of(args, in_flight, args.saturate_tokens)
                    await measure_saturated(opened, running, log, trace, plan, report)
            for in_flight in args.in_flight:
                for tokens in args.tokens:
                    plan = plan_of(args, in_flight, tokens)
                    await measure_trace(opened, running, log, trace, plan, report)


def main(arguments: Sequence[str] | None = None) -> Report:
    return run_on_model(PROGRAM, measure, arguments)


if __name__ == "__main__":
    main()
