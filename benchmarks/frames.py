"""Measures frames/s on a stream in which most crops repeat, with and without the reuse of crops.

python -m benchmarks.frames --model moondream2 --random-weights --device cuda --json F

The frames are those of a fixed camera or a screen: some equal the frame before, and in each of the others one tile has
changed, and with it the overview. So many frames have changed that 90 % of all crops of the stream are equal to those
of the frame before. Frames come as pixels, one after the other.

The tasks are Detect with one object at most, through StreamFrames of a server in this process, and Embed of the engine.
"none": every frame is new, so nothing can be reused. "whole": the stream above, with the default settings, which reuse
the results or the embeddings of equal frames. "crops": equal crops too (--crop-cache-bytes).
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch

from kestrel_client import AsyncKestrelClient, DetectTask
from kestrel_engine import InferenceEngine, RuntimeConfig
from kestrel_engine.checkpoint.open import open_model
from kestrel_engine.preprocess.crops import crop_boxes, select_tiling
from kestrel_engine.types.model_config import VisionConfig
from kestrel_grpc.process.server import KestrelServer
from kestrel_grpc.settings.server import ServerConfig

from .models.opening import model_arguments, parse
from .reports.report import Report, benchmark_parser

Run: TypeAlias = Callable[[RuntimeConfig, Sequence[np.ndarray]], Awaitable[tuple[float, int]]]

UNCHANGED = 0.9
CACHE_BYTES = 256 << 20
SIZES = ((640, 360), (640, 480), (1280, 720), (1920, 1080))


def new_frames(vision: VisionConfig, count: int) -> list[np.ndarray]:
    """Returns frames [height, width, 3] uint8 that have nothing in common."""
    width, height = frame_size(vision)
    numbers = np.random.default_rng(8)
    return [numbers.integers(0, 255, (height, width, 3), dtype=np.uint8) for _ in range(count)]


def frames(vision: VisionConfig, count: int) -> tuple[list[np.ndarray], float, int]:
    """Returns the frames [height, width, 3] uint8, the share of crops that equal those of the frame before, and the
    number of crops of a frame."""
    width, height = frame_size(vision)
    rows, columns = select_tiling(width, height, vision)
    crops = 1 + rows * columns
    # Of a changed frame, two crops have changed: its overview and one tile.
    changed_share = (1 - UNCHANGED) * crops / 2
    numbers = np.random.default_rng(7)
    now = numbers.integers(0, 255, (height, width, 3), dtype=np.uint8)
    boxes = crop_boxes((rows, columns), vision)[1:]
    found, changes = [now], 0
    while len(found) < count:
        if math.floor(len(found) * changed_share) > changes:
            changes += 1
            now = now.copy()
            x_min, y_min, _, _ = boxes[changes % len(boxes)]
            # A patch in the middle of the tile, which no other tile overlaps.
            top = int(y_min * height) + height // rows // 2
            left = int(x_min * width) + width // columns // 2
            now[top : top + 12, left : left + 12] = numbers.integers(0, 255, 3)
        found.append(now)
    return found, 1 - 2 * changes / (crops * (count - 1)), crops


def frame_size(vision: VisionConfig) -> tuple[int, int]:
    """Returns the width and height, of those that cameras have, for which a frame has the most tiles."""
    return max(SIZES, key=lambda size: math.prod(select_tiling(*size, vision)))


async def detect(config: RuntimeConfig, given: Sequence[np.ndarray]) -> tuple[float, int]:
    """Returns the seconds for all frames but the first, and the number of crops that were encoded for them."""

    async def load() -> InferenceEngine:
        return await InferenceEngine.create(config)

    server = KestrelServer(ServerConfig(listen=("127.0.0.1:0",)), config, load)
    await server.start()
    try:
        await server.load()
        encoded, began = 0, 0.0
        async with AsyncKestrelClient(server.addresses[0], timeout=None) as client:
            task = DetectTask("person", max_objects=1)
            async with client.frames([task], given, max_in_flight=1) as answered:
                async for frame in answered:
                    assert frame.analysis is not None, frame
                    if not began:
                        began = time.perf_counter()
                    else:
                        encoded += frame.encoded_crops
        return time.perf_counter() - began, encoded
    finally:
        await server.stop(grace_s=0)


async def embed(config: RuntimeConfig, given: Sequence[np.ndarray]) -> tuple[float, int]:
    """As ``detect``."""
    async with await InferenceEngine.create(config) as engine:
        encoded, began = 0, 0.0
        for index, frame in enumerate(given):
            if index == 1:
                encoded, began = 0, time.perf_counter()
            result = await engine.embed(await engine.prepare_image(frame))
            encoded += result.metrics.encoded_crops
        return time.perf_counter() - began, encoded


TASKS = {"detect": detect, "embed": embed}


def alone(run: Run, config: RuntimeConfig, given: Sequence[np.ndarray]) -> tuple[float, int]:
    """Runs one side and frees its memory, so that the next engine finds all of the device's."""

    async def whole() -> tuple[float, int]:
        return await run(config, given)

    try:
        return asyncio.run(whole())
    finally:
        gc.collect()
        torch.cuda.empty_cache()  # Does nothing without a GPU.


def main(arguments: Sequence[str] | None = None) -> None:
    parser = benchmark_parser("frames", __doc__)
    parser.add_argument("--frames", type=int, default=120, help="number of frames [120]")
    parser.add_argument("--rounds", type=int, default=3, help="times to measure each [3]")
    args, model_flags = parse(parser, arguments)
    count = 6 if args.quick else args.frames
    plain = model_arguments(model_flags, quick=args.quick)
    report = Report("frames", {"model": plain.model, "frames": count})
    vision = open_model(plain).config.vision
    given, unchanged, crops = frames(vision, count)
    sides = {
        "none": (plain, new_frames(vision, max(12, count // 4))),
        "whole": (plain, given),
        "crops": (replace(plain, crop_cache_bytes=CACHE_BYTES), given),
    }
    for skill, run in TASKS.items():
        # The sides take turns, and the least times count, because other programs change these least.
        turns = [
            {name: alone(run, *side) for name, side in sides.items()}
            for _ in range(1 if args.quick else args.rounds)
        ]
        rates = {}
        for name, (_, stream) in sides.items():
            seconds, encoded = min(turn[name] for turn in turns)
            rates[name] = (len(stream) - 1) / seconds
            report.add(
                f"{skill}, {crops} crops a frame, {100 * unchanged:.1f} % of all crops unchanged",
                {
                    "reuse": name,
                    "frames/s": rates[name],
                    "frames": len(stream),
                    "crops encoded": encoded,
                    "times none": rates[name] / rates["none"],
                    "times whole": rates[name] / rates.get("whole", math.nan),
                },
            )
        report.bar(f"{skill}: crops against none", rates["crops"] / rates["none"], 4, at_least=True)
    report.finish(args.json)


if __name__ == "__main__":
    main()
