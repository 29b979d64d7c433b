"""Gaze equals a plain implementation, which the golden points show to be right."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

from kestrel_client import AsyncKestrelClient
from kestrel_engine import InferenceEngine, RuntimeConfig
from kestrel_engine.preprocess.crops import cut_crops
from kestrel_engine.preprocess.decoding.decoded_image import DecodedImage
from kestrel_engine.types.requests import Coord, Token
from kestrel_grpc.process.server import KestrelServer
from kestrel_grpc.settings.server import ServerConfig
from tests.golden.goldens import Golden
from tests.golden.plain_model import PlainModel

pytestmark = pytest.mark.golden
IMAGE = "square_378"
EYES = [(rng.random(), rng.random()) for rng in [random.Random(3)] for _ in range(4)]


def prompt(golden: Golden, eye: tuple[float, float]) -> list[Token]:
    encode = golden.context.codec.encode
    return [*encode("\n\nPoint:"), *map(Coord, eye), *encode(" gaze\n\n")]


@pytest.mark.slow_with("md3")
def test_the_plain_model_gives_the_golden_points(golden: Golden) -> None:
    plain = PlainModel(golden.config, golden.weights)
    for case in golden.expected["cases"]:
        if case["skill"] == "point":
            x, y = case["bins"][0]
            image = golden.runtime.images[case["image"]]
            assert plain.point(image, case["prompt_ids"]) == (x / 1024, y / 1024)


@pytest.mark.slow_with("md3")
async def test_a_gaze_is_that_of_the_plain_model(
    golden: Golden, golden_folder: Callable[[str], Path], golden_images: Path, tmp_path: Path
) -> None:
    """Half of the eyes look out of the image: the model of the goldens would never say so."""
    plain, image = PlainModel(golden.config, golden.weights), golden.runtime.images[IMAGE]
    margins = sorted(plain.margin(image, prompt(golden, eye)) for eye in EYES)
    bias = golden.weights["text.lm_head.bias"].clone()
    bias[golden.config.ids.eos_id] += (margins[1] + margins[2]) / 2
    weights = {**golden.weights, "text.lm_head.bias": bias}
    plain = PlainModel(golden.config, weights)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(golden_folder(golden.name) / name, tmp_path)
    save_file(
        {f"model.{name}": each for name, each in weights.items()}, tmp_path / "model.safetensors"
    )
    config = RuntimeConfig(model_path=tmp_path, device="cpu", dtype="float32", cpu_threads=1)
    expected = [plain.point(image, prompt(golden, eye)) for eye in EYES]
    assert expected.count(None) == 2
    async with await InferenceEngine.create(config) as engine:
        for eye, target in zip(EYES, expected, strict=True):
            result = await engine.gaze(golden_images / f"{IMAGE}.png", eye)
            gaze = result.output["gaze"]
            assert (gaze and (gaze["x"], gaze["y"])) == target
            assert result.finish_reason == "stop"
            assert 0 < result.absence < 1


def reference_points(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Without outliers, as remove_outlier_points of moondream/torch/utils.py chooses them."""
    places = np.array(points)
    distances = np.sqrt(((places[:, None] - places[None]) ** 2).sum(axis=-1))
    nearest = np.partition(distances, 2, axis=1)[:, :2].mean(axis=1)
    kept = nearest <= 2.0 * np.median(nearest)
    return [point for point, stays in zip(points, kept, strict=True) if stays]


def accurate_gaze(golden: Golden, picture: Image.Image, face: dict[str, float], seed: int) -> Any:
    """detect_gaze of moondream/torch/moondream.py with prioritize_accuracy, on the plain model."""
    plain, points = PlainModel(golden.config, golden.weights), []
    mirrored = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pictures = {
        f"{IMAGE} {index}": cut_crops(DecodedImage(np.asarray(each)), golden.config.vision)
        for index, each in enumerate((picture, mirrored))
    }
    golden.encode(golden.runtime, pictures)
    rng = random.Random(seed)
    for name in pictures:
        for _ in range(10):
            x, y = (
                rng.uniform(face["x_min"], face["x_max"]),
                rng.uniform(face["y_min"], face["y_max"]),
            )
            is_mirrored = name.endswith("1")
            eye = (1 - x if is_mirrored else x, y)
            found = plain.point(golden.runtime.images[name], prompt(golden, eye))
            if found is not None:
                points.append((1 - found[0] if is_mirrored else found[0], found[1]))
    kept = reference_points(points)
    return sum(x for x, _ in kept) / len(kept), sum(y for _, y in kept) / len(kept)


@pytest.mark.slow
async def test_an_accurate_gaze_is_that_of_the_plain_model(
    golden: Golden, golden_folder: Callable[[str], Path], golden_images: Path
) -> None:
    """Through the service and the SDK."""
    picture = Image.open(golden_images / f"{IMAGE}.png").convert("RGB")
    face = {"x_min": 0.125, "y_min": 0.25, "x_max": 0.625, "y_max": 0.875}
    expected = accurate_gaze(golden, picture, face, seed=5)
    config = RuntimeConfig(
        model_path=golden_folder(golden.name), device="cpu", dtype="float32", cpu_threads=1
    )
    server = KestrelServer(
        ServerConfig(listen=("127.0.0.1:0",)), config, lambda: InferenceEngine.create(config)
    )
    await server.start()
    try:
        await server.load()
        async with AsyncKestrelClient(server.addresses[0]) as client:
            result = await client.gaze(
                np.asarray(picture), faces=tuple(face.values()), accurate=True, seed=5
            )
    finally:
        await server.stop(grace_s=0)
    (gaze,) = result.gazes
    assert (gaze.target.x, gaze.target.y) == pytest.approx(expected, abs=1e-6)
    assert result.usage.image_tokens == 20 * golden.config.image_positions
