"""``bench``: loads a running server in stages and measures it from the client's place.

Times include the network. The repository's other benchmarks measure parts of the server, with less noise.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from functools import partial
from typing import cast

from kestrel_client.connection import is_local

from ...version import __version__
from .. import DEMO_IMAGE
from ..connection import open_async_client, sdk_errors, servers_of
from ..flags import SettingsError
from ..parser import EXIT_FAILED, EXIT_INTERRUPTED, CommandError
from ..requests.flags import request_options
from .flags import ESSENTIAL as ESSENTIAL
from .flags import IN_FLIGHT, limits_of, ramp_of, slo_of
from .flags import add_arguments as add_arguments
from .reporting.comparison import compare_files
from .reporting.html import write_report
from .reporting.results import (
    FORMAT,
    KIND,
    Plain,
    best_stage,
    check_writable,
    describe_machine,
    figures,
    read_results,
    stage_result,
    write_results,
)
from .reporting.text import stage_line, stage_table
from .sending.client import ClientPlan
from .sending.client_health import ClientHealth
from .sending.fleet import Fleet, open_fleet
from .sending.images import Image, make_images, open_images
from .sending.mix import Mix
from .sending.sender import Stage
from .tally import Tally

_QUESTIONS = ("What is in this image?",)
_OBJECTS = ("red circle",)


def run(args: argparse.Namespace) -> int:
    if args.compare:
        return _compare(args)
    for path in filter(None, (args.output, args.report)):
        check_writable(path)
    args.question, args.object = args.question or _QUESTIONS, args.object or _OBJECTS
    images = _images(args)
    ramp, limits, slo = ramp_of(args), limits_of(args), slo_of(args)
    plan = ClientPlan(
        connect=partial(open_async_client, args),
        most_in_flight=_most_in_flight(args),
        mix=Mix(args.mix, args.question, args.object),
        images=images,
        unique_share=args.unique_images,
        slo=slo,
        options={
            **request_options(args),
            "max_tokens": args.max_tokens,
            "temperature": args.temperature,
        },
        streaming=not args.unary,
    )
    results: list[Plain] = []
    interrupted = False
    with sdk_errors(args), open_fleet(plan, args.processes) as fleet:
        described = fleet.describe()  # Connects, and fails if there is no server.
        content = _content(args, described, results)
        for number, level in enumerate(ramp.levels()):
            try:
                tally, health = _run_stage(args, fleet, number, level)
            except KeyboardInterrupt:
                if not results:
                    raise
                interrupted = True
                break
            if not number and not tally.succeeded:
                ((error, _),) = tally.errors.most_common(1) or [("no request ended in time", 0)]
                raise CommandError(f"no request succeeded: {error}")
            overload = limits.passed(tally)
            result = stage_result(
                ramp.loop,
                level,
                args.seconds,
                tally,
                most_in_flight=args.max_in_flight,
                overload=overload,
                client=_client(args, tally, health),
            )
            results.append(result)
            if ramp.most is not None and not args.json:
                print(stage_line(result), flush=True)
            content["figures"] = figures(results)
            if args.output:
                write_results(args.output, content)
            if overload:
                break
    if args.report:
        write_report(args.report, [{**content, "label": args.label or "this run"}])
    if args.json:
        print(json.dumps(_summary(args, content)))
    else:
        _print(args, content)
    return EXIT_INTERRUPTED if interrupted else 0


def _run_stage(
    args: argparse.Namespace, fleet: Fleet, number: int, level: float
) -> tuple[Tally, ClientHealth]:
    warm_up_s = args.seconds / 10 if args.warm_up is None else args.warm_up
    stage = Stage(
        loop="closed" if args.rate is None else "open",
        level=level,
        arrivals=args.arrivals,
        warm_up_s=warm_up_s,
        window_s=args.seconds,
        drain_s=args.drain,
        most_in_flight=args.max_in_flight,
        seed=f"{args.seed} {number}",
    )
    return fleet.run(stage)


def _most_in_flight(args: argparse.Namespace) -> int:
    """Of one process."""
    most: int = args.max_in_flight
    if args.rate is None:
        most = args.max_concurrency or args.concurrency or IN_FLIGHT
    return math.ceil(most / int(args.processes))


def _images(args: argparse.Namespace) -> Sequence[Image]:
    """The images of a run. Raises SettingsError and CommandError."""
    if args.words and args.made_up:
        raise SettingsError("--made-up: images are given; leave out one of both")
    if args.made_up:
        width, height = args.size
        return make_images(args.made_up, width, height, args.seed)
    images = open_images(args.words) if args.words else [DEMO_IMAGE.read_bytes()]
    if args.unique_images and not all(isinstance(image, bytes) for image in images):
        raise SettingsError("--unique-images: needs images that the client has; an id was given")
    return images


def _client(args: argparse.Namespace, tally: Tally, health: ClientHealth) -> Plain:
    """The client's health in a stage."""
    typical_s = (tally.ttft if tally.ttft.count else tally.latency).percentile(50)
    shared = is_local(servers_of(args))
    lag_s = health.lag.percentile(99)
    return {
        "processes": len(health.cpu_shares),
        "cpu_share": round(max(health.cpu_shares, default=0.0), 4),
        "loop_lag_p99_s": None if math.isnan(lag_s) else round(lag_s, 6),
        "machine_busy": None if health.machine_busy is None else round(health.machine_busy, 4),
        "limits": health.limits(
            tally.lateness, 0.0 if math.isnan(typical_s) else typical_s, shared=shared
        ),
    }


def _content(args: argparse.Namespace, described: Plain, results: list[Plain]) -> Plain:
    """The content of the file of results. ``results`` grows."""
    ramp, limits, slo = ramp_of(args), limits_of(args), slo_of(args)
    is_open = ramp.loop == "open"
    return {
        "benchmark": KIND,
        "format": FORMAT,
        "label": args.label,
        "loop": ramp.loop,
        "stage_duration_s": args.seconds,
        "start_rps": ramp.first if is_open else None,
        "rps_step": ramp.step if is_open else None,
        "max_rps": ramp.most if is_open else None,
        "start_concurrency": None if is_open else ramp.first,
        "concurrency_step": None if is_open else ramp.step,
        "max_concurrency": None if is_open else ramp.most,
        "latency_threshold_ms": args.latency_threshold_ms,
        "ttft_threshold_ms": args.ttft_threshold_ms,
        "itl_threshold_ms": args.itl_threshold_ms,
        "error_threshold": args.error_threshold,
        "percentile": limits.percentile,
        "slo": {
            "latency_s": slo.latency_s,
            "ttft_s": slo.ttft_s,
            "itl_s": slo.itl_s,
        },
        "settings": _settings(args),
        "machine": describe_machine(),
        "client_version": __version__,
        "server": described,
        "results": results,
        "figures": [],
    }


_SETTINGS = (
    "server", "arrivals", "processes", "warm_up", "drain", "max_in_flight", "seed", "mix", "question", "object",
    "max_tokens", "temperature", "unary", "model", "adapter", "made_up", "size", "unique_images", "timeout"
)  # fmt: skip


def _settings(args: argparse.Namespace) -> Plain:
    return {name: getattr(args, name) for name in _SETTINGS} | {"images": len(args.words)}


def _compare(args: argparse.Namespace) -> int:
    """Compares stored runs. Returns the exit status."""
    if args.words:
        raise SettingsError("--compare: sends no requests, so it takes no images")
    runs = [read_results(path) for path in args.compare]
    worse = compare_files(runs, args.tolerance) if len(runs) > 1 else 0
    if args.report:
        write_report(args.report, runs)
    return EXIT_FAILED if worse else 0


def _summary(args: argparse.Namespace, content: Plain) -> Plain:
    """What --json prints: the last stage with times in milliseconds, and of a ramp all stages."""
    stage = content["results"][-1]
    summary = {
        "seconds": stage["duration_s"],
        "concurrency": None if stage["target_rps"] is not None else stage["concurrency_limit"],
        "rate": stage["target_rps"],
        "requests": stage["requests_success"],
        "errors": stage["errors"],
        "requests_per_second": round(stage["throughput_rps"], 3),
        "good_requests_per_second": round(stage["goodput_rps"], 3),
        "output_tokens_per_second": round(stage["tokens"]["output_per_s"], 3),
        "ttft_ms": _milliseconds(stage["ttft"]),
        "itl_ms": _milliseconds(stage["itl"]),
        "total_ms": _milliseconds(stage["latency"]),
        "client_limits": stage["client"]["limits"],
    }
    if len(content["results"]) > 1:
        summary["stages"] = content["results"]
    return summary


def _milliseconds(spread: Plain) -> Plain | None:
    wanted = ("mean", "p50", "p90", "p95", "p99")
    return {name: round(1e3 * cast(float, spread[name]), 3) for name in wanted} if spread else None


def _print(args: argparse.Namespace, content: Plain) -> None:
    results: list[Plain] = content["results"]
    if args.max_concurrency is None and args.max_rate is None:
        print(stage_table(results[-1]))
        return
    best = best_stage(results)
    if best is None:
        print("no stage kept within the limits")
    else:
        print(f"most within the limits: {stage_line(best)}")
    limited = sum(bool(stage["client"]["limits"]) for stage in results)
    if limited:
        print(
            f"the client may have limited {limited} of {len(results)} stages; more --processes, or a "
            "machine of its own, may help"
        )
