"""Samples for the refiner: a crop of a scene, a coarse mask as the model draws it, and the true mask.

The engine's own code makes the crop and draws the coarse mask, so training sees what serving sees.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from kestrel_engine import ImageLimits
from kestrel_engine.outlines import coarse_mask
from kestrel_engine.outlines.region import Box, Region, crop
from kestrel_engine.preprocess.crops import prepare
from kestrel_engine.preprocess.decoding.images import open_image
from kestrel_engine.skills.objects.svg_path import format_number
from kestrel_engine.types.model_config import VisionConfig
from kestrel_grpc.scenes.evaluation_set import Example, encode
from kestrel_grpc.scenes.paths import GRID_STEP, outline, path_tokens
from kestrel_grpc.scenes.scenes import Scene, Shape, draw_scene, draw_size

SAMPLES = 4
"""Samples of a pixel along each axis of the true mask."""
MAX_PIXELS = 500_000
"""Larger scenes take long to draw, and the model sees them in the same number of tiles."""
LARGEST_SPREAD = 0.025
"""Largest standard deviation of a box's edges, as a share of the box. The model's boxes are mostly better."""


@dataclass(frozen=True)
class Sample:
    """``pixels`` [side, side, 3] uint8; ``coarse`` [side, side] uint8; ``truth`` [side, side] float32, the covered
    share of each pixel."""

    pixels: NDArray[np.uint8]
    coarse: NDArray[np.uint8]
    truth: NDArray[np.float32]


def samples(seed: str, vision: VisionConfig) -> Iterator[Sample]:
    """Yields samples without end. Equal seeds give equal samples."""
    for index in count():
        rng = random.Random(f"kestrel-tiny/refiner/{seed}/{index}")
        width, height = draw_size(rng)
        if width * height > MAX_PIXELS:
            continue
        scene = draw_scene(rng, width, height, count=rng.randint(2, 8))
        image = prepare(
            open_image(encode(Example(f"refiner-{seed}", index, scene, ())), ImageLimits()), vision
        )
        for shape in scene.shapes:
            box, path = draw_coarse(rng, scene, shape)
            region = Region.around(box)
            if region is None:
                continue
            yield Sample(
                crop(image, region, vision),
                coarse_mask.draw(path, box, region, vision.crop_size),
                true_mask(scene, shape, region, vision.crop_size),
            )


def draw_coarse(rng: random.Random, scene: Scene, shape: Shape) -> tuple[Box, str]:
    """Returns a box and a path with errors like the model's: edges that are off, and numbers that are a step off."""
    x0, y0, x1, y1 = shape.box
    spread = rng.uniform(0.0, LARGEST_SPREAD)
    w, h = x1 - x0, y1 - y0
    edges = (
        (x0 + rng.gauss(0, spread) * w) / scene.width,
        (y0 + rng.gauss(0, spread) * h) / scene.height,
        (x1 + rng.gauss(0, spread) * w) / scene.width,
        (y1 + rng.gauss(0, spread) * h) / scene.height,
    )
    box = tuple(min(1.0, max(0.0, edge)) for edge in edges)
    wrong = rng.uniform(0.0, 0.5)
    words = []
    for token in path_tokens(shape):
        if token.isdigit():
            off = rng.choice((-GRID_STEP, GRID_STEP)) if rng.random() < wrong else 0
            token = format_number(int(token) + off)
        words.append(token)
    return (box[0], box[1], box[2], box[3]), " ".join(words)


def true_mask(scene: Scene, shape: Shape, region: Region, side: int) -> NDArray[np.float32]:
    """Returns the share of each pixel of the region that the shape covers, hidden parts of the shape included."""
    points = outline(shape) / (scene.width, scene.height)
    points = (points - (region.x_min, region.y_min)) / (region.width, region.height)
    inside = coarse_mask.fill([points * side * SAMPLES], side * SAMPLES)
    return inside.reshape(side, SAMPLES, side, SAMPLES).mean((1, 3)).astype(np.float32)
