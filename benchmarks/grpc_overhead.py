"""What gRPC costs an engine that streams to 64 callers: steps a second and CPU, against the engine alone and an echo.

python -m benchmarks.grpc_overhead [--quick] [--json FILE] [--streams N] [--step-ms MS] [--staging-ms MS]

The real server, engine and tokenizer on a device that only takes its time (paced_device.py); callers in processes of
their own. The echo is a bare grpc.aio server that sends the same messages at the same pace, or answers a unary call
with the same bytes. What the server takes beyond engine and echo is the service's own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import grpc

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb

from .overhead_servers import (
    QUESTION,
    Load,
    Pace,
    Setting,
    run_alone,
    run_asked,
    run_echo,
    run_server,
)
from .paced_device import Window
from .pictures import jpeg
from .report import Report, add_arguments, median, quantile

STREAM = "/kestrel.v1.VisionService/StreamCaption"
UNARY = "/kestrel.v1.VisionService/Query"
SETTINGS = (
    Setting("as it is"),
    Setting("70 pictures/s", pictures_per_s=70),
    Setting("GIL 5 ms", switch_interval_s=0.005),
    Setting("GIL 0.1 ms", switch_interval_s=0.0001),
    Setting("every step", longest_pause_s=0.0),
)
"""The first is what the server does; GIL: how long a thread may keep the interpreter while another waits."""

CALLERS_A_CLIENT = 16
"""A client process takes that many callers, so that clients are not what is measured."""

STREAM_LIMIT_US, UNARY_LIMIT_US, RATE_LIMIT = 15.0, 150.0, 0.90
_CONTEXT = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Heard:
    """What one caller heard of a stream: its messages and when they came, seconds of a clock all processes share."""

    messages: list[bytes]
    times: list[float]


@contextlib.contextmanager
def process(target: Any, *arguments: Any) -> Iterator[Connection]:
    """A process of its own that runs ``target(pipe, *arguments)``; it is told to end by None."""
    ours, theirs = _CONTEXT.Pipe()
    child = _CONTEXT.Process(target=target, args=(theirs, *arguments))
    child.start()
    theirs.close()
    try:
        yield ours
    finally:
        with contextlib.suppress(OSError):
            ours.send(None)
        child.join(30)
        if child.is_alive():
            child.kill()


def stream_client(pipe: Connection, address: str, request: bytes, count: int) -> None:
    """Reads ``count`` streams to their ends when it is told to begin; answers with what it heard of each."""

    async def read(call: Any) -> Heard:
        messages, times = [], []
        async for message in call(request):
            times.append(time.perf_counter())
            messages.append(message)
        return Heard(messages, times)

    async def main() -> list[Heard]:
        async with grpc.aio.insecure_channel(address) as channel:
            await channel.channel_ready()
            pipe.send("ready")
            await asyncio.to_thread(pipe.recv)
            call = channel.unary_stream(STREAM)
            return await asyncio.gather(*(read(call) for _ in range(count)))

    pipe.send(asyncio.run(main()))
    pipe.recv()


def unary_client(pipe: Connection, address: str, request: bytes, pace: Pace) -> None:
    """Calls at its pace when it is told to begin; answers with (an answer, seconds of all calls)."""

    async def main() -> tuple[bytes, list[float]]:
        times: list[float] = []
        answers: list[bytes] = []
        async with grpc.aio.insecure_channel(address) as channel:
            await channel.channel_ready()
            pipe.send("ready")
            await asyncio.to_thread(pipe.recv)
            method: Any = channel.unary_unary(UNARY)

            async def call() -> None:
                began = time.perf_counter()
                answers[:] = [await method(request)]
                times.append(time.perf_counter() - began)

            await pace.run(call)
        return answers[0], times

    pipe.send(asyncio.run(main()))
    pipe.recv()


def drive(address: str, target: Any, arguments: list[tuple[Any, ...]]) -> list[Any]:
    """Runs ``target`` in a process for each of ``arguments``, all begun at once; what they answer."""
    with contextlib.ExitStack() as stack:
        pipes = [stack.enter_context(process(target, address, *a)) for a in arguments]
        for pipe in pipes:
            pipe.recv()
        for pipe in pipes:
            pipe.send("go")
        return [pipe.recv() for pipe in pipes]


def shares(total: int) -> list[int]:
    """``total`` callers over the client processes."""
    clients = -(-total // CALLERS_A_CLIENT)
    return [total // clients + (i < total % clients) for i in range(clients)]


def streamed(load: Load, setting: Setting) -> tuple[Window, list[Heard]]:
    """Streams through the server."""
    inner = pb.CaptionRequest(image=common_pb2.Image(encoded=jpeg(1, 64, 64)))
    inner.sampling.max_tokens = load.tokens
    request = pb.StreamCaptionRequest(request=inner).SerializeToString()
    with process(run_server, load, setting) as server:
        address = server.recv()
        arguments = [(request, count) for count in shares(load.streams)]
        heard = [h for each in drive(address, stream_client, arguments) for h in each]
        server.send("window")
        return server.recv(), heard


def echoed(load: Load, messages: list[bytes], pause_s: float) -> float:
    """Seconds of CPU that a bare server takes for ``messages`` to every stream, one every ``pause_s``."""
    with process(run_echo, STREAM, messages, load.streams, pause_s) as server:
        address = server.recv()
        drive(address, stream_client, [(b"", count) for count in shares(load.streams)])
        server.send("streamed")
        return float(server.recv())


def tokens_of(message: bytes) -> int:
    event = pb.StreamCaptionResponse.FromString(message)
    return event.text_delta.output_tokens if event.HasField("text_delta") else 0


def gaps_ms(heard: list[Heard]) -> list[float]:
    """Between text messages of a stream, the first and the last few left out."""
    found = []
    for each in heard:
        times = [t for t, m in zip(each.times, each.messages, strict=True) if tokens_of(m)]
        found += [1e3 * (b - a) for a, b in itertools.pairwise(times[5:-5])]
    return found


def measure_streams(report: Report, load: Load, others: Sequence[Setting]) -> None:
    title = f"{load.streams} streams, {1e3 * load.step_s:g} ms a step"
    with process(run_alone, load) as engine:
        engine.send("window")
        alone: Window = engine.recv()
    rate = alone.steps / alone.wall_s
    report.add(title, _row("engine alone", load, alone, rate, []))
    window, heard = streamed(load, SETTINGS[0])
    report.add(title, _row(SETTINGS[0].name, load, window, rate, heard))
    messages = heard[0].messages
    num_tokens = max(map(tokens_of, messages))
    pause_s = window.wall_s / window.steps * num_tokens / len(messages)
    echo_us = 1e6 * echoed(load, messages, pause_s) / (num_tokens * load.streams)
    ours_us = 1e6 * window.cpu_s / (window.steps * load.streams)
    alone_us = 1e6 * alone.cpu_s / (alone.steps * load.streams)
    added = ours_us - echo_us - alone_us
    report.add(
        "CPU a streamed token, us",
        {"server": ours_us, "echo": echo_us, "engine alone": alone_us, "added": added},
    )
    report.bar("us of CPU that a streamed token adds to engine and echo", added, STREAM_LIMIT_US)
    ratio = window.steps / window.wall_s / rate
    report.bar("tokens/s through gRPC over the engine alone", ratio, RATE_LIMIT, at_least=True)
    for setting in others:
        window, heard = streamed(load, setting)
        report.add(title, _row(setting.name, load, window, rate, heard))


def _row(
    name: str, load: Load, window: Window, alone: float, heard: list[Heard]
) -> dict[str, float | int | str]:
    rate = window.steps / window.wall_s
    num_tokens = sum(max(map(tokens_of, h.messages), default=0) for h in heard)
    gaps = gaps_ms(heard)
    per_token = 1e6 / (window.steps * load.streams)
    return {
        "setting": name,
        "steps/s": rate,
        "of alone": rate / alone,
        "busy": rate * load.step_s,
        "messages/token": sum(len(h.messages) for h in heard) / max(1, num_tokens),
        "us/token": window.cpu_s * per_token,
        **{thread: seconds * per_token for thread, seconds in sorted(window.by_thread.items())},
        "late us p50": 1e6 * median(window.late_s),
        "late us p99": 1e6 * quantile(window.late_s, 0.99),
        "host us p50": 1e6 * median(window.host_s),
        "host us p99": 1e6 * quantile(window.host_s, 0.99),
        "gap p50": median(gaps),
        "gap p99": quantile(gaps, 0.99),
        "gap max": max(gaps, default=0.0),
    }


def measure_unary(report: Report, load: Load, rate: float, seconds: float) -> None:
    """Questions without a picture, paced, one token each. On the same device: one that took no time would make a step
    for every call, and the engine's share were another in the server than alone."""
    sampling = common_pb2.Sampling(max_tokens=1)
    request = pb.QueryRequest(question=QUESTION, sampling=sampling).SerializeToString()
    pace = Pace(load.streams, max(1, round(rate * seconds / load.streams)), load.streams / rate)
    num_calls = pace.calls * pace.callers
    with process(run_asked, load, pace) as engine:
        costs = {"engine alone": 1e6 * engine.recv() / num_calls}
    with process(run_server, load, Setting("")) as server:
        costs["server"], answer, times = _asked(server, request, pace)
    with process(run_echo, UNARY, [answer], load.streams, 0.0) as server:
        costs["echo"], _, echo_times = _asked(server, request, pace)
    seen = {"server": times, "echo": echo_times}
    for name, cost in costs.items():
        ms = [1e3 * t for t in seen.get(name, [])]
        row = {"us": cost, "p50 ms": median(ms), "p99 ms": quantile(ms, 0.99), "of": name}
        report.add(f"CPU of a unary call at {rate:g} a second", row)
    added = costs["server"] - costs["echo"] - costs["engine alone"]
    report.bar("us of CPU that a unary call adds to engine and echo", added, UNARY_LIMIT_US)


def _asked(server: Connection, request: bytes, pace: Pace) -> tuple[float, bytes, list[float]]:
    """Microseconds of the server's CPU a call, an answer, and seconds of each call."""
    address = server.recv()
    each = [replace(pace, callers=count) for count in shares(pace.callers)]
    drive(address, unary_client, [(request, Pace(p.callers, 2, 0.01)) for p in each])
    server.send("cpu")
    before = server.recv()
    answers = drive(address, unary_client, [(request, p) for p in each])
    server.send("cpu")
    cost = 1e6 * (server.recv() - before) / (pace.calls * pace.callers)
    return cost, answers[0][0], [t for _, times in answers for t in times]


def main(arguments: list[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(prog="benchmarks.grpc_overhead", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--streams", type=int, default=64, help="streams at a time [64]")
    parser.add_argument("--step-ms", type=float, default=3.6, help="a step of the device [3.6]")
    parser.add_argument(
        "--staging-ms", type=float, default=0.3, help="of Python to launch a step [0.3]"
    )
    args = parser.parse_args(arguments)
    load = Load(
        streams=4 if args.quick else args.streams,
        tokens=60 if args.quick else 700,
        step_s=args.step_ms / 1e3,
        staging_s=args.staging_ms / 1e3,
    )
    report = Report("grpc_overhead", vars(args))
    measure_streams(report, load, () if args.quick else SETTINGS[1:])
    measure_unary(report, load, 100.0 if args.quick else 400.0, 0.2 if args.quick else 3.0)
    report.finish(args.json)
    return report


if __name__ == "__main__":
    main()
