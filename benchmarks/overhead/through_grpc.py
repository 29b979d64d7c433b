"""Measures the cost of the service: CPU time of 64 streams and of unary calls, against a bare gRPC echo.

python -m benchmarks.overhead.through_grpc [--quick] [--json FILE] [--parts PART ...] [--rounds N] [--seconds S]
    [--streams N] [--step-ms MS]

The real server runs with an engine that returns canned words at a device's pace. The echo is a bare grpc.aio server
that sends the same messages at the same pace, or answers a unary call with the same bytes. It runs on asyncio's own
loop, the server on the loop of `serve`. Callers run in separate processes.

The part `unary` has the calls with and without an image: 1,920 of each server and pace. Its turns take some 65 s, of
which the pace of 400 calls a second needs 57.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..reports.program import Flag, Program
from ..reports.report import Report
from . import service
from .servers import Load, Pace

PARTS = ("streams", "wires", "unary")
PROGRAM = Program(
    "overhead.through_grpc",
    __doc__,
    Flag("--parts", PARTS, "what to measure", choices=PARTS),
    Flag("--streams", 64, "concurrent streams", quick=4),
    Flag("--step-ms", 3.6, "milliseconds of a step of the device"),
    Flag("--rounds", 5, "turns of server and echo", quick=1),
    Flag("--seconds", 1.0, "seconds of unary calls a turn", quick=0.2),
)


def main(arguments: Sequence[str] | None = None) -> Report:
    with PROGRAM.reporting(arguments) as (args, _, report):
        tokens, rate = (60, 100.0) if args.quick else (700, 400.0)
        load = Load(args.streams, tokens, args.step_ms / 1e3)
        calls = max(1, round(rate * args.seconds / load.streams))
        paces = (Pace(load.streams, calls, load.streams / rate), Pace(load.streams, calls, 0.0))
        servers = {"as it is": (False, False)} if args.quick else service.SERVERS
        if "streams" in args.parts:
            service.measure_streams(report, load, args.rounds, servers)
        if "wires" in args.parts:
            service.measure_wires(report, load, args.rounds)
        if "unary" in args.parts:
            service.measure_unary(report, load, paces, args.rounds, servers)
    return report


if __name__ == "__main__":
    main()
