"""The memory of a server whose callers always send new images: it must stay the same once the caches are full.

python -m benchmarks.memory [--calls N] [--callers N] [--rounds N] [--quick] [--json FILE] [-- FLAGS OF SERVE]

Each call brings an image with other bytes, so every cache of the host fills: the image store (--image-store-bytes),
prepared images and encoded images (--image-cache-bytes). Between rounds no call runs, and the server collects garbage
and reports its memory. After half of the rounds, neither the memory in use nor the resident memory may grow.

The default flags fill caches of 16 MiB with the bundled model. On a GPU give those of a real server:

    python -m benchmarks.memory --calls 180000 --callers 128 -- --model moondream2 --precision fp8
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc

from benchmarks.reports.report import Report, benchmark_parser
from benchmarks.traffic.images import jpeg
from benchmarks.traffic.processes import ServerProcess
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from tests.abuse.soak.__main__ import MOST_GROWTH, MOST_RESIDENT_GROWTH
from tests.abuse.soak.server import held_by

SMALL = ("--threads", "1", "--image-store-bytes", "8MiB", "--image-cache-bytes", "8MiB")
SIZES = ((640, 480), (512, 512), (480, 640), (800, 600), (378, 378), (1024, 320))
PICTURES = 48
"""Different pixels. A comment makes the bytes of each call differ, and costs the callers nothing."""


def images() -> Iterator[bytes]:
    """JPEGs without end, no two with the same bytes."""
    pictures = [jpeg(seed, *SIZES[seed % len(SIZES)]) for seed in range(PICTURES)]
    for number in itertools.count():
        data = pictures[number % PICTURES]
        comment = number.to_bytes(8, "big")
        yield data[:2] + b"\xff\xfe" + (2 + len(comment)).to_bytes(2, "big") + comment + data[2:]


class Callers:
    """Threads that take images in turn, each with a connection of its own."""

    def __init__(self, address: str, count: int) -> None:
        self._images, self._lock = images(), threading.Lock()
        self._channels = [
            grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
            for _ in range(count)
        ]
        self.failed = 0

    def run(self, calls: int) -> None:
        """Makes ``calls`` calls and returns when all have ended."""
        left = iter(range(calls))
        threads = [
            threading.Thread(target=self._call, args=(VisionServiceStub(channel), left))
            for channel in self._channels
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _call(self, stub: VisionServiceStub, left: Iterator[int]) -> None:
        while True:
            with self._lock:
                number = next(left, None)
                image = next(self._images)
            if number is None:
                return
            request = pb.QueryRequest(images=[{"encoded": image}])
            request.query.question = "How many circles are there?"
            request.query.max_tokens, request.query.sampling.temperature = 3, 0.0
            try:
                stub.Query(request, timeout=120)
            except grpc.RpcError:
                with self._lock:
                    self.failed += 1


def measure(report: Report, calls: int, callers: int, rounds: int, flags: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="kestrel-memory-") as folder:
        command = [sys.executable, "-m", "tests.abuse.soak.server", "--listen", "127.0.0.1:0"]
        with ServerProcess([*command, *flags], log=Path(folder) / "log") as server:
            asking = Callers(server.address, callers)
            began, seen = time.monotonic(), []
            for number in range(rounds):
                asking.run(calls // rounds)
                held = held_by(server)
                seen.append(held)
                report.add(
                    "At rest after each round",
                    {
                        "calls": (number + 1) * (calls // rounds),
                        "at s": round(time.monotonic() - began),
                        "RSS MiB": held.rss_kib / 1024,
                        "in use MiB": held.in_use_kib / 1024,
                        "stored MiB": held.stored_kib / 1024,
                        "blocks": held.blocks,
                        "objects": held.objects,
                    },
                )
    half, end = seen[len(seen) // 2], seen[-1]
    for name, what, most in (
        ("in_use_kib", "memory in use", MOST_GROWTH),
        ("blocks", "Python's blocks", MOST_GROWTH),
        ("rss_kib", "resident memory", MOST_RESIDENT_GROWTH),
    ):
        value = getattr(end, name) / getattr(half, name)
        report.bar(f"{what} at the end over {what} after half of the calls", value, most)
    report.bar("calls that failed", asking.failed, 0)


def main(arguments: list[str] | None = None) -> Report:
    parser = benchmark_parser("memory", __doc__)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--callers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS OF SERVE")
    args = parser.parse_args(arguments)
    report = Report("memory", vars(args))
    calls, rounds = (40, 2) if args.quick else (args.calls, args.rounds)
    measure(report, calls, args.callers, rounds, args.flags or SMALL)
    report.finish(args.json)
    return report


if __name__ == "__main__":
    sys.exit(not all(bar.is_met for bar in main().bars))
