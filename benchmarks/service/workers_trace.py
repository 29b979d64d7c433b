"""Runs the trace through one worker and through several, by each way to share calls out, and prints the ratios.

python -m benchmarks.service.workers_trace --model moondream2 --random-weights --device cuda --workers 2 --json F

The ways: the front, the workers' own addresses with a worker for each client process, and the SDK's ring of all
workers. Each worker has --in-flight calls. Clients are processes of the
same host. One worker is measured before and after the others, and the ratio is to the mean of both. It is of the
requests/s while all callers wait ("busy"), and of those of the whole run if it is short. --ways names some of the ways:
front, own, ring.

--at measures servers that run already, such as those of a cluster, instead of workers. Then --front is the address of
the front before them. They need the SKILL of trace_grpc.py, and a max-deadline of 600 s.
"""

from __future__ import annotations

import argparse
import math
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..models.opening import MODEL_FLAGS, QUICK, model_arguments, server_flags
from ..reports.program import Flag, Program
from ..reports.report import Report, Row
from ..trace import RUN_FLAGS, settle
from ..trace_grpc import SKILL, trace_with_warm_up
from ..traffic.chart_trace import ChartTrace
from ..traffic.grpc_clients import ClientProcesses, Target
from ..traffic.processes import START_PATIENCE_S, ServerProcess, serve
from ..traffic.trace_run import RunPlan, busy_rate, summary

WAYS = ("front", "own", "ring")
PROGRAM = Program(
    "service.workers_trace",
    __doc__,
    *RUN_FLAGS,
    Flag("--workers", 2, "workers of the server"),
    Flag("--clients", 8, "client processes for each worker", quick=1),
    Flag("--ways", WAYS, "ways to measure", choices=WAYS),
    Flag("--at", None, "addresses of servers that run already", nargs="+"),
    Flag("--front", None, "the front before them"),
    others=MODEL_FLAGS,
)


class Ways:
    """Runs of one trace. ``count``: the number of its questions; the others warm up."""

    def __init__(
        self, args: argparse.Namespace, trace: ChartTrace, warm_up: Sequence[int], folder: Path
    ) -> None:
        self._args, self._trace, self._warm_up, self._folder = args, trace, warm_up, folder
        self._count = len(trace.questions) - len(warm_up)
        self._runs = 0
        self.rows: list[tuple[str, float, Row]] = []
        """Of each run: its way, the requests/s that count, and the rest."""

    def warm_up(self, own: Sequence[str]) -> None:
        for address in own:
            with self._clients(address, 1) as clients:
                clients.run(RunPlan(8, 8, namespace="warm-up"), self._warm_up)

    def run(self, way: str, targets: Target | list[Target], workers: int) -> float:
        """Returns requests a second."""
        args = self._args
        self._runs += 1
        print(f"{way}: {args.in_flight[0] * workers} in flight", flush=True)
        with self._clients(targets, workers) as clients:
            plan = RunPlan(
                args.in_flight[0] * workers,
                args.tokens[0],
                args.limit[0],
                f"run-{self._runs}",
            )
            asked = clients.run(plan, range(self._count))
        whole = summary(asked)
        busy = busy_rate(asked, plan.in_flight)
        rate = float(whole["requests/s"]) if math.isnan(busy) else busy
        self.rows.append((way, rate, {"busy requests/s": busy, **whole}))
        return rate

    def _clients(self, targets: Target | list[Target], workers: int) -> ClientProcesses:
        count = self._args.clients * workers
        return ClientProcesses(targets, self._trace, count=count, folder=self._folder)


def start(flags: Sequence[str], port: int, log: Path) -> ServerProcess:
    own = ("--worker-listen", f"127.0.0.1:{port}")
    command = [*own, "--max-deadline", "600", "--log-level", "warning", *flags]
    return serve(command, log=log, end_patience_s=START_PATIENCE_S)


def free_ports(count: int) -> int:
    """The first of ``count`` free ports in a row."""
    while True:
        held = [socket.create_server(("127.0.0.1", 0))]
        first = held[0].getsockname()[1]
        try:
            held += [socket.create_server(("127.0.0.1", first + n)) for n in range(1, count)]
        except (OSError, OverflowError):
            continue
        else:
            return int(first)
        finally:
            for each in held:
                each.close()


def main(arguments: Sequence[str] | None = None) -> Report:
    with PROGRAM.reporting(arguments) as (args, of_model, report):
        settle(args)
        if args.at:
            args.workers = len(args.at)
            args.ways = [way for way in args.ways if way in ("own", "ring")]
            args.ways += ["front"] if args.front else []
        config = model_arguments(of_model, quick=args.quick)
        flags = server_flags([*(QUICK if args.quick else ()), *of_model], config)
        flags += ["--workers", str(args.workers), "--skill", SKILL]
        trace, warm_up = trace_with_warm_up(args, config)
        many = args.workers

        def measure(ways: Ways, own: Sequence[str], front: str) -> float:
            """Returns the requests a second of one worker."""
            ways.warm_up(own)
            before = ways.run("one worker", own[0], 1)
            by_way: dict[str, tuple[str, Target | list[Target]]] = {
                "front": ("front", front),
                "own": ("own addresses, a worker for each client", list(own)),
                "ring": ("own addresses, the SDK's ring", tuple(own)),
            }
            for way, (what, targets) in by_way.items():
                if way in args.ways:
                    ways.run(what, targets, many)
            return (before + ways.run("one worker, again", own[0], 1)) / 2

        with tempfile.TemporaryDirectory(prefix="bench-") as name:
            ways = Ways(args, trace, warm_up, Path(name))
            if args.at:
                alone = measure(ways, args.at, args.front)
            else:
                port = free_ports(many)
                own = [f"127.0.0.1:{port + n}" for n in range(many)]
                with start(flags, port, Path(name) / "log") as server:
                    alone = measure(ways, own, server.address)
        for way, rate, row in ways.rows:
            key: Row = {"calls by": way, "x one": rate / alone}
            title = f"Trace through {many} workers, {args.in_flight[0]} in flight for each"
            report.add(title, {**key, **row})
    return report


if __name__ == "__main__":
    main()
