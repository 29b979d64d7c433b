"""Runs the trace through the service: a server process, client processes on the same host, streaming RPCs.

python -m benchmarks.trace_grpc --model moondream2 --random-weights --device cuda --in-flight 64 --tokens 3 --json F
python -m benchmarks.trace_grpc --model moondream2 --random-weights --device cuda --saturate

It starts ``kestrel-grpc serve`` with the model's flags, and calls StreamRunSkill, because StreamQuery can't force the
length of an answer. With --saturate, all streams generate long answers at once, first with the engine alone in a
separate process (benchmarks.trace --saturate), then through gRPC; the result is tokens/s and their ratio. A separate
run with the skill benchmarks.models.profile_skill:DeviceProfile measures with torch's profiler how busy the GPU is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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

SKILLS = (
    "benchmarks.models.forced_skill:ForcedQuery",
    "benchmarks.models.profile_skill:DeviceProfile",
)
PROFILE_AFTER_S, PROFILE_S = 0.7, 0.6
"""When the profile of a saturated run begins, and how long it is."""
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
    """Runs ``kestrel-grpc serve`` on a free port, with the benchmark's skills, for the duration of the context."""
    fixed = ["--log-level", "warning", "--max-deadline", "600"]
    for skill in SKILLS:
        fixed += ["--skill", skill]
    with serve([*fixed, *flags]) as process:
        print(process.ready_line.strip(), flush=True)
        model = asyncio.run(_model_of(process.address))
        name = model.name.partition(" (")[0]
        yield Served(process.address, name, model.device, process.ready_s)


async def _model_of(address: str) -> Model:
    async with AsyncKestrelClient(address) as client:
        return await client.get_model()


class Profile:
    """The profiler of the server's device, which the skill DeviceProfile controls."""

    def __init__(self, served: Served) -> None:
        self._served = served

    def start(self, seconds: float) -> None:
        asyncio.run(self._ask({"seconds": seconds}))

    def result(self, timeout_s: float = 60.0) -> dict[str, Any] | None:
        """Returns the DeviceTrace as plain values; None if the server's device cannot be profiled."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            seen = asyncio.run(self._ask({}))
            if seen["state"] == "done":
                trace: dict[str, Any] = seen["trace"]
                return trace
            if seen["state"] != "watching":
                print(f"no profile: {seen['state']}", flush=True)
                return None
            time.sleep(0.2)
        print(f"no profile within {timeout_s:g} s", flush=True)
        return None

    async def _ask(self, arguments: dict[str, Any]) -> dict[str, Any]:
        async with AsyncKestrelClient(self._served.address) as client:
            return (await client.run_skill("device_profile", arguments=arguments)).output


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
    on_cuda = served.device.startswith("cuda")
    print(f"{served.model}: {plan.in_flight} streams of {plan.tokens} tokens, gRPC", flush=True)
    clients.run(replace(plan, tokens=1), numbers)
    found = steady([a.answer for a in clients.run(plan, numbers)])
    trace, inside = watched(served, clients, numbers, plan) if on_cuda else (None, False)
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
    if trace is not None and trace["wall_s"]:
        row["GPU busy"] = busy = trace["busy_s"] / trace["wall_s"]
        row["profile inside"] = str(inside)
        for kernel, share, calls in trace["kernels"]:
            title = "Kernels while saturated, by torch's profiler"
            report.add(title, {"share": share, "calls": int(calls), "kernel": kernel[:90]})
    report.add("Saturated decode through gRPC", row)
    report.figure(f"{name}: tokens/s", found.tokens_s, "1/s")
    judged = on_cuda and plan.in_flight == 64
    if alone:
        limits = bars.GRPC_SHARE if judged else bars.NONE
        report.figure(f"{name} over the engine alone", found.tokens_s / alone, "of it", limits)
    if "GPU busy" in row:
        limits = bars.GPU_BUSY if judged and inside else bars.NONE
        report.figure(f"{name}: GPU busy, kernel time over wall", busy, "of the wall", limits)


def watched(
    served: Served, clients: ClientProcesses, numbers: Sequence[int], plan: RunPlan
) -> tuple[dict[str, Any] | None, bool]:
    """Runs saturated streams with the profiler. Returns its trace, and whether all streams decoded during all of it."""
    profile = Profile(served)
    # The first time it takes the profiler seconds to get ready.
    profile.start(0.05)
    if profile.result() is None:
        return None, False
    clients.begin(plan, numbers)
    time.sleep(PROFILE_AFTER_S)
    profile.start(PROFILE_S)
    found = steady([a.answer for a in clients.collect()])
    trace = profile.result()
    inside = trace is not None and found.begin <= trace["begin"] and trace["end"] <= found.end
    return trace, inside


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
