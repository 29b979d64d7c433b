"""What else an engine does changes no token of a request: batching, chunks, caches, preemption, neighbours that go.

Each seed makes a mix of skills and images and the settings of an engine; a failure prints them.
KESTREL_EQUALITY_SEEDS: how many for each model.
"""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.equality.mixes import (
    ASKS,
    REFERRING,
    SEGMENTING,
    SEVERAL,
    Alone,
    Mix,
    Model,
    Seen,
    assert_equal,
    random_mix,
    random_settings,
    run_mix,
)
from tests.tiny import TINY

SEEDS = int(os.environ.get("KESTREL_EQUALITY_SEEDS", "7"))
NAMES = ("md2", "md3", "kestrel-tiny")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Engines here compute with one thread, which is the process's setting: it is put back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def alone(golden_images: Path) -> Alone:
    return Alone(golden_images)


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest, golden_folder: Callable[[str], Path]) -> Model:
    if request.param == "kestrel-tiny":
        asks = ASKS + REFERRING + SEGMENTING
        return Model("kestrel-tiny", {"model_path": TINY}, 325, (1, 5, 13, 65), asks)
    asks = ASKS + REFERRING + (SEGMENTING if request.param == "md3" else ())
    config = {"model_path": golden_folder(request.param)}
    return Model(request.param, config, 730, (1, 5, 10, 73), asks)


async def check(
    model: Model, settings: dict, mix: Mix, images: Path, alone: Alone, seed: int
) -> Seen:
    seen = Seen()
    together = await run_mix(model, settings, mix, images, seen)
    expected = await alone.of(model, mix.asks)
    assert_equal(mix, together, expected, {"seed": seed, "model": model.name, **settings})
    return seen


async def check_random(model: Model, images: Path, alone: Alone, seed: int, count: int) -> Seen:
    rng = random.Random(seed)
    settings = random_settings(rng, model)
    mix = random_mix(rng, model.asks, count)
    return await check(model, settings, mix, images, alone, seed)


@pytest.mark.slow_with("md2", "kestrel-tiny")
async def test_everything_at_once_from_the_caches(
    model: Model, golden_images: Path, alone: Alone
) -> None:
    """All requests twice in one batch: chunks of 20 positions, single crops, images shared, prefixes reused."""
    asks = [*model.asks, *reversed(model.asks)]
    settings = {"max_batch_size": 32, "step_prefill_positions": 20, "step_crops": 1}
    settings |= {"kv_cache_pages": 8 * (model.prefix + 200) // 5, "page_size": 5}
    mix = Mix(asks, [0.0] * len(asks))
    seen = await check(model, settings, mix, golden_images, alone, 0)
    assert seen.cached_positions > 5 * model.prefix
    assert seen.largest_batch > 4


@pytest.mark.slow
@pytest.mark.parametrize("cached", [False, True])
async def test_forced_preemption(
    model: Model, cached: bool, golden_images: Path, alone: Alone
) -> None:
    """Pages of one position and fewer of them than two images' answers need: they take turns."""
    asks = [a for a in model.asks if a.image in ("square_378", None)]
    mix = Mix(asks, [0.0] * len(asks))
    settings = {"max_batch_size": 6, "page_size": 1, "kv_cache_pages": 2 * (model.prefix + 22)}
    settings |= {"prefix_cache": cached}
    seen = await check(model, settings, mix, golden_images, alone, int(cached))
    assert cached or seen.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("pages", [1, 5])
async def test_several_images_among_other_requests(
    model: Model, pages: int, golden_images: Path, alone: Alone
) -> None:
    """With one page of a position each and few of them, sequences are preempted between two images."""
    asks = [*SEVERAL, *model.asks[:3], *model.asks[7:9], *reversed(SEVERAL)]
    room = 2 * model.prefix + 60 if pages == 1 else 5 * (model.prefix + 100)
    settings = {"max_batch_size": 8, "step_prefill_positions": 200, "step_crops": 2}
    settings |= {"page_size": pages, "kv_cache_pages": room // pages}
    mix = Mix(asks, [0.01 * index for index in range(len(asks))], {1: 2})
    seen = await check(model, settings, mix, golden_images, alone, pages)
    assert seen.cached_positions > 2 * model.prefix


@pytest.mark.slow
async def test_seeded_samples_do_not_depend_on_neighbours(
    model: Model, golden_images: Path, alone: Alone
) -> None:
    rng = random.Random(11)
    asks = [
        a.sampled(seed) for seed in (5, 6) for a in model.asks if a.skill in ("query", "caption")
    ]
    rng.shuffle(asks)
    mix = Mix(asks[:10], [rng.random() * 0.1 for _ in asks[:10]], {3: 1})
    settings = {"max_batch_size": 8, "step_prefill_positions": 20}
    settings |= {"kv_cache_pages": 5 * (model.prefix + 200) // 5, "page_size": 5}
    await check(model, settings, mix, golden_images, alone, 11)
    results = await alone.of(model, [a for a in asks if a.skill == "query"])
    assert len({r.token_ids for r in results}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 1 + SEEDS))
async def test_random_mixes(model: Model, seed: int, golden_images: Path, alone: Alone) -> None:
    await check_random(model, golden_images, alone, seed, 12)
