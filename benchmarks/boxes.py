"""Measures boxes a second: one class of a picture, eighty classes of one picture, and many callers.

python -m benchmarks.boxes --model moondream2 --random-weights --device cuda --json F

A box takes three steps: x, y and size. The skill ``forced_detect`` is a detection whose rules forbid the end token, so
each call finds exactly as many boxes as asked for, whatever the weights are. Pictures are JPEGs of the trace, 850x600
and smaller, and a call begins with their bytes. "New": the server has not seen the picture. "Known": it has its keys
and values. A caller sends its next call after the answer to the one before. With eighty classes, a caller prepares the
picture once, as the server does for a Detect with several names, and asks about all of them at once. (The server asks
about 32 names of a call at a time, so that a call leaves room for others.)
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kestrel_client.commands.values import whole

from .models.opening import MODEL_FLAGS, Opened, RunningEngine, engine_on, run_on_model, server_gc
from .reports.program import Flag, Program
from .reports.report import Report, Row, median
from .traffic.chart_trace import draw_images

PROGRAM = Program(
    "boxes",
    __doc__,
    Flag("--boxes", 20, "boxes of one class", quick=2, type=whole(1)),
    Flag("--boxes-a-class", 4, "boxes of each of many classes", quick=2, type=whole(1)),
    Flag("--classes", 80, "classes of a picture", quick=2, type=whole(1)),
    Flag("--callers", 64, "callers at once", quick=2, type=whole(1)),
    Flag("--limit", 3.0, "seconds of a kind", quick=0.0),
    Flag("--images", 400, "pictures, of which one is the known one", quick=4, type=whole(2)),
    others=MODEL_FLAGS,
)
IMAGES_FROM = 5_000_000
"""The pictures, which are not in the trace."""


@dataclass(frozen=True)
class Kind:
    """Calls of ``callers`` callers, each about ``classes`` classes of a picture, with ``boxes`` boxes a class."""

    name: str
    callers: int
    classes: int
    boxes: int
    known: bool = False


def kinds(args: argparse.Namespace) -> list[Kind]:
    one, few = args.boxes, args.boxes_a_class
    return [
        Kind("one caller, one class, known picture", 1, 1, one, known=True),
        Kind("one caller, one class, new pictures", 1, 1, one),
        Kind(f"one caller, {args.classes} classes, new pictures", 1, args.classes, few),
        Kind(
            f"one caller, {args.classes} classes, known picture", 1, args.classes, few, known=True
        ),
        Kind(f"{args.callers} callers, one class, new pictures", args.callers, 1, one),
        Kind(f"{args.callers} callers, one class, known picture", args.callers, 1, one, known=True),
    ]


async def run(
    running: RunningEngine, kind: Kind, images: Iterator[bytes], known: bytes, limit_s: float
) -> Row:
    """Runs calls for ``limit_s`` seconds, and returns what they found."""
    took: list[float] = []
    boxes = 0
    began = time.monotonic()

    async def caller() -> None:
        nonlocal boxes
        while not took or time.monotonic() - began < limit_s:
            image: Any = known if kind.known else next(images)
            start = time.monotonic()
            if kind.classes > 1:
                image = await running.engine.prepare_image(image)
            answers = await asyncio.gather(
                *(
                    running.target.forced_detect(image, f"class {number}", kind.boxes)
                    for number in range(kind.classes)
                )
            )
            took.append(time.monotonic() - start)
            boxes += sum(answer.output_tokens for answer in answers) // 3

    async with asyncio.TaskGroup() as group:
        for _ in range(kind.callers):
            group.create_task(caller())
    seconds = time.monotonic() - began
    return {
        "boxes/s": boxes / seconds,
        "classes/s": len(took) * kind.classes / seconds,
        "pictures": len(took),
        "ms a picture, p50": 1e3 * median(took),
        "boxes a class": kind.boxes,
    }


async def measure(args: argparse.Namespace, opened: Opened, report: Report) -> None:
    pictures = draw_images(args.images, first=IMAGES_FROM)
    async with engine_on(opened) as running:
        images = itertools.cycle(pictures[1:])
        for kind in kinds(args):
            # Every path once, so that nothing is compiled during the measurement.
            await run(running, kind, images, pictures[0], 0.0)
        with server_gc():
            for kind in kinds(args):
                await running.engine.flush_caches()
                if kind.known:
                    await running.target.forced_detect(pictures[0], "class", 1)
                row = await run(running, kind, images, pictures[0], args.limit)
                report.add("Boxes", {"model": opened.name, "calls": kind.name, **row})
                found = float(row["boxes/s"])
                report.figure(f"{opened.name}: {kind.name}: boxes/s", found, "1/s")


def main(arguments: Sequence[str] | None = None) -> Report:
    return run_on_model(PROGRAM, measure, arguments)


if __name__ == "__main__":
    main()
