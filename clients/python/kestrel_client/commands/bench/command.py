"""``bench``: loads a running server in stages and measures it from the client's place.

Times include the network. The repository's other benchmarks measure parts of the server, with less noise.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from kestrel_client.connection import is_local

from ...version import __version__
from .. import DEMO_IMAGE
from ..connection import open_async_client, sdk_errors, servers_of
from ..files import check_writable
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
    describe_machine,
    figures,
    read_results,
    stage_result,
    write_results,
)
from .reporting.text import ramp_end, stage_line, stage_table, summary
from .sending.client_health import ClientHealth
from .sending.fleet import Fleet, open_fleet
from .sending.mix import Mix
from .sending.sample_images import Image, make_images, open_images
from .sending.sender import ClientPlan, Stage
from .stages import Ramp, Slo
from .tally import Tally

_SETTINGS = (
    "server", "concurrency", "max_concurrency", "concurrency_step", "rate", "max_rate", "rate_step", "arrivals",
    "processes", "warm_up", "drain", "max_in_flight", "seed", "mix", "question", "object", "max_tokens", "temperature",
    "unary", "model", "adapter", "max_crops", "made_up", "size", "unique_images", "timeout"
)  # fmt: skip
_LIMITS = (
    *("latency_threshold_ms", "ttft_threshold_ms", "itl_threshold_ms"),
    *("error_threshold", "percentile"),
)


def run(args: argparse.Namespace) -> int:
    if args.compare:
        return _compare(args)
    for path in filter(None, (args.output, args.report)):
        check_writable(path)
    args.question = args.question or ("What is in this image?",)
    args.object = args.object or ("red circle",)
    ramp, slo = ramp_of(args), slo_of(args)
    plan = _plan(args, slo)
    with sdk_errors(args), open_fleet(plan, args.processes) as fleet:
        described = fleet.client.describe()  # Connects, and fails if there is no server.
        content = _content(args, ramp, slo, described)
        status = _run_stages(args, fleet, ramp, content)
    if args.report:
        write_report(args.report, [{**content, "label": args.label or "this run"}])
    if args.json:
        print(json.dumps(summary(content["results"])))
    elif ramp.most is None:
        print(stage_table(content["results"][-1]))
    else:
        print(ramp_end(content["results"]))
    return status


def _run_stages(args: argparse.Namespace, fleet: Fleet, ramp: Ramp, content: Plain) -> int:
    """Adds the results of the stages to ``content``. Returns the exit status."""
    limits, results = limits_of(args), content["results"]
    for number, level in enumerate(ramp.levels()):
        stage = Stage(
            loop=ramp.loop,
            level=level,
            arrivals=args.arrivals,
            warm_up_s=args.seconds / 10 if args.warm_up is None else args.warm_up,
            window_s=args.seconds,
            drain_s=args.drain,
            most_in_flight=args.max_in_flight,
            seed=f"{args.seed} {number}",
        )
        try:
            tally, health = fleet.run(stage)
        except KeyboardInterrupt:
            if not results:
                raise
            return EXIT_INTERRUPTED
        if not number and not tally.succeeded:
            ((error, _),) = tally.errors.most_common(1) or [("no request ended in time", 0)]
            raise CommandError(f"no request succeeded: {error}")
        overload = limits.passed(tally)
        result = stage_result(stage, tally, overload, _client(args, tally, health))
        results.append(result)
        content["figures"] = figures(results)
        if ramp.most is not None and not args.json:
            print(stage_line(result), flush=True)
        if args.output:
            write_results(args.output, content)
        if overload:
            break
    return 0


def _plan(args: argparse.Namespace, slo: Slo) -> ClientPlan:
    """What each process needs. Raises SettingsError and CommandError."""
    most: int = args.max_in_flight
    if args.rate is None:
        most = args.max_concurrency or args.concurrency or IN_FLIGHT
    own = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    return ClientPlan(
        connect=partial(open_async_client, args),
        most_in_flight=math.ceil(most / args.processes),
        mix=Mix(args.mix, args.question, args.object),
        images=_images(args),
        unique_share=args.unique_images,
        slo=slo,
        options={**request_options(args), **own},
        streaming=not args.unary,
    )


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
    times = tally.ttft if tally.ttft.count else tally.latency
    typical_s = times.percentile(50) if times.count else 0.0
    lag_s = health.lag.percentile(99)
    return {
        "processes": len(health.cpu_shares),
        "cpu_share": round(max(health.cpu_shares, default=0.0), 4),
        "loop_lag_p99_s": None if math.isnan(lag_s) else round(lag_s, 6),
        "machine_busy": None if health.machine_busy is None else round(health.machine_busy, 4),
        "limits": health.limits(tally.lateness, typical_s, shared=is_local(servers_of(args))),
    }


def _content(args: argparse.Namespace, ramp: Ramp, slo: Slo, described: Plain) -> Plain:
    """The content of the file of results, before the first stage."""
    settings = {name: getattr(args, name) for name in _SETTINGS}
    return {
        "benchmark": KIND,
        "format": FORMAT,
        "label": args.label,
        "loop": ramp.loop,
        "stage_duration_s": args.seconds,
        **{name: getattr(args, name) for name in _LIMITS},
        "slo": asdict(slo),
        "settings": {**settings, "images": len(args.words)},
        "machine": describe_machine(),
        "client_version": __version__,
        "server": described,
        "results": [],
        "figures": [],
    }


def _compare(args: argparse.Namespace) -> int:
    """Compares stored runs. Returns the exit status."""
    if args.words:
        raise SettingsError("--compare: sends no requests, so it takes no images")
    runs = [read_results(path) for path in args.compare]
    worse = compare_files(runs, args.tolerance) if len(runs) > 1 else 0
    if args.report:
        write_report(args.report, runs)
    return EXIT_FAILED if worse else 0
