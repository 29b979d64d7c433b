"""An answer about an image's features is that about the image, token for token in float32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kestrel_engine import ImageFeatures, InferenceEngine, RuntimeConfig
from tests.golden.goldens import Golden

pytestmark = pytest.mark.golden
GREEDY = {"temperature": 0.0, "max_tokens": 8}


def features(result: Any, **changes: Any) -> ImageFeatures:
    """The features of what ``engine.embed`` returned, with pooling="none"."""
    array = result.output["image"]
    rows, dimensions = array.shape
    return ImageFeatures(array.tobytes(), rows, dimensions, *result.image_size, **changes)


@pytest.mark.slow
async def test_every_skill_answers_as_about_the_image(
    golden: Golden, golden_folder: Callable[[str], Path], golden_images: Path
) -> None:
    await check_all_skills(golden_images, golden_folder(golden.name), device="cpu", cpu_threads=1)


async def check_all_skills(golden_images: Path, model: Path, **settings: Any) -> None:
    """Asks an engine in float32 about two images and about their features."""
    config = RuntimeConfig(model_path=model, dtype="float32", **settings)
    first, second = (
        next(golden_images.glob(f"{name}.*")) for name in ("wide_900x600", "square_378")
    )
    calls: list[tuple[str, dict[str, Any]]] = [
        ("query", {"question": "What is in this picture?"}),
        ("query", {"question": "Where?", "reasoning": True, "spatial_refs": [(0.2, 0.3)]}),
        ("query", {"question": "What?", "presupposes": ["a cat"]}),
        ("caption", {"length": "short"}),
        ("point", {"object": "cat"}),
        ("detect", {"object": "cat"}),
        ("segment", {"object": "cat", "refine": False}),
    ]
    async with await InferenceEngine.create(config) as engine:
        sent = []
        for file in (first, second):
            embedded = await engine.embed(file, pooling="none")
            assert embedded.output["image"].dtype == np.float32
            sent.append(features(embedded))

        async def answer(skill: str, image: Any, arguments: dict[str, Any]) -> Any:
            stream = await engine.submit(skill, image, arguments, GREEDY)
            result = await stream.result()
            return result.token_ids, result.output, result.image_size, result.absences, result

        for skill, arguments in calls:
            if skill not in engine.info.skills:
                continue
            *about_image, _ = await answer(skill, first, arguments)
            await engine.flush_caches()
            *about_features, result = await answer(skill, sent[0], arguments)
            assert about_features == about_image, (skill, arguments)
            assert result.metrics.encoded_crops == 0 and result.images[0].num_crops == 0
        both = {"question": "Which one?"}
        *expected, _ = await answer("query", [first, second], both)
        for images in ([sent[0], sent[1]], [first, sent[1]], [sent[0], second]):
            await engine.flush_caches()
            *found, _ = await answer("query", images, both)
            assert found[:2] == expected[:2]
        *again, result = await answer("query", sent, both)
        assert again[:2] == expected[:2]
        *again, result = await answer("query", sent, both)
        assert result.metrics.cached_tokens > 0, "equal features are known again"
