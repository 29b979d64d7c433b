"""Runs all GPU benchmarks, the most important first, each with a time limit. A failure does not stop the others.

python -m benchmarks.gpu_suite [--out out/bench] [--seconds 900]      `make bench-gpu` runs this

Each model is loaded once, with random weights of its true shape, for all benchmarks that need no server. The service,
the ceilings and the quality gate run in separate processes. Every part writes its JSON file to --out when it ends, and
bench.json in that folder holds all of them, for benchmarks.compare. The files of an earlier run are removed first. The
exit status is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .models import TINY
from .reports.report import Figure, Report, line
from .traffic.chart_trace import NUM_IMAGES, draw_images

MODELS = ("moondream2", "moondream3-preview")
TOKENS = (3, 30)
"""Tokens of an answer in the runs of the trace."""
IN_FLIGHT_S = {64: 7.0, 16: 5.0, 4: 4.0, 1: 4.0}
"""The requests in flight in the runs of the trace, and the seconds after which no question is asked."""
PARTS = ("trace", "decode", "boxes", "prefill", "vision", "saturate", "quality")
"""The parts of a model, in this order. Both models have the same vision tower, so only the first one's is measured."""
FP8_PARTS = ("trace", "decode", "boxes", "quality")
FP8_FLAGS = ("--precision", "fp8")
if TYPE_CHECKING:
    from .models.opening import Measure
    from .reports.program import Program

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Job:
    """A process: ``arguments`` of ``python -m``, and the most seconds it may take."""

    name: str
    arguments: Sequence[str]
    limit_s: float


def jobs(args: argparse.Namespace, cache: Path) -> list[Job]:
    """Returns the jobs, the most important first."""
    out, found = args.out, []
    quick = ["--quick"] if args.quick else []
    device = ["--device", args.device]
    for model, limit_s in zip(args.models, (230.0, 250.0), strict=False):
        one = ["benchmarks.gpu_suite", "--one", model, "--out", str(out), "--cache", str(cache)]
        chosen = [part for part in args.parts if part in PARTS]
        if chosen:
            found.append(Job(model, [*one, *quick, *device, "--parts", *chosen], limit_s))
    first = args.models[0]
    if "fp8" in args.parts and not args.quick:
        for model in args.models:
            one = ["benchmarks.gpu_suite", "--one", model, "--out", str(out), "--cache", str(cache)]
            chosen = ["--fp8", *device, "--parts", *FP8_PARTS]
            found.append(Job(f"{model} fp8", [*one, *chosen], 170.0))
    served = ["--model", first, *device, "--random-weights"]
    if args.quick:  # The program's own flags name the model then.
        served = ["--threads", "1"]
    if "grpc" in args.parts:
        through = [
            "benchmarks.trace_grpc",
            *quick,
            "--saturate",
            "--json",
            f"{out}/trace_grpc.json",
        ]
        through += ["--in-flight", "2" if args.quick else "64", *served]
        if not args.quick:
            through += ["--tokens", "3", "--limit", "30", "--cache", str(cache)]
        found.append(Job("grpc", through, 120.0))
    if "floors" in args.parts:
        floors = ["benchmarks.gpu.floors", *quick, *device, "--json", f"{out}/floors.json"]
        found.append(Job("floors", floors, 45.0))
    if "score" in args.parts:
        score = ["benchmarks.gpu.quality", *quick, "--score-only", *device]
        found.append(Job("score", [*score, "--json", f"{out}/score.json"], 110.0))
    if "startup" in args.parts:
        startup = ["benchmarks.gpu.startup", *quick, "--model", first, *device, "--runs", "2"]
        found.append(Job("startup", [*startup, "--json", f"{out}/startup.json"], 120.0))
    return found


ALL_PARTS = (*PARTS, "fp8", "grpc", "floors", "score", "startup")


def with_engine_alone(job: Job, path: Path) -> Job:
    """Passes the engine's result to the service's benchmark, which then need not load the model to measure it."""
    if not path.exists():
        return job
    for figure in json.loads(path.read_text())["figures"]:
        if figure["name"].endswith("engine alone: tokens/s"):
            given = ["--engine-tokens-per-s", str(figure["value"])]
            return replace(job, arguments=[*job.arguments, *given])
    return job


def run_job(job: Job, limit_s: float) -> bool:
    """Runs a job. Kills it and its children at the time limit. Returns whether it succeeded."""
    command = [sys.executable, "-m", *job.arguments]
    print(
        f"\n==== {job.name}, at most {limit_s:.0f} s: python -m {' '.join(job.arguments)}",
        flush=True,
    )
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        status = process.wait(limit_s)
        outcome = f"ended with status {status}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        status, outcome = -1, "exceeded its time limit"
    print(f"==== {job.name} {outcome} after {time.monotonic() - began:.0f} s", flush=True)
    return status == 0


def measure_model(args: argparse.Namespace) -> bool:
    """Runs the parts of one model in this process. Returns whether all succeeded."""
    from .models.opening import model_arguments, open_model, run_measure

    flags = ["--model", args.one, "--device", args.device]
    flags += ["--threads", "1"] if args.quick else ["--random-weights"]
    flags += FP8_FLAGS if args.fp8 else ()
    name = Path(args.one).name + ("-fp8" if args.fp8 else "")
    opened = open_model(model_arguments(flags, quick=args.quick))
    good, measures = True, programs()
    command = shlex.join(["python", "-m", "benchmarks.gpu_suite", *sys.argv[1:]])
    for part in args.parts:
        if part == "vision" and args.one not in (MODELS[0], TINY):
            continue
        report = Report(part, vars(args), command=command)
        began = time.monotonic()
        print(f"\n-- {args.one}: {part}", flush=True)
        try:
            program, measure = measures[part]
            for flags in runs(part, args, opened.built.model.image_prefix):
                run_measure(measure, program.parse(flags)[0], opened, report)
        except Exception:  # Continue with the other parts.
            traceback.print_exc()
            good = False
        print(f"-- {args.one}: {part} took {time.monotonic() - began:.0f} s", flush=True)
        # Figures that were taken before a failure count too.
        report.finish(str(args.out / f"{name}-{part}.json"))
    opened.runtime.close()
    return good


def programs() -> dict[str, tuple[Program, Measure]]:
    """Returns the program and the function that measures each part."""
    from . import boxes, decode, trace
    from .gpu import prefill, quality, vision

    alike = {"trace": trace, "saturate": trace, "decode": decode, "boxes": boxes}
    alike |= {"prefill": prefill, "vision": vision}
    found = {part: (each.PROGRAM, each.measure) for part, each in alike.items()}
    return {**found, "quality": (quality.PROGRAM, quality.measure_drift)}


def runs(part: str, args: argparse.Namespace, image_prefix: int) -> list[list[str]]:
    """Returns the flags of each run of a part."""
    if args.quick:
        with_quick = {"saturate": [["--saturate"]], "decode": [[], ["--shared", "20"]]}
        return [["--quick", *flags] for flags in with_quick.get(part, [[]])]
    trace = ["--in-flight", *IN_FLIGHT_S, "--tokens", *TOKENS, "--limit", *IN_FLIGHT_S.values()]
    trace += ["--cache", args.cache] if args.cache else []
    shared = ["--batches", 64, "--shared", image_prefix]
    flags: dict[str, list[list[Any]]] = {
        "trace": [trace],
        "saturate": [["--saturate", "--in-flight", 64]],
        "decode": [[], shared],
        "boxes": [["--limit", 2]],
    }
    return [[str(flag) for flag in run] for run in flags.get(part, [[]])]


def gather(out: Path) -> list[dict[str, Any]]:
    """Reads all reports of a folder and writes bench.json."""
    files = sorted(file for file in out.glob("*.json") if file.name != "bench.json")
    reports = [json.loads(file.read_text()) for file in files]
    (out / "bench.json").write_text(json.dumps(reports, indent=1) + "\n")
    return reports


def show(reports: Sequence[dict[str, Any]]) -> None:
    """Prints all figures and bars."""
    print("\nAll figures")
    for report in reports:
        for found in report.get("figures", []):
            derived = ("share", "verdict")
            print("  " + line(Figure(**{k: v for k, v in found.items() if k not in derived})))
        for bar in report.get("bars", []):
            verdict = "met" if bar["is_met"] else "MISSED"
            print(f"  {bar['what']}: {bar['value']:.4g}, limit {bar['limit']:g}, {verdict}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu_suite",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/bench"), help="folder of the results [out/bench]"
    )
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), help=f"models to measure [{' '.join(MODELS)}]"
    )
    parser.add_argument(
        "--parts", nargs="+", default=list(ALL_PARTS), choices=ALL_PARTS, metavar="PART",
        help=f"some of: {' '.join(ALL_PARTS)} [all]",
    )  # fmt: skip
    parser.add_argument("--device", default="cuda", help="device [cuda]")
    parser.add_argument(
        "--seconds", type=float, default=900.0, help="time limit of all parts [900]"
    )
    parser.add_argument("--cache", type=Path, help="folder of the trace's images [OUT/images]")
    parser.add_argument("--quick", action="store_true", help="a smoke test with kestrel-tiny")
    parser.add_argument("--one", metavar="MODEL", help="only this model's parts, in this process")
    parser.add_argument("--fp8", action="store_true", help="with --one: in FP8")
    args = parser.parse_args(arguments)
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.one:
        return 0 if measure_model(args) else 1
    if args.quick:
        args.models, args.device = [TINY], "cpu"
    for file in args.out.glob("*.json"):
        file.unlink()
    cache = args.cache or args.out / "images"
    until = time.monotonic() + args.seconds
    failed = []
    if "trace" in args.parts and not args.quick:
        draw_images(NUM_IMAGES, cache=cache)
    for job in jobs(args, cache):
        if job.name == "grpc":
            job = with_engine_alone(job, args.out / f"{args.models[0]}-saturate.json")
        left = until - time.monotonic()
        if left < min(20.0, job.limit_s):
            print(f"==== {job.name} left out: {left:.0f} s are left", flush=True)
            failed.append(job.name)
        elif not run_job(job, min(job.limit_s, left)):
            failed.append(job.name)
    show(gather(args.out))
    print(f"\n{'failed: ' + ', '.join(failed) if failed else 'all parts ran'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
