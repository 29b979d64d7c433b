"""Compares HTTP with gRPC: tokens a second and the server's CPU time, for concurrent streams of a canned engine.

python -m benchmarks.overhead.through_http [--quick] [--json FILE] [--streams N] [--step-ms MS] [--rounds N]

The server has both ports and the engine of through_grpc.py, which returns canned words at a device's pace. The same
streams are read by gRPC, by Moondream's REST interface and by OpenAI's, in turn. A second server has no HTTP port: it
shows what an idle HTTP port costs gRPC. Callers run in separate processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from ..reports.report import Report, benchmark_parser, median
from ..traffic.processes import ChildProcess
from .callers import Callers
from .cpu_window import NAMES
from .http_callers import HttpCallers, Span, caption_request, chat_request
from .servers import Load, Setting, run_canned

_ENGINE = NAMES["kestrel-canned"]
HTTP_SHARE, IDLE_SHARE = 0.85, 0.97
"""Bars: the share of gRPC's tokens a second that HTTP reaches, and that gRPC keeps beside an idle HTTP port."""


@dataclass
class _Way:
    """A way to read streams. ``tokens_a_s``, ``cpu_us``: by round; the latter of a token, without the engine."""

    name: str
    pipe: Connection
    read: Callable[[], list[Span]]
    tokens_a_s: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)

    def measure(self, load: Load) -> None:
        spans = self.read()
        seconds = max(end for _, end in spans) - min(begin for begin, _ in spans)
        self.tokens_a_s.append(load.streams * load.tokens / seconds)
        self.pipe.send("window")
        window = self.pipe.recv()
        cpu_s = window.cpu_s - window.by_thread[_ENGINE]
        self.cpu_us.append(1e6 * cpu_s / (window.steps * load.streams))


def main(arguments: list[str] | None = None) -> Report:
    parser = benchmark_parser("overhead.through_http", __doc__)
    parser.add_argument("--streams", type=int, default=64, help="concurrent streams [64]")
    parser.add_argument(
        "--step-ms", type=float, default=3.6, help="milliseconds of a step of the device [3.6]"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way [5]")
    args = parser.parse_args(arguments)
    load = Load(
        streams=4 if args.quick else args.streams,
        tokens=60 if args.quick else 700,
        step_s=args.step_ms / 1e3,
        staging_s=0.0,
    )
    report = Report("overhead.through_http", vars(args))
    _measure(report, load, 1 if args.quick else args.rounds)
    report.finish(args.json)
    return report


def _measure(report: Report, load: Load, rounds: int) -> None:
    both, alone = Setting("both ports", http=True), Setting("gRPC alone")
    with (
        Callers(load.streams) as callers,
        HttpCallers(load.streams) as http_callers,
        ChildProcess(run_canned, load, both) as pipe,
        ChildProcess(run_canned, load, alone) as pipe_alone,
    ):
        address, address_alone = pipe.recv(), pipe_alone.recv()
        pipe.send("http")
        http_address = pipe.recv()

        def grpc(address: str) -> Callable[[], list[Span]]:
            def read() -> list[Span]:
                heard = callers.read_streams(address, load.tokens)
                return [(each.times[0], each.times[-1]) for each in heard]

            return read

        def http(make: Callable[[int], tuple[str, dict[str, Any]]]) -> Callable[[], list[Span]]:
            return lambda: http_callers.read_streams(http_address, make, load.tokens)

        ways = [
            _Way("gRPC", pipe, grpc(address)),
            _Way("gRPC, no HTTP port", pipe_alone, grpc(address_alone)),
            _Way("Moondream's REST", pipe, http(caption_request)),
            _Way("OpenAI's chat", pipe, http(chat_request)),
        ]
        for way in ways:
            way.read()  # Warms up.
        for _ in range(rounds):
            for way in ways:
                way.measure(load)
    first, no_http, *by_http = ways
    for way in ways:
        shares = [a / b for a, b in zip(way.tokens_a_s, first.tokens_a_s, strict=True)]
        report.add(
            f"{load.streams} streams",
            {
                "way": way.name,
                "tokens/s": median(way.tokens_a_s),
                "share of gRPC": median(shares),
                "us of CPU a token": median(way.cpu_us),
            },
        )
        if way in by_http:
            what = f"tokens/s of {way.name}, as a share of gRPC's"
            report.bar(what, median(shares), HTTP_SHARE, at_least=True)
    kept = [a / b for a, b in zip(first.tokens_a_s, no_http.tokens_a_s, strict=True)]
    what = "gRPC's tokens/s beside an idle HTTP port, as a share of those without one"
    report.bar(what, median(kept), IDLE_SHARE, at_least=True)


if __name__ == "__main__":
    main()
