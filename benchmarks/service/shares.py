"""Measures how a flood of one principal's calls affects other principals, by default with kestrel-small on a CPU.

python -m benchmarks.service.shares [--quick] [--in-flight N] [--calls N] [--json FILE]
python -m benchmarks.service.shares --max-batch-size 64 --model moondream2 --random-weights --device cuda

One principal keeps many questions about a few images in flight, and repeats refused calls. Meanwhile another
principal, a principal with the highest priority, and the flooding principal with the highest priority make one call
after the other, each about a new image. The flood's process has a low priority, so it gets the processor time that
the server and the other callers leave. All other flags are those of ``kestrel-grpc serve``.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_grpc.security.identity.principal import Scope
from kestrel_grpc.security.identity.tokens import line_of, new_token

from ..reports.program import Flag, Program
from ..reports.report import Report, median, quantile
from ..traffic.flood import Flood
from ..traffic.processes import serve
from ..traffic.random_images import jpeg

NORMAL, HIGH = common_pb2.PRIORITY_NORMAL, common_pb2.PRIORITY_HIGH
SIZE = (640, 480)
"""Of the images, in pixels."""
QUESTIONS = ("What is this?", "How many red circles are there?", "Is there a star?")
MOST = {"other": 3.0, "urgent": 2.0, "flood itself, urgent": 2.0}
"""The limits of the p95 latency, as multiples of an idle server's p95."""


PHASES = ("preprocess", "queue", "prefill", "decode")
"""Of an answer's timings."""
OUTSIDE = "outside"
"""The rest of a call's time: its connection, the checks before the engine accepts it, and its response."""


@dataclass(frozen=True)
class Call:
    """An answered call. ``seconds``: for the caller."""

    seconds: float
    answer: Any

    def phase_ms(self, name: str) -> float:
        timings = self.answer.timings
        if name == OUTSIDE:
            return 1e3 * self.seconds - float(timings.total_ms)
        return float(getattr(timings, f"{name}_ms"))


def query(image: bytes, question: str, priority: Any) -> pb.QueryRequest:
    return pb.QueryRequest(
        images=[common_pb2.Image(encoded=image)],
        query={"question": question, "max_tokens": 32, "sampling": {"temperature": 0}},
        options=common_pb2.RequestOptions(priority=priority),
    )


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


@dataclass(frozen=True)
class Ask:
    """A call of the flood: a question about one of a few images."""

    images: list[bytes]
    token: str

    def __call__(self, stub: VisionServiceStub, rng: random.Random) -> Any:
        request = query(rng.choice(self.images), rng.choice(QUESTIONS), NORMAL)
        return stub.Query(request, metadata=bearer(self.token), timeout=100)


def measure(report: Report, address: str, tokens: dict[str, str], args: argparse.Namespace) -> None:
    count = 3 if args.quick else args.calls
    seeds = itertools.count(10_000)
    ask = Ask([jpeg(seed, *SIZE) for seed in range(16)], tokens["flood"])
    with grpc.insecure_channel(address) as channel:
        stub = VisionServiceStub(channel)

        def calls(name: str, priority: Any) -> list[Call]:
            made = []
            for _ in range(count):
                request = query(jpeg(next(seeds), *SIZE), QUESTIONS[0], priority)
                began = time.perf_counter()
                answer = stub.Query(request, metadata=bearer(tokens[name]), timeout=100)
                made.append(Call(time.perf_counter() - began, answer))
            return made

        def row(who: str, made: list[Call], idle: float) -> float:
            taken = [call.seconds for call in made]
            p95 = quantile(taken, 0.95)
            name = f"Seconds from call to answer, {count} calls, all answered"
            report.add(
                name, {"caller": who, "p50": median(taken), "p95": p95, "over idle": p95 / idle}
            )
            report.add(
                "The phases of these calls, p50 and p95 in ms, by the server's clock; the rest is outside",
                {"caller": who}
                | {
                    f"{phase} {p}": quantile([call.phase_ms(phase) for call in made], q)
                    for phase in (*PHASES, OUTSIDE)
                    for p, q in (("p50", 0.5), ("p95", 0.95))
                },
            )
            return p95

        calls("other", NORMAL)
        alone = calls("other", NORMAL)
        idle = quantile([call.seconds for call in alone], 0.95)
        row("idle server", alone, idle)
        with Flood(address, args.in_flight, ask) as flood:
            time.sleep(2 if args.quick else 10)
            for who, name, priority in (
                ("other", "other", NORMAL),
                ("urgent", "urgent", HIGH),
                ("flood itself, urgent", "flood", HIGH),
            ):
                p95 = row(who, calls(name, priority), idle)
                report.bar(f"p95 of {who!r} over an idle server's", p95 / idle, MOST[who])
            ended: dict[str, float | int | str] = dict(flood.ended)
        report.add("The flood's calls by how they ended", ended)


PROGRAM = Program(
    "service.shares",
    __doc__,
    Flag("--in-flight", 700, "calls of the flood"),
    Flag("--calls", 40, "measured calls of each caller"),
    Flag("--max-batch-size", 16, "sequences a step"),
    others="All other flags are those of 'kestrel-grpc serve'.",
)


def main(arguments: Sequence[str] | None = None) -> Report:
    with (
        PROGRAM.reporting(arguments) as (args, of_server, report),
        tempfile.TemporaryDirectory() as folder,
    ):
        tokens = {name: new_token() for name in ("flood", "other", "urgent")}
        path = Path(folder) / "tokens"
        scopes = (Scope.INFER, Scope.HIGH)
        path.touch(mode=0o600)
        path.write_text("".join(f"{line_of(n, scopes, t)}\n" for n, t in tokens.items()))
        batch = ("--max-batch-size", str(args.max_batch_size))
        flags = ("--auth-tokens", str(path), *batch, *of_server)
        with serve(flags, log=Path(folder) / "log") as server:
            measure(report, server.address, tokens, args)
    return report


if __name__ == "__main__":
    main()
