"""Measures the cost of gRPC: CPU time and steps a second, for 64 streams and for unary calls, against a bare gRPC echo.

python -m benchmarks.overhead.through_grpc [--quick] [--json FILE] [--of service|engine|both] [--rounds N] [--seconds S]
    [--streams N] [--step-ms MS] [--staging-ms MS]

The first part measures the service alone: the real server with an engine that returns canned words at a device's pace
(overhead/service.py). The second part uses the real engine, on a device that only waits (overhead/engine.py). The echo
is a bare grpc.aio server that sends the same messages at the same pace, or answers a unary call with the same bytes.
Callers run in separate processes.
"""

from __future__ import annotations

from ..reports.report import Report, benchmark_parser
from . import engine as overhead_engine
from . import service as overhead_service
from .servers import Load, Pace


def main(arguments: list[str] | None = None) -> Report:
    parser = benchmark_parser("overhead.through_grpc", __doc__)
    parser.add_argument("--streams", type=int, default=64, help="concurrent streams [64]")
    parser.add_argument(
        "--step-ms", type=float, default=3.6, help="milliseconds of a step of the device [3.6]"
    )
    parser.add_argument(
        "--staging-ms",
        type=float,
        default=0.3,
        help="milliseconds of Python to launch a step [0.3]",
    )
    parser.add_argument(
        "--of",
        choices=("service", "engine", "both"),
        default="both",
        help="the engine of the server: canned words, the real engine, or one after the other [both]",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="turns of server and echo, for the service alone [5]"
    )
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="seconds of unary calls a turn [3]"
    )
    args = parser.parse_args(arguments)
    load = Load(
        streams=4 if args.quick else args.streams,
        tokens=60 if args.quick else 700,
        step_s=args.step_ms / 1e3,
        staging_s=args.staging_ms / 1e3,
    )
    rate, seconds = (100.0, 0.2) if args.quick else (400.0, args.seconds)
    calls = max(1, round(rate * seconds / load.streams))
    pace = Pace(load.streams, calls, load.streams / rate)
    report = Report("overhead.through_grpc", vars(args))
    if args.of != "engine":
        rounds = 1 if args.quick else args.rounds
        servers = {"as it is": False} if args.quick else overhead_service.SERVERS
        overhead_service.measure_streams(report, load, rounds, servers)
        paces = (pace, Pace(load.streams, calls, 0.0))
        overhead_service.measure_unary(report, load, paces, rounds, servers)
    if args.of != "service":
        overhead_engine.measure_streams(report, load)
        overhead_engine.measure_unary(report, load, pace)
    report.finish(args.json)
    return report


if __name__ == "__main__":
    main()
