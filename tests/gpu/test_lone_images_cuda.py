"""Images that come one after the other, so that a captured graph makes their crops: tokens are as on the CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kestrel_engine import InferenceEngine, RuntimeConfig
from tests.engine.inside import inside

SIZES = ((850, 600), (300, 200))
TURNS = 4


def image(number: int, size: tuple[int, int]) -> np.ndarray:
    """Blocks of colours, whose crops differ from one another."""
    rng = np.random.default_rng(number)
    width, height = size
    blocks = rng.integers(0, 256, (-(-height // 50), -(-width // 50), 3), np.uint8)
    return np.ascontiguousarray(blocks.repeat(50, 0).repeat(50, 1)[:height, :width])


async def captions(engine: InferenceEngine) -> list[tuple[int, ...]]:
    settings: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0}
    found = []
    for turn in range(TURNS):
        for index, size in enumerate(SIZES):
            result = await engine.caption(image(100 + 10 * index + turn, size), settings=settings)
            found.append(tuple(result.token_ids))
    return found


@pytest.mark.parametrize("name", ["md2", "md3"])
async def test_images_of_two_sizes_in_turns(
    name: str, golden_folder: Callable[[str], Path]
) -> None:
    settings: dict[str, Any] = {"model_path": golden_folder(name), "dtype": "float32"}
    settings |= {"max_batch_size": 2, "max_seq_length": 1024}
    async with await InferenceEngine.create(RuntimeConfig(device="cpu", **settings)) as engine:
        expected = await captions(engine)
    config = RuntimeConfig(device="cuda", kv_cache_gib=1.0, **settings)
    async with await InferenceEngine.create(config) as engine:
        found = await captions(engine)
        runtime: Any = inside(engine).built.runtime
        assert len(runtime.parts.images._make_crops._graphs._graphs) == len(SIZES)
    assert found == expected
    assert len(set(found)) > 1
