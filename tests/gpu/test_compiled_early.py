"""Nothing is compiled after an engine is ready, whatever requests come: a request would wait for the compiler.

tests/engine/runtime/gpu/test_warm_up.py shows a part of this without a GPU.
"""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

from kestrel_engine import ConfigError, InferenceEngine, LoRA, RuntimeConfig, TextLoRAConfig
from kestrel_engine.checkpoint.open import open_model
from tests.engine.adapters.random_adapters import random_tensors

SIDES = ((378, 378), (200, 900), (900, 200), (1200, 900), (2000, 700), (3000, 3000), (50, 31))
"""Images of every shape of tiling: one tile, a row, a column, a field."""
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_p": 0.5, "seed": 2},
    {"temperature": 1.3, "top_k": 5, "seed": 3},
)


def image(number: int, side: tuple[int, int]) -> np.ndarray:
    rng = np.random.default_rng(number)
    return rng.integers(0, 256, (side[1], side[0], 3), dtype=np.uint8)


async def ask_everything(
    engine: InferenceEngine, *, segments: bool, adapter: str | None = None
) -> None:
    """All skills, tilings, ways to sample and sizes of a batch; prompts of one token to several steps. ``adapter``: of
    every second question."""
    words = "is there a green crescent beside the pink star "
    for number, side in enumerate(SIDES):
        await engine.caption(image(number, side), settings={"max_tokens": 3})
    for count in (1, 2, 3, 5, 8, 16):
        questions = []
        for index in range(count):
            settings = {"max_tokens": 4 + index, **SAMPLING[index % len(SAMPLING)]}
            if adapter is not None and index % 2:
                settings["adapter"] = adapter
            question = words * (1 + 7 * (index % 5))
            source = None if index % 3 else image(index, SIDES[index % len(SIDES)])
            questions.append(engine.query(source, question, settings=settings))
        await asyncio.gather(*questions)
    some = [image(100 + number, side) for number, side in enumerate(SIDES)]
    limit = {"max_objects": 3, "adapter": adapter}
    await asyncio.gather(
        *(engine.detect(source, "star", settings=limit) for source in some),
        *(engine.point(source, "star", settings=limit) for source in some),
        engine.query(some[1], words * 60, reasoning=True, settings={"max_tokens": 20}),
    )
    if segments:
        await engine.segment(some[0], "star", settings={"max_tokens": 20})


@pytest.mark.parametrize("model", ["md2", "md3"])
@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "attention": "torch"},
        {"dtype": "bfloat16", "cuda_graphs": False},
        {"dtype": "float32", "cuda_graphs": False},
        {"dtype": "bfloat16", "fp8_gemms": "all"},
        {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
        {"dtype": "bfloat16", "adapters_dir": True},
        {"dtype": "float32", "cuda_graphs": False, "adapters_dir": True},
    ],
    ids=str,
)
async def test_nothing_is_compiled_after_ready(
    model: str,
    settings: dict[str, Any],
    golden_folder: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # nothing is found compiled on the disk
    adapter = None
    if "adapters_dir" in settings:
        adapter = "tuned"
        settings = {**settings, "adapters_dir": tmp_path}
        opened = open_model(RuntimeConfig(model_path=golden_folder(model))).config
        lora = LoRA.create(opened.text, lora_config=TextLoRAConfig(rank=24))
        sight = random_tensors(opened, 1, 24, size=0.1, only="vision.", vision=True)
        save_file(lora.tensors | sight, tmp_path / f"{adapter}.safetensors")
    config = RuntimeConfig(
        model_path=golden_folder(model),
        device="cuda",
        max_batch_size=16,
        kv_cache_gib=2.0,
        **settings,
    )
    try:
        started = await InferenceEngine.create(config)
    except ConfigError as error:
        pytest.skip(f"this card or this model can't: {error}")
    async with started as engine:
        ready = engine.compiled
        await ask_everything(engine, segments=model == "md3", adapter=adapter)
        assert engine.compiled == ready
