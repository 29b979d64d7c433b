"""Kills processes of a server with several workers at random, under mixed traffic, and says what callers noticed.

python -m benchmarks.service.kills --workers 8 --rate 200 --seconds 600 --device cuda --model moondream2 --weights FILE
python -m benchmarks.service.kills --workers 3 --rate 8 --seconds 120

A worker, the front, or a process that decodes images gets SIGKILL, never the supervisor. Calls arrive at random times
(Poisson), whether or not earlier ones have ended. Each goes through the SDK, which sends unary calls again by itself.
A stream that ends with ConnectionLostError is opened once more, as its caller would do.

Every call must end within its deadline. A call that ended with a status instead of a result is counted. Times are
normal again when the p99 of the calls that follow, until the next kill, is at most twice that before the first kill.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from kestrel_client import AsyncKestrelClient, ConnectionLostError, KestrelError, UnavailableError

from ..models.opening import model_arguments, parse, server_flags
from ..reports.report import Report, benchmark_parser, quantile
from ..traffic.images import jpeg
from ..traffic.processes import START_PATIENCE_S, serve

DEADLINE_S = 30.0
LATE_S = 1.0
"""Seconds after its deadline in which a call must have reported it, on a busy machine."""
WARM_S, _COLD_S = 25.0, 5.0
"""Seconds of traffic before the first kill, whose p99 is normal, except the first ones."""
NORMAL = 2.0
_GREEDY = {"temperature": 0.0, "max_tokens": 12}
_FRONT, _WORKER, _OTHER, _TEMPLATE = "front", "worker", "process of a worker", "template of workers"
_SHOWN = 12
"""Slow calls that are printed for each kill."""
_KINDS = (_WORKER, _FRONT, _OTHER, _TEMPLATE)


@dataclass(frozen=True)
class Ended:
    """A call that has ended. ``status``: the error's class; "" for a result. ``again``: it was sent again by us."""

    kind: str
    began: float
    ended: float
    status: str = ""
    again: bool = False


@dataclass
class Traffic:
    """The calls of a run."""

    client: AsyncKestrelClient
    images: Sequence[bytes]
    rng: random.Random
    calls: list[Ended] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    handles: dict[int, Any] = field(default_factory=dict)

    async def run(self, rate: float, until: float) -> None:
        async with asyncio.TaskGroup() as group:
            at = time.monotonic()
            while at < until:
                at += self.rng.expovariate(rate)
                await asyncio.sleep(max(0.0, at - time.monotonic()))
                group.create_task(self._call(self.rng.choice(("query", "stream", "detect", "id"))))

    async def _call(self, kind: str) -> None:
        # A few images are popular.
        number = min(int(self.rng.paretovariate(0.8)) - 1, len(self.images) - 1)
        began, again, status = time.monotonic(), False, ""
        try:
            async with asyncio.timeout(DEADLINE_S + 2 * LATE_S):
                try:
                    await self._ask(kind, number, DEADLINE_S)
                except UnavailableError as error:
                    again = True
                    self.errors[f"{kind}, sent again: {type(error).__name__}"] += 1
                    if not isinstance(error, ConnectionLostError):
                        await asyncio.sleep(error.retry_after_s or 0.2)
                    await self._ask(kind, number, DEADLINE_S - (time.monotonic() - began))
        except (KestrelError, TimeoutError) as error:
            status = type(error).__name__
            self.errors[f"{kind}: {error}"[:150]] += 1
        self.calls.append(Ended(kind, began, time.monotonic(), status, again))

    async def _ask(self, kind: str, number: int, timeout: float) -> None:
        client, image = self.client, self.images[number]
        if kind == "stream":
            async with client.stream_query(
                image, "what is this?", timeout=timeout, **_GREEDY
            ) as stream:
                await stream.result()
        elif kind == "detect":
            await client.detect(image, "circle", max_objects=2, timeout=timeout)
        elif kind == "query":
            await client.query(image, "how many?", timeout=timeout, **_GREEDY)
        else:
            if number not in self.handles:
                self.handles[number] = await client.put_image(image, timeout=timeout)
            handle = self.handles[number]
            await client.query(handle, "which colours?", timeout=timeout, **_GREEDY)


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
    supervisor: psutil.Process, every_s: float, until: float, rng: random.Random
) -> list[tuple[float, str]]:
    """Kills until shortly before ``until``. Returns the times and kinds."""
    kills: list[tuple[float, str]] = []
    found = Victims(supervisor)
    await asyncio.sleep(WARM_S)
    while time.monotonic() < until - every_s:
        kinds = found.by_kind()
        # Workers half of the time, whatever the number of the others.
        weights = [len(kinds) - 1 if kind == _WORKER else 1 for kind in kinds]
        (kind,) = rng.choices(list(kinds), weights)
        try:
            rng.choice(kinds[kind]).kill()
        except psutil.NoSuchProcess:
            continue
        kills.append((time.monotonic(), kind))
        await asyncio.sleep(every_s * rng.uniform(0.8, 1.2))
    return kills


def recovery(
    calls: Sequence[Ended], kills: Sequence[tuple[float, str]], most_s: float
) -> list[float]:
    """Seconds after each kill from which the p99 of the calls until the next kill is at most ``most_s`` again."""
    found = []
    for index, (at, _) in enumerate(kills):
        end = kills[index + 1][0] if index + 1 < len(kills) else float("inf")
        later = sorted((c for c in calls if at < c.began < end), key=lambda c: -c.began)
        slow, back_s = 0, 0.0
        for count, call in enumerate(later, 1):  # From the last one to the first.
            slow += call.ended - call.began > most_s
            if slow > 0.01 * count:
                back_s = call.ended - at
                break
        found.append(back_s)
    return found


def report_on(report: Report, traffic: Traffic, kills: Sequence[tuple[float, str]]) -> None:
    calls, first = traffic.calls, kills[0][0]
    warm = min(c.began for c in calls) + _COLD_S
    normal = [c.ended - c.began for c in calls if c.began > warm and c.ended < first]
    most_s = NORMAL * quantile(normal, 0.99)
    late = sum(c.ended - c.began > DEADLINE_S + LATE_S for c in calls)
    failed = [c for c in calls if c.status]
    after = [c for c in calls if c.began > first]
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
    seconds = recovery(calls, kills, most_s)
    report.add(
        "Times in ms",
        {
            "normal p50": 1e3 * quantile(normal, 0.5),
            "normal p99": 1e3 * quantile(normal, 0.99),
            "p50 under kills": 1e3 * quantile([c.ended - c.began for c in after], 0.5),
            "p99 under kills": 1e3 * quantile([c.ended - c.began for c in after], 0.99),
            "most": 1e3 * max(c.ended - c.began for c in calls),
            "normal again, median s": quantile(seconds, 0.5),
            "normal again, most s": max(seconds),
        },
    )
    for number, ((at, kind), took) in enumerate(zip(kills, seconds, strict=True)):
        end = kills[number + 1][0] if number + 1 < len(kills) else float("inf")
        slow = [c for c in calls if at < c.began < end and c.ended - c.began > most_s]
        shown = ", ".join(
            f"+{c.began - at:.1f} s {c.kind} {1e3 * (c.ended - c.began):.0f} ms"
            for c in sorted(slow, key=lambda call: call.began)[:_SHOWN]
        )
        print(f"{kind}: normal again after {took:.1f} s; {len(slow)} slow calls: {shown}")
    for text, count in traffic.errors.most_common(12):
        print(f"{count} x {text}")
    report.bar("calls that neither ended with a result nor with a status in time", late, 0)
    report.bar("calls that failed although they were sent again", len(failed), 0)
    report.bar("seconds until times are normal again, at most", max(seconds), 5.0)


async def run(args: argparse.Namespace, address: str, pid: int, report: Report) -> None:
    rng = random.Random(args.seed)
    images = [jpeg(seed, 400, 300) for seed in range(args.images)]
    async with AsyncKestrelClient(address) as client:
        traffic = Traffic(client, images, rng)
        for kind in ("query", "stream", "detect", "id"):  # Warms up.
            for number in range(len(images) if kind == "query" else 8):
                await traffic._ask(kind, number, DEADLINE_S)
        until = time.monotonic() + args.seconds
        killing = asyncio.create_task(kill(psutil.Process(pid), args.every, until, rng))
        await traffic.run(args.rate, until)
        report_on(report, traffic, await killing)


def main(arguments: Sequence[str] | None = None) -> Report:
    parser = benchmark_parser("service.kills", __doc__)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--spread", choices=("calls", "connections"), default="calls")
    parser.add_argument("--rate", type=float, default=8.0, help="calls a second [8]")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--minutes", type=float, help="instead of --seconds")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between kills [15]")
    parser.add_argument("--images", type=int, default=40, help="different images [40]")
    parser.add_argument("--seed", type=int, default=0)
    args, of_model = parse(parser, arguments)
    if args.minutes is not None:
        args.seconds = 60 * args.minutes
    if args.quick:
        args.seconds, args.every, args.workers = 50.0, 8.0, 2
    flags = server_flags(of_model, model_arguments(of_model))
    flags += ["--workers", str(args.workers), "--spread", args.spread]
    # Each worker ends many times, and on purpose.
    flags += ["--worker-restarts", "1000000", "--log-level", "warning"]
    if not any(flag.startswith("--device") for flag in flags):
        flags += ["--device", "cpu"]
    report = Report("kills", vars(args))
    with (
        tempfile.TemporaryDirectory() as folder,
        serve(flags, log=Path(folder) / "log", end_patience_s=START_PATIENCE_S) as server,
    ):
        asyncio.run(run(args, server.address, server.pid, report))
    report.finish(args.json)
    return report


if __name__ == "__main__":
    main()
