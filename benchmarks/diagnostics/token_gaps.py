"""Divides the gaps between tokens under load: at the step thread and for callers, with and without room for decoding.

python -m benchmarks.diagnostics.token_gaps --model moondream2 --random-weights --device cuda [--in-flight 64 32]

Runs the trace (benchmarks.trace) several times in one process, on one loaded model: as served, and with new work that
never leaves room for decode steps (StepPlan.leave_room). The order alternates. Quantiles are in ms. "First" are the
gaps between a request's first token and its second one. "Between steps" is the time from reading one decode step to
reading the next one, also where no sequence has a token in both. Without two lanes, both forms are the same.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from unittest.mock import patch

from kestrel_engine import StepEvent
from kestrel_engine.scheduler.lanes import beside

from ..models.opening import Opened, engine_on, model_arguments, opened_model, parse, server_gc
from ..reports.gpu_report import GpuReport, command_line
from ..reports.report import Row, benchmark_parser, median, quantile
from ..trace import warm_up
from ..traffic.chart_trace import add_trace_arguments, trace_from
from ..traffic.step_log import StepLog
from ..traffic.trace_run import Asked, RunPlan, run_trace, span, summary

QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True)
class Gaps:
    """Seconds."""

    callers: Sequence[float]
    first: Sequence[float]
    steps: Sequence[float]
    """Of all tokens, as the step thread reads them."""
    between: Sequence[float]
    """Between decode steps."""
    decode: Sequence[float]
    """Of decode steps on the device."""

    @classmethod
    def of(cls, asked: Sequence[Asked], events: Sequence[StepEvent]) -> Gaps:
        decoding = [event for event in events if event.num_decode]
        return cls(
            callers=[gap for each in asked for gap in each.answer.gaps_s],
            first=[each.answer.gaps_s[0] for each in asked if each.answer.gaps_s],
            steps=[gap for each in events for gap, count in each.token_gaps for _ in range(count)],
            between=[b.collected_at - a.collected_at for a, b in pairwise(decoding)],
            decode=[event.decode_s for event in decoding],
        )

    def row(self) -> Row:
        """Returns the quantiles of each, as "p50 / p95 / p99"."""
        named = {
            "callers": self.callers,
            "first": self.first,
            "step thread": self.steps,
            "between steps": self.between,
            "decode steps": self.decode,
        }
        return {name: _quantiles(seconds) for name, seconds in named.items()}


def _quantiles(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    return " / ".join(f"{1e3 * quantile(seconds, q):.1f}" for q in QUANTILES)


@contextmanager
def without_room() -> Iterator[None]:
    """Inside the context, new work leaves no room, and decode steps are not spaced."""
    with patch.object(beside, "MANY_WAITING", sys.maxsize):
        yield


async def measure(args: argparse.Namespace, opened: Opened, report: GpuReport) -> None:
    log = StepLog()
    async with engine_on(opened, log) as running:
        trace = trace_from(args, opened.built.codec.encode)
        await warm_up(running, max(args.in_flight), quick=args.quick)
        with server_gc():
            for in_flight in args.in_flight:
                plan = RunPlan(in_flight, args.tokens, {"temperature": 0.0}, args.limit)
                rates: dict[bool, list[float]] = {False: [], True: []}
                for room in (False, True) * args.rounds:
                    await running.engine.flush_caches()
                    log.clear()
                    with nullcontext() if room else without_room():
                        asked = await run_trace(running.target, trace, plan)
                    within = span(asked)
                    rate = float(summary(asked)["requests/s"])
                    rates[room].append(rate)
                    row: Row = {
                        "model": opened.name,
                        "in flight": in_flight,
                        "room": "yes" if room else "no",
                        "requests/s": rate,
                        **Gaps.of(asked, log.events(*within)).row(),
                        "rows": log.between(*within).mean_batch,
                    }
                    report.add("Gaps between tokens (ms: p50 / p95 / p99)", row)
                name = f"{opened.name}: {in_flight} in flight: requests/s with room over without"
                report.figure(name, median(rates[True]) / median(rates[False]), "")


def main(arguments: Sequence[str] | None = None) -> GpuReport:
    made = benchmark_parser("diagnostics.token_gaps", __doc__)
    made.add_argument("--in-flight", type=int, nargs="+", default=[64], metavar="N", help="[64]")
    made.add_argument("--tokens", type=int, default=30, metavar="N", help="of an answer [30]")
    made.add_argument("--limit", type=float, default=5.0, metavar="S", help="of a run [5]")
    made.add_argument("--rounds", type=int, default=2, metavar="N", help="runs of each form [2]")
    add_trace_arguments(made)
    args, of_model = parse(made, arguments)
    if args.quick:
        args.num_prompts, args.in_flight, args.rounds = 6, [2], 1
        args.tokens = min(args.tokens, 6)
    config = model_arguments(of_model, quick=args.quick)
    report = GpuReport(
        "token_gaps",
        vars(args),
        command=command_line("benchmarks.diagnostics.token_gaps", arguments),
    )
    with opened_model(config) as opened:
        asyncio.run(measure(args, opened, report))
    report.finish(args.json)
    return report


if __name__ == "__main__":
    main()
