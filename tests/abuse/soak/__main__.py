"""Soak test: a real server under mixed and malformed traffic. Nothing may grow, be lost or become slower.

python -m tests.abuse.soak [--minutes 30 | --seconds N] [--new-images N] [--json FILE] [-- FLAGS OF SERVE]

``kestrel-grpc serve`` runs in one process, with the bundled model, and its callers in another, which is killed in the
middle of every third round. Between rounds there are no callers. Then the benchmark reads the resources that the server
process holds, after a garbage collection, and times a few calls. The server must hold no resource of an earlier call,
and a call must not take more processor time. Latency decides nothing, because other processes of the machine change it.
During the first third of the rounds, at least one, caches fill. The collector must have received the server span of
every call in the access log.

With --new-images N, N callers always send new images instead, so that the caches of images fill. On a GPU give the
flags of a real server:

    python -m tests.abuse.soak --new-images 128 -- --model moondream2 --precision fp8
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil

from benchmarks.reports.program import Program
from benchmarks.reports.report import Report, median, quantile
from benchmarks.traffic.processes import ChildProcess, ServerProcess
from kestrel_client._pb.kestrel.v1 import admin_service_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.admin_service_pb2_grpc import AdminServiceStub
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from tests.abuse.soak.server import Held, held_by
from tests.abuse.soak.span_receiver import SpanReceiver
from tests.abuse.soak.traffic import traffic
from tests.tiny import VARIABLES

ROUND_S = 10.0
REST_S = 60.0
"""Seconds after the end of the calls within which the server must release their resources."""

TIMED_CALLS = 50
TOKEN = "token-of-the-soak"
METADATA = (("authorization", f"Bearer {TOKEN}"),)
LOGGED = ("--listen", "127.0.0.1:0", "--access-log", "json", "--log-format", "json")
FLAGS = (
    "--threads", "1", "--write-timeout", "1", "--image-store-bytes", "1MiB", "--image-cache-bytes", "8MiB",
    "--max-batch-size", "8", "--max-seq-length", "1024", "--kv-cache-gib", "0.0477", "--grace", "10",
    "--drain-delay", "0",
)  # fmt: skip
"""The caches are small, so that they fill quickly."""

MOST_GROWTH = 1.03
"""Limit of the growth of memory in use: the bytes and blocks that allocators have given out."""
MOST_RESIDENT_GROWTH = 1.1
"""Limit of the growth of resident memory. It includes memory that was freed and that the allocator keeps, so it varies
by 4 % in both directions while the memory in use stays the same."""
MOST_SLOWDOWN = 1.5
"""Limit of the growth of the server's processor time for a call. Of several rounds, the one with the least time counts,
because processes that share a core's caches add to it."""

GIVEN_BACK = ("calls", "admitted", "held_bytes", "requests", "lost_pages", "open_traces")
"""The fields of Held that are 0 without calls."""


class Server(ServerProcess):
    """The server of the soak. ``log``: its standard error, with a JSON record for each line."""

    def __init__(
        self,
        folder: Path,
        endpoint: str,
        start: type[subprocess.Popen[Any]] = subprocess.Popen,
        flags: Sequence[str] = FLAGS,
    ) -> None:
        self.log = folder / "log"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("KESTREL_", "OTEL_"))}
        environment = {
            **inherited,
            **VARIABLES,
            "KESTREL_API_KEY": TOKEN,
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "200",
            "OTEL_BSP_MAX_QUEUE_SIZE": "20000",
        }
        command = [sys.executable, "-m", "tests.abuse.soak.server", *LOGGED, *flags]
        super().__init__(command, log=self.log, environment=environment, start=start)

    def probe(self) -> Held:
        """Returns what the server holds now, after a garbage collection."""
        return held_by(self)

    @property
    def cpu_s(self) -> float:
        """The processor time that the server has used."""
        used = psutil.Process(self.pid).cpu_times()
        return float(used.user + used.system)


class Callers:
    """The process of the callers. A killed process is replaced by a new one."""

    def __init__(self, address: str, new_images: int) -> None:
        self._address, self._new_images = address, new_images
        self._seed = 0
        self._start()

    def _start(self) -> None:
        self._seed += 1
        self._child = ChildProcess(traffic, self._address, TOKEN, self._seed, self._new_images)
        assert self._child.pipe.recv() == "ready"

    def run(self, seconds: float, *, killed: bool) -> Counter[str]:
        """Runs traffic for ``seconds`` and returns the number of calls by outcome.

        ``killed``: kill the process instead, while its calls are in progress, and start another one.
        """
        if not killed:
            self._child.pipe.send(seconds)
            outcomes: Counter[str] = self._child.pipe.recv()
            return outcomes
        self._child.pipe.send(2 * seconds)
        time.sleep(seconds)
        self._child.kill()
        self._start()
        return Counter({"killed": 1})

    def __enter__(self) -> Callers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._child.kill()


@dataclass
class Rest:
    """The measurements between two rounds."""

    round: int
    held: Held
    latencies_ms: list[float]
    cpu_ms: float
    """The server's processor time for a call."""
    came: Counter[str] = field(default_factory=Counter)


DECODERS = 2
"""The idle decoder processes that traffic may add. Each has one descriptor in the server."""


def rest(server: Server, normal: Held | None) -> Held:
    """Waits until the server holds no more than before the traffic (``normal``), at most REST_S. Returns what it
    holds."""
    until = time.monotonic() + REST_S
    while True:
        held = server.probe()
        left = any(getattr(held, name) for name in GIVEN_BACK)
        more = normal is not None and (
            held.tasks > normal.tasks or held.descriptors > normal.descriptors + DECODERS
        )
        if not (left or more) or time.monotonic() > until:
            return held
        time.sleep(0.25)


def timed(stub: Any) -> list[float]:
    """Returns the milliseconds of calls on an idle server, each with eight tokens and no image."""
    task = pb.QueryTask(question="What is this?", max_tokens=8, sampling={"temperature": 0.0})
    request = pb.QueryRequest(query=task)
    latencies = []
    for _ in range(TIMED_CALLS):
        began = time.perf_counter()
        stub.Query(request, timeout=60, metadata=METADATA)
        latencies.append(1e3 * (time.perf_counter() - began))
    return latencies


def soak(
    seconds: float,
    report: Report,
    folder: Path,
    start: type[subprocess.Popen[Any]],
    new_images: int = 0,
    flags: Sequence[str] = FLAGS,
) -> None:
    rests: list[Rest] = []
    came: Counter[str] = Counter()
    with SpanReceiver() as receiver:
        with (
            Server(folder, receiver.endpoint, start, flags) as server,
            grpc.insecure_channel(server.address) as channel,
        ):
            vision, admin = VisionServiceStub(channel), AdminServiceStub(channel)
            timed(vision)
            normal = rest(server, None)
            with Callers(server.address, new_images) as callers:
                began = time.monotonic()
                while (left := seconds - (time.monotonic() - began)) > 1 or len(rests) < 4:
                    number = len(rests) + 1
                    span_s = max(1.0, min(ROUND_S, left, seconds / 6))
                    outcome = callers.run(span_s, killed=number % 3 == 0 and not new_images)
                    came += outcome
                    held = rest(server, normal)
                    before = server.cpu_s
                    latencies = timed(vision)
                    cpu_ms = 1e3 * (server.cpu_s - before) / TIMED_CALLS
                    rests.append(Rest(number, held, latencies, cpu_ms, outcome))
                    _report_rest(report, rests[-1], time.monotonic() - began)
            request = admin_service_pb2.GetStatisticsRequest()
            statistics = admin.GetStatistics(request, timeout=30, metadata=METADATA)
        # The server has ended and has exported all its spans.
        _judge(report, rests, normal, came)
        _judge_end(report, server, receiver, statistics)


def _report_rest(report: Report, rest: Rest, seconds: float) -> None:
    held = rest.held
    report.add(
        "At rest after each round",
        {
            "round": rest.round,
            "at s": round(seconds),
            "calls": sum(n for name, n in rest.came.items() if ":" not in name),
            "RSS MiB": held.rss_kib / 1024,
            "in use MiB": held.in_use_kib / 1024,
            "stored MiB": held.stored_kib / 1024,
            "blocks": held.blocks,
            "objects": held.objects,
            "tasks": held.tasks,
            "threads": held.threads,
            "fds": held.descriptors,
            "CPU ms": rest.cpu_ms,
            "ms p10": quantile(rest.latencies_ms, 0.1),
            "ms p50": median(rest.latencies_ms),
        },
    )


def _judge(report: Report, rests: list[Rest], normal: Held, came: Counter[str]) -> None:
    warm = max(1, len(rests) // 3)
    after, rounds = rests[warm - 1], rests[warm:]
    third = max(1, len(rounds) // 3)
    first, last = rounds[:third], rounds[-third:]

    def growth(name: str) -> float:
        return median([getattr(rest.held, name) for rest in last]) / getattr(after.held, name)

    report.add("What came of the calls", dict(sorted(came.items())))
    for name, what, most in (
        ("in_use_kib", "memory in use", MOST_GROWTH),
        ("blocks", "Python's blocks", MOST_GROWTH),
        ("rss_kib", "resident memory", MOST_RESIDENT_GROWTH),
    ):
        report.bar(f"{what} at the end over {what} after warm-up", growth(name), most)
    report.bar(
        "processor time of a call at the end over that after warm-up",
        min(rest.cpu_ms for rest in last) / min(rest.cpu_ms for rest in first),
        MOST_SLOWDOWN,
    )
    for name in GIVEN_BACK:
        report.bar(f"{name} left at rest", max(getattr(rest.held, name) for rest in rests), 0)
    for name, allowed in (("tasks", 0), ("descriptors", DECODERS)):
        most = max(getattr(rest.held, name) for rest in rests)
        report.bar(f"{name} at rest more than before", most - getattr(normal, name), allowed)
    faults = came["INTERNAL"] + came["UNKNOWN"] + came["UNAVAILABLE"]
    report.bar("calls that failed by the server's fault", faults, 0)
    report.bar("calls that were answered", came["OK"], 10, at_least=True)


def _judge_end(report: Report, server: Server, receiver: SpanReceiver, statistics: Any) -> None:
    lines = server.log.read_text(errors="replace").splitlines()
    records = [json.loads(line) for line in lines if line.startswith("{")]
    calls = [record for record in records if record.get("event") == "call"]
    traced = {record["trace_id"] for record in calls if "trace_id" in record}
    complaints = [r for r in records if r["level"] in ("WARNING", "ERROR", "CRITICAL")]
    others = [line for line in lines if not line.startswith("{")]
    for line in (*others, *map(json.dumps, complaints))[:10]:
        print(line[:4000])
    pages = statistics.free_pages + statistics.cached_pages
    report.add(
        "In all", {"calls": len(calls), "traces": len(receiver.calls), "spans": receiver.num_spans}
    )
    report.bar("calls whose span was lost", len(traced - receiver.calls), 0)
    report.bar("calls that had a trace", len(traced) / max(1, len(calls)), 1.0, at_least=True)
    report.bar("pages that statistics miss", statistics.pages - pages, 0)
    report.bar("lines of the log that are no record", len(others), 0)
    report.bar("complaints in the log", len(complaints), 0)
    report.bar("exit status", abs(server.status if server.status is not None else 255), 0)


def main(
    arguments: list[str] | None = None, start: type[subprocess.Popen[Any]] = subprocess.Popen
) -> Report:
    parser = Program("soak", __doc__).parser
    how_long = parser.add_mutually_exclusive_group()
    how_long.add_argument("--minutes", type=float, default=30.0)
    how_long.add_argument("--seconds", type=float)
    parser.add_argument(
        "--new-images", type=int, default=0, metavar="N", help="N callers send new images only"
    )
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS OF SERVE")
    args = parser.parse_args(arguments)
    report = Report("soak", vars(args))
    seconds = 20.0 if args.quick else args.seconds or 60 * args.minutes
    with tempfile.TemporaryDirectory(prefix="kestrel-soak-") as folder:
        soak(seconds, report, Path(folder), start, args.new_images, args.flags or FLAGS)
    report.finish(args.json)
    return report


if __name__ == "__main__":
    sys.exit(not all(bar.is_met for bar in main().bars))
