"""Measures what the front of several workers costs: time of a call, and its processor time for a call and a message.

python -m benchmarks.service.front --json F

It starts kestrel-tiny with two workers on the CPU and calls one worker directly, and both through the front: GetLoad, a
small call that the engine does not see; an image of --image-bytes that is no image; and a stream of reflection, for
messages. Runs alternate, and the least times count.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kestrel_client._pb.kestrel.v1 import image_service_pb2, model_service_pb2
from kestrel_client._pb.kestrel.v1.image_service_pb2_grpc import ImageServiceStub
from kestrel_client._pb.kestrel.v1.model_service_pb2_grpc import ModelServiceStub

from ..reports.report import Report, benchmark_parser
from ..traffic.processes import serve

_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
Work = Callable[[grpc.aio.Channel, int], Awaitable[None]]


@dataclass(frozen=True)
class Cost:
    """Seconds of one piece of work: on the clock, and of the front's processor time."""

    clock_s: float
    front_s: float


async def small(channel: grpc.aio.Channel, count: int) -> None:
    stub = ModelServiceStub(channel)
    for _ in range(count):
        await stub.GetLoad(model_service_pb2.GetLoadRequest())


async def at_once(channel: grpc.aio.Channel, count: int) -> None:
    await asyncio.gather(*(small(channel, count // 32) for _ in range(32)))


def image(num_bytes: int) -> Work:
    request = image_service_pb2.PutImageRequest()
    request.image.encoded = b"x" * num_bytes

    async def put(channel: grpc.aio.Channel, count: int) -> None:
        stub = ImageServiceStub(channel)
        for _ in range(count):
            try:
                await stub.PutImage(request)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                    raise

    return put


async def messages(channel: grpc.aio.Channel, count: int) -> None:
    """One stream, in which a message goes to the server and one comes back."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = stub.ServerReflectionInfo()
    for _ in range(count):
        await call.write(request)
        await call.read()
    await call.done_writing()


def _used_s(processes: Sequence[psutil.Process]) -> float:
    return float(sum(sum(each.cpu_times()[:2]) for each in processes))


async def cost(address: str, work: Work, count: int, fronts: Sequence[psutil.Process]) -> Cost:
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        await work(channel, 32)
        used, began = _used_s(fronts), time.perf_counter()
        await work(channel, count)
        seconds = time.perf_counter() - began
        return Cost(seconds / count, (_used_s(fronts) - used) / count)


async def measure(report: Report, own: str, front: str, args: argparse.Namespace) -> None:
    children = psutil.Process().children(recursive=True)
    fronts = [each for each in children if Path(each.exe()).name == "envoy"]
    num_bytes, count = args.image_bytes, args.calls
    kinds: tuple[tuple[str, Work, int], ...] = (
        ("small calls, one by one", small, count),
        ("small calls, 32 at once", at_once, count),
        (f"calls of {num_bytes} bytes", image(num_bytes), count // 4),
        ("a message each way in a stream", messages, count),
    )
    for kind, work, times in kinds:
        rounds: list[tuple[Cost, Cost]] = []
        for _ in range(args.rounds):
            rounds.append(
                (await cost(own, work, times, fronts), await cost(front, work, times, fronts))
            )
        direct = min(each.clock_s for each, _ in rounds)
        through = min(each.clock_s for _, each in rounds)
        used = statistics.median(each.front_s for _, each in rounds)
        report.add(
            "The front",
            {
                "work": kind,
                "direct us": 1e6 * direct,
                "front us": 1e6 * through,
                "front's CPU us": 1e6 * used,
            },
        )


def main(arguments: Sequence[str] | None = None) -> Report:
    parser = benchmark_parser("service.front", __doc__)
    parser.add_argument("--calls", type=int, default=4000, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--image-bytes", type=int, default=300_000, metavar="N")
    args = parser.parse_args(arguments)
    if args.quick:
        args.calls, args.rounds = 64, 1
    report = Report("front", vars(args))
    with tempfile.TemporaryDirectory() as folder:
        own = f"unix:{folder}/{{index}}"
        flags = ["--workers", "2", "--device", "cpu", "--spread", "calls", "--worker-listen", own]
        with serve([*flags, "--log-level", "warning"], log=Path(folder) / "log") as server:
            address = own.format(index=0)
            asyncio.run(measure(report, address, server.address, args))
    report.finish(args.json)
    return report


if __name__ == "__main__":
    main()
