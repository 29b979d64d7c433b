"""Several models on one GPU: one is loaded, and captures its graphs, while another serves; both answer as alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kestrel_engine import InferenceEngine, RuntimeConfig
from tests.golden.test_engine import CHECKS, cases, check_text, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

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

    async def ask(engine: InferenceEngine, model: str, case: Any) -> None:
        CHECKS.get(case["skill"], check_text)(case, await run(engine, case, golden_images))

    async def ask_all(engine: InferenceEngine, model: str) -> None:
        await asyncio.gather(*(ask(engine, model, case) for case in cases(model)))

    async with await InferenceEngine.create(config("md2")) as first:
        loaded = asyncio.Event()
        rounds = 0

        async def ask_until_loaded() -> None:
            nonlocal rounds
            while not loaded.is_set():
                await ask_all(first, "md2")
                rounds += 1

        asking = asyncio.create_task(ask_until_loaded())
        try:
            for load in range(LOADS):
                async with await InferenceEngine.create(config("md3")) as other:
                    if load == LOADS - 1:
                        loaded.set()
                    await ask_all(other, "md3")
        finally:
            loaded.set()
            await asking
        assert rounds > 0, "the first model did not serve meanwhile"
        await ask_all(first, "md2")
