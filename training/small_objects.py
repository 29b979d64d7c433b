"""Measure how tiles help the bundled model to find small objects, on held-out scenes.

    python -m training.small_objects --first 100 --scenes 20

Each scene has three kinds of objects whose longer side is 12 to 20 pixels, and one kind that is larger than most tiles.
The command asks for each kind with Detect and Point, in one look at the whole image and in tiles, and prints F1. A box
is right if its intersection over union with a box of the truth is at least 0.5, a point if it is inside such a box;
each object counts once. Neither training nor another evaluation has these scenes.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kestrel_engine import InferenceEngine, RuntimeConfig, Tiled, Tiles
from kestrel_grpc.scenes.phrases import Phrase
from kestrel_grpc.scenes.render import render_scene
from kestrel_grpc.scenes.scenes import MIN_CONTRAST, Scene, Shape, draw_background, draw_colour
from kestrel_grpc.scenes.scoring import box_iou
from kestrel_grpc.scenes.shapes import unit_bounds
from kestrel_grpc.scenes.vocabulary import HELD_OUT, MEASURED_COLOURS, SHAPES

SMALL_PX = (12.0, 20.0)
LARGE_SHARE = (0.35, 0.5)
"""Of the image's shorter side."""
GAP_PX = 12.0
WIDTHS = (800.0, 1100.0)
KINDS, EACH, LARGE = 3, (2, 3), 1

Box = tuple[float, float, float, float]
WAYS: dict[str, Tiles | None] = {
    "one look": None,
    **{f"{n}x{n} and the whole": Tiles(rows=n, columns=n) for n in (2, 3, 4)},
    **{f"{n}x{n} only": Tiles(rows=n, columns=n, whole_image=False) for n in (3, 4)},
}


def small_scene(
    index: int, widths: tuple[float, float] = WIDTHS
) -> tuple[Scene, list[Phrase], list[Phrase]]:
    """Scene ``index``, the phrases of its small objects, and that of its large one. ``widths``: the least and the
    greatest width of the image in pixels."""
    rng = random.Random(f"kestrel-tiny/small/{index}")
    width = round(math.exp(rng.uniform(*map(math.log, widths))))
    height = round(width * rng.uniform(0.65, 0.85))
    background = draw_background(rng)
    wanted: dict[tuple[int, int], tuple[float, float, float]] = {}
    while len(wanted) < KINDS + LARGE:
        colour, kind = rng.randrange(MEASURED_COLOURS), rng.randrange(len(SHAPES))
        rgb = draw_colour(rng, colour)
        contrast = min(math.dist(rgb, tone) for tone in (background.first, background.second))
        if (colour, kind) not in HELD_OUT and contrast >= MIN_CONTRAST:
            wanted[colour, kind] = rgb
    shapes: list[Shape] = []
    for number, ((colour, kind), rgb) in enumerate(wanted.items()):
        is_large = number < LARGE
        for _ in range(1 if is_large else rng.randint(*EACH)):
            side = rng.uniform(*LARGE_SHARE) * height if is_large else rng.uniform(*SMALL_PX)
            shape = _placed(rng, shapes, width, height, kind, colour, rgb, side)
            if shape is not None:
                shapes.append(shape)
    shapes.sort(key=lambda shape: shape.centre[0])
    scene = Scene(width, height, background, (), tuple(shapes), tuple(range(len(shapes))))
    phrases = [Phrase(kind, colour) for colour, kind in wanted]
    return scene, phrases[LARGE:], phrases[:LARGE]


def _placed(
    rng: random.Random,
    others: Sequence[Shape],
    width: int,
    height: int,
    kind: int,
    colour: int,
    rgb: tuple[float, float, float],
    side: float,
) -> Shape | None:
    """An upright shape whose longer side has ``side`` pixels, apart from the others; None if it finds no place."""
    x0, y0, x1, y1 = unit_bounds(kind, 0.0)
    radius = side / max(x1 - x0, y1 - y0)
    for _ in range(200):
        cx = rng.uniform(GAP_PX - x0 * radius, width - GAP_PX - x1 * radius)
        cy = rng.uniform(GAP_PX - y0 * radius, height - GAP_PX - y1 * radius)
        shape = Shape(kind, colour, 0, cx, cy, radius, 0.0, rgb, rgb, radius / 4, radius / 2)
        a, b, c, d = shape.box
        grown = a - GAP_PX, b - GAP_PX, c + GAP_PX, d + GAP_PX
        if all(box_iou(grown, other.box) == 0 for other in others):
            return shape
    return None


def right_boxes(truth: Sequence[Box], found: Sequence[dict[str, float]], scene: Scene) -> int:
    """The number of boxes that are right, each with an object of its own."""
    w, h = scene.width, scene.height
    boxes = [(b["x_min"] * w, b["y_min"] * h, b["x_max"] * w, b["y_max"] * h) for b in found]
    return _matches(truth, boxes, lambda true, box: box_iou(true, box) >= 0.5)


def right_points(truth: Sequence[Box], found: Sequence[dict[str, float]], scene: Scene) -> int:
    """As ``right_boxes``, for points."""
    points = [(point["x"] * scene.width, point["y"] * scene.height) for point in found]

    def is_inside(box: Box, point: tuple[float, float]) -> bool:
        return box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3]

    return _matches(truth, points, is_inside)


def _matches(truth: Sequence[Box], found: Sequence[Any], fits: Callable[[Box, Any], bool]) -> int:
    left = list(truth)
    for each in found:
        match = next((true for true in left if fits(true, each)), None)
        if match is not None:
            left.remove(match)
    return len(truth) - len(left)


async def measure(
    engine: InferenceEngine, indices: range, widths: tuple[float, float]
) -> dict[tuple[str, str], Counter[str]]:
    """The counts of right, found and true objects, and the seconds, by way and by size and skill."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for index in indices:
        scene, small, large = small_scene(index, widths)
        pixels = render_scene(scene).permute(1, 2, 0).numpy()
        image = np.ascontiguousarray(np.clip(np.round(pixels), 0, 255).astype(np.uint8))
        for way, tiles in WAYS.items():
            await engine.flush_caches()  # Else a way would profit from the looks of another.
            given = await engine.prepare_image(image if tiles is None else Tiled(image, tiles))
            for size, phrases in (("small", small), ("large", large)):
                for phrase in phrases:
                    truth = [scene.shapes[number].box for number in phrase.find(scene)]
                    began = time.monotonic()
                    detected, pointed = await asyncio.gather(
                        engine.detect(given, phrase.plain()), engine.point(given, phrase.plain())
                    )
                    boxes, points = detected.output["objects"], pointed.output["points"]
                    seen = {
                        "detect": (right_boxes(truth, boxes, scene), len(boxes)),
                        "point": (right_points(truth, points, scene), len(points)),
                    }
                    for skill, (right, found) in seen.items():
                        row = counts.setdefault((way, f"{size}, {skill}"), Counter())
                        row.update(right=right, found=found, true=len(truth))
                    spent = counts.setdefault((way, "seconds"), Counter())
                    spent["ms"] += round(1e3 * (time.monotonic() - began))
    return counts


def f1(row: Counter[str]) -> float:
    """0 if nothing is right."""
    return 2 * row["right"] / max(1, row["found"] + row["true"])


async def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--first", type=int, default=0, help="number of the first scene")
    p.add_argument("--scenes", type=int, default=20)
    p.add_argument("--widths", type=float, nargs=2, default=WIDTHS, help="range of the widths")
    args = p.parse_args()
    config = dataclasses.replace(
        RuntimeConfig(), model="kestrel-tiny", device="cpu", dtype="float32"
    )
    async with await InferenceEngine.create(config) as engine:
        scenes = range(args.first, args.first + args.scenes)
        counts = await measure(engine, scenes, tuple(args.widths))
    columns = [f"{size}, {skill}" for size in ("small", "large") for skill in ("detect", "point")]
    print("| | looks |", " | ".join(columns), "| ms a question |")
    print("|", " | ".join(["---"] * (len(columns) + 3)), "|")
    for way, tiles in WAYS.items():
        looks = 1 if tiles is None else tiles.num_looks
        cells = []
        for column in columns:
            row = counts[way, column]
            precision = row["right"] / max(1, row["found"])
            recall = row["right"] / max(1, row["true"])
            cells.append(f"{f1(row):.3f} ({precision:.2f}, {recall:.2f})")
        questions = args.scenes * (KINDS + LARGE)
        spent = counts[way, "seconds"]["ms"] / questions
        print(f"| {way} | {looks} |", " | ".join(cells), f"| {spent:.0f} |")


if __name__ == "__main__":
    asyncio.run(main())
