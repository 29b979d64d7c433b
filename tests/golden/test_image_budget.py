"""Answers with an image budget equal those of the plain model that is given crops that are cut here."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import pyvips

from kestrel_engine import InCrops, InferenceEngine, RuntimeConfig
from kestrel_engine.types.requests import ImageBlock, PreparedImage
from tests.golden.goldens import Golden
from tests.golden.test_several_images import assert_plain_answer

pytestmark = pytest.mark.golden
NAME = "wide_900x600"
TILINGS = {1: (1, 1), 4: (1, 2), 6: (2, 3)}
"""By budget, from the rule of moondream.md section 4, by hand."""


def cut(file: Path, rows: int, columns: int) -> PreparedImage:
    """The overview, and the tiles of the image at their common size, by libvips alone."""
    pixels = pyvips.Image.new_from_file(str(file))

    def resized(width: int, height: int) -> np.ndarray:
        image = pixels.resize(width / pixels.width, vscale=height / pixels.height)
        return np.frombuffer(image.write_to_memory(), np.uint8).reshape(height, width, 3)

    grid = resized(266 * columns + 112, 266 * rows + 112)
    tiles = [
        grid[266 * row : 266 * row + 378, 266 * column : 266 * column + 378]
        for row in range(rows)
        for column in range(columns)
    ]
    crops = np.stack([resized(378, 378), *tiles])
    return PreparedImage("", crops, (rows, columns), pixels.width, pixels.height)


@pytest.mark.slow_with("md2", 1, 6)
@pytest.mark.parametrize("budget", TILINGS)
async def test_an_answer_with_a_budget_is_that_of_the_plain_model_with_these_crops(
    golden: Golden, golden_folder: Callable[[str], Path], golden_images: Path, budget: int
) -> None:
    codec, templates, ids = golden.context.codec, golden.config.templates, golden.config.ids
    file = next(golden_images.glob(f"{NAME}.*"))
    rows, columns = TILINGS[budget]
    golden.encode(golden.runtime, {"budget": cut(file, rows, columns)})
    question = "What is in this picture?"
    text = [*templates.query_prefix, *codec.encode(question), *templates.query_suffix]
    prompt = (ids.bos_id, ImageBlock("budget", golden.config.image_positions), *text)
    config = RuntimeConfig(
        model_path=golden_folder(golden.name), device="cpu", dtype="float32", cpu_threads=1
    )
    settings = {"temperature": 0.0, "max_tokens": 8}
    async with await InferenceEngine.create(config) as engine:
        whole = await engine.query(file, question, settings=settings)
        answer = await engine.query(InCrops(file, budget), question, settings=settings)
        again = await engine.query(file, question, settings=settings)
    assert_plain_answer(golden, prompt, answer.token_ids, 8)
    assert len(set(answer.token_ids)) > 1, "a model that says one thing shows little"
    assert answer.images[0].num_crops == (1 if budget == 1 else 1 + rows * columns)
    assert answer.metrics.cached_tokens == 0
    # Between two budgets, an image without one is itself, and found in the cache.
    assert again.token_ids == whole.token_ids
    assert again.metrics.cached_tokens > golden.config.image_positions
    assert whole.images[0].num_crops == 9
