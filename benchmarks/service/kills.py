"""Kills processes of a server with several workers at random, under mixed traffic, and says what callers noticed.

python -m benchmarks.service.kills --workers 8 --rate 200 --minutes 10 --device cuda --model moondream2 --weights FILE
python -m benchmarks.service.kills --workers 3 --rate 5 --seconds 240 --every 60

A worker, the front, a process that decodes images, or the template of workers gets SIGKILL, never the supervisor.

Every call must end within its deadline (30 s), and none may fail. The p99 of a second after a kill is that of the calls
that began in that second after any kill, so it is of thousands of calls. From 5 s on it must be at most twice the p99
before the first kill.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import contextlib
import random
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import psutil

from kestrel_client import AsyncKestrelClient

from ..models.opening import MODEL_FLAGS, model_arguments, server_flags
from ..reports.program import Flag, Program
from ..reports.report import Report, quantile
from ..traffic.mixed_calls import DEADLINE_S, LATE_S, Ended, Traffic
from ..traffic.processes import START_PATIENCE_S, ServerProcess, serve
from ..traffic.random_images import jpeg

_COLD_S = 5.0
"""The first seconds of traffic are not normal."""
NORMAL = 2.0
_FRONT, _WORKER, _OTHER, _TEMPLATE = "front", "worker", "process of a worker", "template of workers"
_SHOWN_S = 15.0
"""Seconds after a kill whose p99 is printed."""
_KINDS = (_WORKER, _FRONT, _OTHER, _TEMPLATE)


class Victims:
    """The processes that may be killed. A worker lives on when its template is killed, but has another parent then."""

    def __init__(self, supervisor: psutil.Process) -> None:
        self._supervisor = supervisor
        self._workers: set[psutil.Process] = set()

    def by_kind(self) -> dict[str, list[psutil.Process]]:
        found = defaultdict(list)
        for child in self._supervisor.children():
            with contextlib.suppress(psutil.Error):
                if Path(child.exe()).name == "envoy":
                    found[_FRONT].append(child)
                else:
                    found[_TEMPLATE].append(child)
                    self._workers.update(child.children())
        self._workers = {each for each in self._workers if each.is_running()}
        for worker in self._workers:
            with contextlib.suppress(psutil.Error):
                found[_WORKER].append(worker)
                found[_OTHER] += worker.children(recursive=True)
        return {kind: processes for kind, processes in found.items() if processes}


async def kill(
    supervisor: psutil.Process, args: argparse.Namespace, until: float
) -> list[tuple[float, str]]:
    """Kills until shortly before ``until``. Returns the times and kinds."""
    rng = random.Random(args.seed)
    kills: list[tuple[float, str]] = []
    found = Victims(supervisor)
    await asyncio.sleep(args.calm)
    while time.monotonic() < until - args.every:
        kinds = {kind: them for kind, them in found.by_kind().items() if kind in args.kill}
        # Workers half of the time, whatever the number of the others.
        weights = [max(1, len(kinds) - 1) if kind == _WORKER else 1 for kind in kinds]
        (kind,) = rng.choices(list(kinds), weights)
        try:
            rng.choice(kinds[kind]).kill()
        except psutil.NoSuchProcess:
            continue
        kills.append((time.monotonic(), kind))
        await asyncio.sleep(args.every * rng.uniform(0.8, 1.2))
    return kills


def p99_after(
    calls: Sequence[Ended], kills: Sequence[float], upto_s: float, step_s: float
) -> list[tuple[float, int, float]]:
    """For each step after a kill: its start in seconds, the calls that began in it after any of ``kills``, and their
    p99 in seconds. A call belongs to the last kill before it."""
    seconds: dict[int, list[float]] = defaultdict(list)
    for call in calls:
        before = bisect.bisect_right(kills, call.began) - 1
        if before >= 0 and call.began - kills[before] < upto_s:
            seconds[int((call.began - kills[before]) / step_s)].append(call.seconds)
    return [
        (step * step_s, len(seconds[step]), quantile(seconds[step], 0.99))
        for step in sorted(seconds)
    ]


def report_on(report: Report, calls: Sequence[Ended], kills: Sequence[tuple[float, str]]) -> None:
    first = kills[0][0]
    warm = min(min(c.began for c in calls) + _COLD_S, first - 1.0)
    normal = [c.seconds for c in calls if c.began > warm and c.ended < first]
    late = sum(c.seconds > DEADLINE_S + LATE_S for c in calls)
    failed = [c for c in calls if c.status]
    after = [c.seconds for c in calls if c.began > first]
    by_kind = Counter(kind for _, kind in kills)
    report.add(
        "Kills",
        {
            "calls": len(calls),
            "calls/s": len(calls) / (max(c.ended for c in calls) - min(c.began for c in calls)),
            **{f"kills of a {kind}": by_kind[kind] for kind in _KINDS},
            "results": len(calls) - len(failed),
            "streams sent again": sum(c.again for c in calls),
            "statuses": len(failed),
            "late": late,
        },
    )
    report.add(
        "Times in ms",
        {
            "normal p50": 1e3 * quantile(normal, 0.5),
            "normal p99": 1e3 * quantile(normal, 0.99),
            "p50 under kills": 1e3 * quantile(after, 0.5),
            "p99 under kills": 1e3 * quantile(after, 0.99),
            "most": 1e3 * max(c.seconds for c in calls),
        },
    )
    normal_p99, times = quantile(normal, 0.99), [at for at, _ in kills]
    for at, count, p99 in p99_after(calls, times, _SHOWN_S, 1.0):
        report.add(
            "By seconds after a kill",
            {"from s": at, "calls": count, "p99": 1e3 * p99, "x normal": p99 / normal_p99},
        )
    later = [p99 for at, _, p99 in p99_after(calls, times, _SHOWN_S, 5.0) if at >= 5.0]
    report.bar("calls that neither ended with a result nor with a status in time", late, 0)
    report.bar("calls that failed although they were sent again", len(failed), 0)
    if later:
        ratio = max(later) / normal_p99
        report.bar("p99 from 5 s after a kill on, times the p99 before", ratio, NORMAL)


async def run(args: argparse.Namespace, address: str, pid: int, report: Report) -> None:
    rng = random.Random(args.seed)
    images = [jpeg(seed, 400, 300) for seed in range(args.images)]
    async with AsyncKestrelClient(address) as client:
        (model, *_) = await client.list_models()
        traffic = Traffic(client, images, rng, [skill.name for skill in model.skills])
        await traffic.warm_up()
        until = time.monotonic() + args.seconds
        killing = asyncio.create_task(kill(psutil.Process(pid), args, until))
        await traffic.run(args.rate, until)
        report_on(report, traffic.calls, await killing)
        for text, count in traffic.errors.most_common(12):
            print(f"{count} x {text}")


def _server(args: argparse.Namespace, of_model: Sequence[str], log: Path) -> ServerProcess:
    flags = ["--workers", str(args.workers), "--log-format", "json"]
    flags += ["--worker-restarts", "1000000"]  # Each worker ends many times, and on purpose.
    flags += server_flags(of_model, model_arguments(of_model))
    if not any(flag.startswith("--device") for flag in flags):
        flags += ["--device", "cpu"]
    return serve(flags, log=log, end_patience_s=START_PATIENCE_S)


PROGRAM = Program(
    "service.kills",
    __doc__,
    Flag("--workers", 3, "workers of the server", quick=2),
    Flag("--rate", 8.0, "calls a second"),
    Flag("--seconds", 120.0, "seconds of traffic", quick=10.0),
    Flag("--minutes", 0.0, "minutes, instead of --seconds"),
    Flag("--every", 15.0, "seconds between kills", quick=2.0),
    Flag("--calm", 25.0, "seconds of traffic before the first kill", quick=3.0),
    Flag("--images", 40, "different images"),
    Flag("--kill", tuple(_KINDS), "what may be killed", choices=_KINDS),
    Flag("--log", None, "keep the server's log in this file"),
    Flag("--seed", 0, "of images and kills"),
    others=MODEL_FLAGS,
)


def main(arguments: Sequence[str] | None = None) -> Report:
    with (
        PROGRAM.reporting(arguments) as (args, of_model, report),
        tempfile.TemporaryDirectory() as folder,
        _server(args, of_model, Path(args.log or f"{folder}/log")) as server,
    ):
        if args.minutes:
            args.seconds = 60 * args.minutes
        asyncio.run(run(args, server.address, server.pid, report))
    return report


if __name__ == "__main__":
    main()
