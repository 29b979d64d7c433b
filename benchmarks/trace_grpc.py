"""Runs the trace through the service: a server process, client processes on the same host, streaming RPCs.

python -m benchmarks.trace_grpc --model moondream2 --random-weights --device cuda --in-flight 64 --tokens 3 --json F
python -m benchmarks.trace_grpc --model moondream2 --random-weights --device cuda --saturate

It starts ``kestrel-grpc serve`` with the model's flags, and calls StreamRunSkill, because StreamQuery can't force the
length of an answer. With --saturate, all streams generate long answers at once, first with the engine alone in a
separate process (benchmarks.trace --saturate), then through gRPC; the result is tokens/s and their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from kestrel_client import AsyncKestrelClient, Model
from kestrel_engine import RuntimeConfig
from kestrel_engine.checkpoint.open import open_model
from kestrel_engine.preprocess.tokenizer import Tokenizer

from .models.opening import MODEL_FLAGS, QUICK, model_arguments, server_flags
from .reports import bars
from .reports.program import Flag, Program
from .reports.report import Report, Row
from .trace import RUN_FLAGS, WARM_UP_FROM, plan_of, saturating, settle, warm_up_questions
from .traffic.chart_trace import ChartTrace, draw_images, trace_from
from .traffic.grpc_clients import ClientProcesses
from .traffic.processes import serve
from .traffic.trace_run import RunPlan, part_summary, parts, steady, summary

SKILL = "benchmarks.models.forced_skill:ForcedQuery"
ROOT = Path(__file__).parents[1]
PROGRAM = Program(
    "trace_grpc",
    __doc__,
    *RUN_FLAGS,
    Flag("--clients", 4, "client processes"),
    Flag("--engine-tokens-per-s", 0.0, "of the engine alone with --saturate; 0 measures it first"),
    others=MODEL_FLAGS,
)


@dataclass(frozen=True)
class Served:
    """A server. ``ready_s``: from its process's start until it was ready."""

    address: str
    model: str
    device: str
    ready_s: float


@contextmanager
def server(flags: Sequence[str]) -> Iterator[Served]:
    """Runs ``kestrel-grpc serve`` on a free port, with the benchmark's skill, for the duration of the context."""
    fixed = ["--log-level", "warning", "--max-deadline", "600", "--skill", SKILL]
    with serve([*fixed, *flags]) as process:
        print(process.ready_line.strip(), flush=True)
        model = asyncio.run(_model_of(process.address))
        name = model.name.partition(" (")[0]
        yield Served(process.address, name, model.device, process.ready_s)


async def _model_of(address: str) -> Model:
    async with AsyncKestrelClient(address) as client:
        return await client.get_model()


def measure_trace(
    served: Served, clients: ClientProcesses, plan: RunPlan, count: int, report: Report
) -> None:
    """Runs the first ``count`` questions of the trace."""
    print(f"{served.model}: {plan.in_flight} in flight, {plan.tokens} tokens, gRPC", flush=True)
    asked = clients.run(plan, range(count))
    assert all(a.answer.output_tokens == plan.tokens for a in asked), "an answer of another length"
    whole = summary(asked)
    key: Row = {"model": served.model, "in flight": plan.in_flight, "tokens": plan.tokens}
    report.add("Trace through gRPC (times in ms)", {**key, **whole})
    for part, those in parts(asked).items():
        report.add("Uncached images and repeats (ms)", {**key, "of": part, **part_summary(those)})
    name = f"{served.model}: {plan.in_flight} in flight, {plan.tokens} tokens, gRPC"
    report.figure(f"{name}: requests/s", float(whole["requests/s"]), "1/s")


def measure_saturated(
    served: Served,
    clients: ClientProcesses,
    numbers: Sequence[int],
    plan: RunPlan,
    alone: float | None,
    report: Report,
) -> None:
    """``alone``: tokens/s of the engine alone."""
    print(f"{served.model}: {plan.in_flight} streams of {plan.tokens} tokens, gRPC", flush=True)
    clients.run(replace(plan, tokens=1), numbers)
    found = steady([a.answer for a in clients.run(plan, numbers)])
    row: Row = {
        "model": served.model,
        "streams": plan.in_flight,
        "tokens": plan.tokens,
        "tokens/s": found.tokens_s,
        "seconds": found.end - found.begin,
        "engine alone": alone if alone is not None else math.nan,
        "ratio": found.tokens_s / alone if alone else math.nan,
    }
    name = f"{served.model}: {plan.in_flight} streams, gRPC"
    report.add("Saturated decode through gRPC", row)
    report.figure(f"{name}: tokens/s", found.tokens_s, "1/s")
    if alone:
        judged = served.device.startswith("cuda") and plan.in_flight == 64
        limits = bars.GRPC_SHARE if judged else bars.NONE
        report.figure(f"{name} over the engine alone", found.tokens_s / alone, "of it", limits)


def engine_alone(
    streams: int, args: argparse.Namespace, of_model: Sequence[str], report: Report
) -> float:
    """Returns tokens/s of the engine alone, in a separate process with the same flags. Adds its report."""
    with tempfile.TemporaryDirectory(prefix="kestrel-bench-") as folder:
        path = Path(folder) / "alone.json"
        command = [sys.executable, "-m", "benchmarks.trace", "--saturate", "--json", str(path)]
        command += ["--in-flight", str(streams), "--saturate-tokens", str(args.saturate_tokens)]
        command += ["--quick"] if args.quick else []
        subprocess.run([*command, *of_model], check=True, cwd=ROOT)
        content = json.loads(path.read_text())
    (row,) = content["tables"]["Saturated decode, engine alone"]
    report.add("Saturated decode, engine alone", row)
    return float(row["tokens/s"])


def trace_with_warm_up(
    args: argparse.Namespace, config: RuntimeConfig
) -> tuple[ChartTrace, list[int]]:
    """Returns the trace with further questions, about other images, that warm up the server, and their numbers."""
    opened = open_model(config)
    codec = Tokenizer.from_file(opened.tokenizer_path, vocab_size=opened.config.text.vocab_size)
    trace = trace_from(args, codec.encode)
    count = 1 if args.quick else 24
    images = [*trace.images, *draw_images(count, first=WARM_UP_FROM)]
    more = [
        replace(q, image=q.image + len(trace.images))
        for repeat in (False, True)
        for q in warm_up_questions(count, repeat=repeat)
    ]
    first = len(trace.questions)
    numbers = list(range(first, first + len(more)))
    return ChartTrace(images, (*trace.questions, *more)), numbers


def measure(
    served: Served,
    args: argparse.Namespace,
    config: RuntimeConfig,
    report: Report,
    alone: dict[int, float],
) -> None:
    trace, warm_up = trace_with_warm_up(args, config)
    count = len(trace.questions) - len(warm_up)
    made = "weights made up" if config.random_weights else "weights read"
    name = f"{served.model}: server's start to ready, {made}"
    report.figure(name, served.ready_s, "s", at_least=False)
    with tempfile.TemporaryDirectory(prefix="kestrel-bench-") as folder:
        with ClientProcesses(
            served.address, trace, count=args.clients, folder=Path(folder)
        ) as clients:
            clients.run(RunPlan(max(args.in_flight), 8, namespace="warm-up"), warm_up)
            if args.saturate:
                for in_flight in args.in_flight:
                    plan = plan_of(args, in_flight, args.saturate_tokens, "saturate")
                    numbers = saturating(trace.questions[:count], in_flight)
                    measure_saturated(served, clients, numbers, plan, alone.get(in_flight), report)
            for in_flight in args.in_flight:
                for tokens in args.tokens:
                    plan = plan_of(args, in_flight, tokens, f"{in_flight}-{tokens}")
                    measure_trace(served, clients, plan, count, report)


def main(arguments: Sequence[str] | None = None) -> Report:
    with PROGRAM.reporting(arguments) as (args, of_model, report):
        settle(args)
        config = model_arguments(of_model, quick=args.quick)
        flags = server_flags([*(QUICK if args.quick else ()), *of_model], config)
        alone: dict[int, float] = {}
        if args.saturate and args.engine_tokens_per_s:
            alone = dict.fromkeys(args.in_flight, args.engine_tokens_per_s)
        elif args.saturate:
            alone = {n: engine_alone(n, args, of_model, report) for n in args.in_flight}
        with server(flags) as served:
            measure(served, args, config, report, alone)
    return report


if __name__ == "__main__":
    main()
