"""The refiner on a CUDA device: float32 masks as on the CPU, and outlines from steps with other work in them."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from kestrel_client.drawing.rasterise import fill
from kestrel_client.drawing.svg_path import polygons
from kestrel_engine import InferenceEngine, RuntimeConfig
from tests.tiny import SPARE_REFINER, TINY

IMAGE = Path(__file__).parents[2] / "clients/python/kestrel_client/commands/demo.jpg"
OBJECTS = ("pink star", "green crescent", "green shape", "shape")
WIDTH, HEIGHT = 857, 783


async def outlines(device: str, dtype: str, **settings) -> list[dict]:
    """The segments of all objects, asked for together with captions, which decode meanwhile."""
    settings |= {"device": device, "dtype": dtype, "refiner": SPARE_REFINER}
    config = RuntimeConfig(model_path=TINY, max_batch_size=8, **settings)
    async with await InferenceEngine.create(config) as engine:
        assert engine.info.refines
        captions = [
            engine.caption(IMAGE, "long", settings={"temperature": 0.0, "max_tokens": 80})
            for _ in range(3)
        ]
        asked = [engine.segment(IMAGE, name) for name in OBJECTS]
        results = await asyncio.gather(*asked, *captions)
    return [result.output["segments"][0] for result in results[: len(asked)]]


def mask_of(segment: dict) -> np.ndarray:
    box = segment["bbox"]
    x, y = box["x_min"] * WIDTH, box["y_min"] * HEIGHT
    w, h = (box["x_max"] - box["x_min"]) * WIDTH, (box["y_max"] - box["y_min"]) * HEIGHT
    outline = [[(x + u * w, y + v * h) for u, v in p] for p in polygons(segment["svg_path"])]
    return fill(outline, WIDTH, HEIGHT)


def iou(one: dict, other: dict) -> float:
    a, b = mask_of(one), mask_of(other)
    return float((a & b).sum() / (a | b).sum())


@pytest.fixture(scope="module")
def on_the_cpu() -> list[dict]:
    return asyncio.run(outlines("cpu", "float32"))


@pytest.mark.parametrize("options", [{}, {"decode_beside": "on"}, {"compile": False}])
async def test_outlines_in_float32_are_those_of_the_cpu(on_the_cpu, options):
    for found, wanted in zip(await outlines("cuda", "float32", **options), on_the_cpu, strict=True):
        assert found["refined"] and wanted["refined"]
        assert found["coarse_path"] == wanted["coarse_path"]
        # The device reads the image's own pixels, the CPU's crops come from tiles.
        least = 0.99 if options.get("compile") is False else 0.95
        assert iou(found, wanted) > least, found["object"]


async def test_outlines_in_bfloat16_are_close():
    for found in await outlines("cuda", "bfloat16"):
        assert found["refined"]
        coarse = {"svg_path": found["coarse_path"], "bbox": found["coarse_bbox"]}
        assert iou(found, coarse) > 0.85, found["object"]
