"""Several models on one GPU: one is loaded, and captures its graphs, while another serves; both answer as alone."""

import asyncio
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kestrel_engine import InferenceEngine, InsufficientMemoryError, RuntimeConfig
from tests.golden.test_engine import check_cases

LOADS = 3
"""Together they take more streams than torch has of one priority, with those of the readers of weights."""


@pytest.mark.parametrize("dtype", ["float32"])
async def test_a_model_is_loaded_while_another_serves(
    dtype: str, golden_folder: Callable[[str], Path], golden_images: Path
) -> None:
    def config(model: str) -> RuntimeConfig:
        return RuntimeConfig(
            model_path=golden_folder(model), device="cuda", dtype=dtype, max_batch_size=4
        )

    async with await InferenceEngine.create(config("md2")) as first:
        loaded = asyncio.Event()
        rounds = 0

        async def ask_until_loaded() -> None:
            nonlocal rounds
            while not loaded.is_set():
                await check_cases(first, "md2", golden_images)
                rounds += 1

        asking = asyncio.create_task(ask_until_loaded())
        try:
            for load in range(LOADS):
                async with await InferenceEngine.create(config("md3")) as other:
                    if load == LOADS - 1:
                        loaded.set()
                    await check_cases(other, "md3", golden_images)
        finally:
            loaded.set()
            await asking
        assert rounds > 0, "the first model did not serve meanwhile"
        await check_cases(first, "md2", golden_images)


@pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ,
    reason="measures the free memory of the card, which tests beside it change",
)
async def test_memory_is_planned_beside_a_running_model_and_comes_back(
    golden_folder: Callable[[str], Path], golden_images: Path
) -> None:
    """With pages for all of the memory that a plan leaves, the first model still has room for its largest passes."""

    def config(**settings: Any) -> RuntimeConfig:
        path = golden_folder("md2")
        return RuntimeConfig(
            model_path=path, device="cuda", dtype="float32", max_batch_size=4, **settings
        )

    def free() -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    async with await InferenceEngine.create(config(kv_cache_pages=400)) as warm:
        await check_cases(warm, "md2", golden_images)
    before = free()
    async with await InferenceEngine.create(config(kv_cache_gib=1.0)) as first:
        between = free()
        with pytest.raises(InsufficientMemoryError, match=r"on cuda:0, .* may take .* more"):
            await InferenceEngine.create(config(kv_cache_gib=between / 2**30))
        assert free() > between - (64 << 20), "the refused model left something"
        kept = []
        for _ in range(3):
            async with await InferenceEngine.create(config(kv_cache_gib=2.0)) as second:
                await asyncio.gather(
                    *(check_cases(engine, "md2", golden_images) for engine in (first, second))
                )
            kept.append((between - free()) >> 20)
        assert kept[0] < 512, "the libraries keep workspaces for a second model, and no more"
        assert kept[-1] <= kept[0] + 64, f"each unloaded model kept memory: {kept} MiB"
    assert free() > before - (64 << 20) - (kept[-1] << 20)
