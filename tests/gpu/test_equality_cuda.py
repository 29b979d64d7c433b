"""Decoding beside images and prompts changes no token of a request: tests/equality on a GPU, in float32."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kestrel_engine.scheduler.lanes.beside import Beside
from tests.equality.mixes import (
    ASKS,
    REFERRING,
    SEGMENTING,
    Alone,
    Mix,
    Model,
    Seen,
    assert_equal,
    random_mix,
    random_settings,
    run_mix,
)


def model_of(name: str, folder: Path, *, beside: bool) -> Model:
    asks = ASKS + REFERRING + (SEGMENTING if name == "md3" else ())
    config = {"model_path": folder, "device": "cuda", "decode_beside": "on" if beside else "off"}
    return Model(name, config, 730, (1, 5, 10, 73), asks)


@pytest.mark.parametrize("name", ["md2", "md3"])
async def test_two_lanes_change_no_token(
    name: str,
    golden_folder: Callable[[str], Path],
    golden_images: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = golden_folder(name)
    alone = Alone(golden_images)
    one_lane = model_of(name, folder, beside=False)
    model = model_of(name, folder, beside=True)
    expected = await alone.of(one_lane, model.asks)
    results = dict(zip(model.asks, expected, strict=True))
    overtaken = preemptions = 0
    for seed in range(5):
        rng = random.Random(seed)
        settings = random_settings(rng, model) | {"max_batch_size": 8, "steps_out": 1 + seed % 4}
        mix = random_mix(rng, model.asks, 40)
        if seed == 0:  # Fewer pages than two images' answers need.
            asks = [a for a in model.asks if a.image in ("square_378", None)] * 4
            mix = Mix(asks, [0.0] * len(asks))
            # With the prefix cache, the prompts about one image would share its pages.
            few = {"page_size": 1, "kv_cache_pages": 2 * (model.prefix + 22)}
            settings |= {**few, "prefix_cache": False}
        settings["itl_target_ms"] = 0.0 if seed < 3 else 15.0
        # With seed 2, decode steps are spaced, as under load.
        spacing_s = 0.002 if seed == 2 else 0.0
        monkeypatch.setattr(Beside, "spacing_s", spacing_s)
        if seed % 2:
            settings["embedding_cache_bytes"] = 0
        seen = Seen()
        together = await run_mix(model, settings, mix, golden_images, seen)
        assert_equal(mix, together, [results[a] for a in mix.asks], {"seed": seed, **settings})
        overtaken += seen.num_overtaken
        preemptions += seen.preemptions
    assert overtaken > 5, "no decode step has run beside another step"
    assert preemptions > 0 or name == "md3"
