"""Measures the cost of gRPC: CPU time and steps a second, for 64 streams and for unary calls, against a bare gRPC echo.

python -m benchmarks.overhead.through_grpc [--quick] [--json FILE] [--of service|engine|both] [--rounds N] [--seconds S]
    [--streams N] [--step-ms MS] [--staging-ms MS]

The first part measures the service alone: the real server with an engine that returns canned words at a device's pace
(overhead/service.py). The second part uses the real engine, on a device that only waits (overhead/engine.py). The echo
is a bare grpc.aio server that sends the same messages at the same pace, or answers a unary call with the same bytes.
Callers run in separate processes.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..reports.program import Flag, Program
from ..reports.report import Report
from . import engine as overhead_engine
from . import service as overhead_service
from .servers import Load, Pace

PROGRAM = Program(
    "overhead.through_grpc",
    __doc__,
    Flag("--streams", 64, "concurrent streams", quick=4),
    Flag("--step-ms", 3.6, "milliseconds of a step of the device"),
    Flag("--staging-ms", 0.3, "milliseconds of Python to launch a step"),
    Flag("--of", "both", "the engine of the server", choices=("service", "engine", "both")),
    Flag("--rounds", 5, "turns of server and echo, for the service alone", quick=1),
    Flag("--seconds", 3.0, "seconds of unary calls a turn", quick=0.2),
)


def main(arguments: Sequence[str] | None = None) -> Report:
    with PROGRAM.reporting(arguments) as (args, _, report):
        tokens, rate = (60, 100.0) if args.quick else (700, 400.0)
        load = Load(args.streams, tokens, args.step_ms / 1e3, args.staging_ms / 1e3)
        calls = max(1, round(rate * args.seconds / load.streams))
        pace = Pace(load.streams, calls, load.streams / rate)
        if args.of != "engine":
            servers = {"as it is": (False, False)} if args.quick else overhead_service.SERVERS
            overhead_service.measure_streams(report, load, args.rounds, servers)
            overhead_service.measure_wires(report, load, args.rounds)
            paces = (pace, Pace(load.streams, calls, 0.0))
            overhead_service.measure_unary(report, load, paces, args.rounds, servers)
        if args.of != "service":
            overhead_engine.measure_streams(report, load)
            overhead_engine.measure_unary(report, load, pace)
    return report


if __name__ == "__main__":
    main()
