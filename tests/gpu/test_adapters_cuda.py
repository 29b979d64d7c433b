"""Adapters on CUDA with plain torch (--no-compile): in float32 the same tokens as on a CPU."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kestrel_engine import EngineResult, InferenceEngine, RuntimeConfig
from kestrel_engine.checkpoint.open import open_model
from tests.engine.adapters.random_adapters import random_tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

IMAGE = np.random.default_rng(4).integers(0, 256, (70, 90, 3), dtype=np.uint8)


async def answers(folder: Path, device: str) -> list[tuple[int, ...]]:
    config = RuntimeConfig(adapters_dir=folder, device=device, dtype="float32", compile=False)
    async with await InferenceEngine.create(config) as engine:

        async def ask(adapter: str | None) -> tuple[int, ...]:
            settings = {"temperature": 0.0, "max_tokens": 12, "adapter": adapter}
            result = await engine.query(IMAGE, "what is it?", settings=settings)
            assert isinstance(result, EngineResult)
            return result.token_ids

        return await asyncio.gather(*map(ask, (None, "text", "sight", "text", None)))


async def test_mixed_requests_equal_those_of_a_cpu(tmp_path: Path) -> None:
    model = open_model(RuntimeConfig()).config
    save_file(random_tensors(model, 1, size=0.3), tmp_path / "text.safetensors")
    sight = random_tensors(model, 2, size=0.3, vision=True, only="vision.")
    save_file(sight, tmp_path / "sight.safetensors")
    assert await answers(tmp_path, "cuda") == await answers(tmp_path, "cpu")
