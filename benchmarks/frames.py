"""Measures frames/s on a stream in which most crops repeat, with and without the reuse of crops.

python -m benchmarks.frames --model moondream2 --random-weights --device cuda --size 1920x1080 --json F

The frames are those of a fixed camera or a screen: some equal the frame before, and in each of the others
--changed-tiles tiles have changed, and with them the overview. So many frames have changed that 90 % of all crops of
the stream are equal to those of the frame before. Frames come as pixels, with --in-flight frames at a time.

The task is Detect with one object at most, through StreamFrames of a server in this process with the client in
another. "none": every frame is new, so nothing can be reused. "whole": the stream above, with the default settings,
which reuse the results of equal frames. "crops": equal crops too (--crop-cache-bytes). "vision ms", "prefill ms" and
"decode ms" are the device's work divided by the number of frames, "new ms" and "same ms" the median times of a frame
that changed and of one that did not, from its arrival at the server to its answer. "client CPU ms" and "server CPU ms"
are the processor time of both processes for each frame, gRPC's threads included.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TypeAlias

from kestrel_client import AsyncKestrelClient, DetectTask
from kestrel_engine import InferenceEngine, RuntimeConfig, StepEvent
from kestrel_grpc.process.server import KestrelServer
from kestrel_grpc.settings.server import ServerConfig

from .models.opening import MODEL_FLAGS, KeptRuntime, Opened, model_arguments, open_model, server_gc
from .reports.program import Flag, Program
from .reports.report import Report
from .traffic.frame_streams import FrameStream, camera_size
from .traffic.processes import ChildProcess
from .traffic.step_log import StepLog

UNCHANGED = 0.9
CACHE_BYTES = 256 << 20
MOST_MESSAGE_BYTES = 64 << 20
WARM_UP_FRAMES, WARM_UP_FRAMES_ON_CUDA = 4, 17
"""On a GPU, each of the first images takes a new buffer of pinned memory (IMAGE_RING)."""
MOST_IN_FLIGHT = 16


@dataclass(frozen=True, slots=True)
class Watched:
    """A stream that was answered. ``seconds``: for all frames but the first. ``cpu_s``: the client's processor time for
    these. ``encoded``: crops that were encoded for these. ``took_ms``: of each of these, whether it was computed, and
    its time."""

    seconds: float
    cpu_s: float
    encoded: int
    took_ms: list[tuple[bool, float]]

    def median_ms(self, *, computed: bool) -> float:
        found = [ms for was_computed, ms in self.took_ms if was_computed == computed]
        return statistics.median(found) if found else math.nan


Watch: TypeAlias = Callable[[FrameStream, int], Awaitable[Watched]]
"""Answers a stream, with that many frames at a time."""


@contextlib.asynccontextmanager
async def detecting(opened: Opened, config: RuntimeConfig, log: StepLog) -> AsyncIterator[Watch]:
    """A server on the loaded model, and a client in another process."""

    async def load() -> InferenceEngine:
        return engine_of(opened, config, log)

    settings = ServerConfig(listen=("127.0.0.1:0",), max_message_bytes=MOST_MESSAGE_BYTES)
    server = KestrelServer(settings, config, load)
    await server.start()
    try:
        await server.load()
        with contextlib.ExitStack() as stack:
            pipe = await asyncio.to_thread(
                lambda: stack.enter_context(ChildProcess(_client, server.addresses[0]))
            )

            async def watch(stream: FrameStream, in_flight: int) -> Watched:
                pipe.send((stream, in_flight))
                found = await asyncio.to_thread(pipe.recv)
                if isinstance(found, str):
                    raise RuntimeError(f"the client failed: {found}")
                assert isinstance(found, Watched)
                return found

            yield watch
            await asyncio.to_thread(stack.close)
    finally:
        await server.stop(grace_s=0)


def _client(pipe: Connection, address: str) -> None:
    """The function of the client's process: watches streams from ``pipe`` until None arrives."""

    async def watch(stream: FrameStream, in_flight: int) -> Watched:
        given = stream.frames()
        encoded, began, cpu_began = 0, 0.0, 0.0
        took: list[tuple[bool, float]] = []
        async with AsyncKestrelClient(address, timeout=None) as client:
            task = DetectTask("person", max_objects=1)
            async with client.frames([task], given, max_in_flight=in_flight) as answered:
                async for frame in answered:
                    assert frame.analysis is not None, frame
                    if not began:
                        began, cpu_began = time.perf_counter(), time.process_time()
                        continue
                    encoded += frame.encoded_crops
                    took.append((bool(frame.encoded_crops), frame.total_ms))
        cpu_s = time.process_time() - cpu_began
        return Watched(time.perf_counter() - began, cpu_s, encoded, took)

    while (order := pipe.recv()) is not None:
        try:
            pipe.send(asyncio.run(watch(*order)))
        except Exception as error:  # Report every error, because the parent waits for a result.
            pipe.send(f"{type(error).__name__}: {error}")


def engine_of(opened: Opened, config: RuntimeConfig, log: StepLog) -> InferenceEngine:
    built = replace(opened.built, runtime=KeptRuntime(opened.built.runtime))
    return InferenceEngine(config, built, observer=log)


async def measure(opened: Opened, args: argparse.Namespace, report: Report) -> None:
    count = args.frames
    vision = opened.built.model.vision
    size = args.size or camera_size(vision)
    stream = FrameStream(vision, size, count, 0, UNCHANGED, args.changed_tiles)
    new = FrameStream(vision, size, max(12, count // 4), 0)
    warm_up = WARM_UP_FRAMES_ON_CUDA if opened.on_cuda else WARM_UP_FRAMES
    plain = replace(opened.config, crop_cache_bytes=0)
    kept = replace(opened.config, crop_cache_bytes=CACHE_BYTES)
    sides = {"none": (plain, new), "whole": (plain, stream), "crops": (kept, stream)}
    found: dict[tuple[str, int], list[tuple[Watched, float, list[StepEvent]]]] = {}
    for number in range(args.rounds):
        # The sides take turns, and the least times count, because other programs change these least.
        for name, (config, wanted) in sides.items():
            log = StepLog()
            async with detecting(opened, config, log) as watch:
                for in_flight in args.in_flight:
                    # Other frames each time, because the engine knows the earlier ones.
                    seed = number * MOST_IN_FLIGHT + in_flight
                    await watch(wanted._replace(count=warm_up, seed=-1 - seed), in_flight)
                    began, cpu_began = time.monotonic(), time.process_time()
                    watched = await watch(wanted._replace(seed=seed), in_flight)
                    cpu_s = time.process_time() - cpu_began
                    steps = log.events(began, time.monotonic())
                    found.setdefault((name, in_flight), []).append((watched, cpu_s, steps))
    title = (
        f"detect, frames of {size[0]}x{size[1]} with {stream.num_crops} crops, "
        f"tiles that change: {args.changed_tiles}"
    )
    for in_flight in args.in_flight:
        rates: dict[str, float] = {}
        for name, (_, wanted) in sides.items():
            best, cpu_s, steps = min(found[name, in_flight], key=lambda each: each[0].seconds)
            rates[name] = (wanted.count - 1) / best.seconds
            report.add(
                title,
                {
                    "reuse": name,
                    "in flight": in_flight,
                    "frames/s": rates[name],
                    "frames": wanted.count,
                    "crops encoded": best.encoded,
                    "times none": rates[name] / rates["none"],
                    "vision ms": 1e3 * sum(step.vision_s for step in steps) / wanted.count,
                    "prefill ms": 1e3 * sum(step.prefill_s for step in steps) / wanted.count,
                    "decode ms": 1e3 * sum(step.decode_s for step in steps) / wanted.count,
                    "new ms": best.median_ms(computed=True),
                    "same ms": best.median_ms(computed=False),
                    "client CPU ms": 1e3 * best.cpu_s / (wanted.count - 1),
                    "server CPU ms": 1e3 * cpu_s / wanted.count,
                },
            )
        what = f"detect, {in_flight} in flight: crops against none"
        report.bar(what, rates["crops"] / rates["none"], 4, at_least=True)


def _size(text: str) -> tuple[int, int]:
    width, height = text.split("x")
    return int(width), int(height)


PROGRAM = Program(
    "frames",
    __doc__,
    Flag("--frames", 120, "number of frames", quick=6),
    Flag("--rounds", 3, "times to measure each", quick=1),
    Flag("--size", None, "WIDTHxHEIGHT [a camera's with most tiles]", type=_size),
    Flag("--changed-tiles", 1, "tiles that change"),
    Flag("--in-flight", (1, 2), "frames at a time"),
    others=MODEL_FLAGS,
)


def main(arguments: Sequence[str] | None = None) -> None:
    with PROGRAM.reporting(arguments) as (args, model_flags, report):
        config = model_arguments(model_flags, quick=args.quick)
        opened = open_model(replace(config, crop_cache_bytes=CACHE_BYTES))
        with server_gc():
            asyncio.run(measure(opened, args, report))
        opened.built.runtime.close()


if __name__ == "__main__":
    main()
