"""Adapters on CUDA with plain torch (--no-compile) and with kernels: in float32 the same tokens as on a CPU."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

from kestrel_engine import EngineResult, InferenceEngine, RuntimeConfig
from kestrel_engine.checkpoint.open import open_model
from tests.engine.adapters.random_adapters import random_tensors
from tests.tiny import TINY

IMAGES = [
    np.random.default_rng(4).integers(0, 256, (*sides, 3), dtype=np.uint8)
    for sides in ((70, 90), (500, 900))
]


async def answers(
    folder: Path, device: str, names: tuple[str | None, ...], **settings: Any
) -> list[tuple[int, ...]]:
    settings = {"model_path": TINY, "device": device, "dtype": "float32", **settings}
    config = RuntimeConfig(adapters_dir=folder, **settings)
    async with await InferenceEngine.create(config) as engine:

        async def ask(image: np.ndarray, adapter: str | None) -> tuple[int, ...]:
            settings = {"temperature": 0.0, "max_tokens": 12, "adapter": adapter}
            result = await engine.query(image, "what is it?", settings=settings)
            assert isinstance(result, EngineResult)
            return result.token_ids

        return await asyncio.gather(*(ask(image, name) for image in IMAGES for name in names))


async def test_mixed_requests_equal_those_of_a_cpu(tmp_path: Path) -> None:
    model = open_model(RuntimeConfig(model_path=TINY)).config
    save_file(random_tensors(model, 1, size=0.3), tmp_path / "text.safetensors")
    sight = random_tensors(model, 2, size=0.3, vision=True, only="vision.")
    save_file(sight, tmp_path / "sight.safetensors")
    names = (None, "text", "sight", "text", None)
    plain = await answers(tmp_path, "cuda", names, compile=False)
    assert plain == await answers(tmp_path, "cpu", names)


@pytest.mark.parametrize("model", ["kestrel-tiny", "md2", "md3"])
@pytest.mark.parametrize("cuda_graphs", [True, False])
async def test_kernels_equal_a_cpu(
    model: str, cuda_graphs: bool, tmp_path: Path, golden_folder: Any
) -> None:
    """All layers, with ranks of one slab and of several: of the text decoder, the vision tower and the projector."""
    path = TINY if model == "kestrel-tiny" else golden_folder(model)
    config = open_model(RuntimeConfig(model_path=path)).config
    for rank, part in ((3, ""), (16, ".mlp."), (40, "attn.")):
        tensors = random_tensors(config, rank, rank, size=0.3, only=part)
        few = random_tensors(config, rank, 1 + rank // 8, size=0.3, only=part)
        made = {
            name: few[name] if tensor.dim() == 3 else tensor for name, tensor in tensors.items()
        }
        save_file(made, tmp_path / f"{rank}.safetensors")
    for name, rank, part in (("tower", 18, "vision.blocks"), ("lens", 5, "vision.proj_mlp")):
        sight = random_tensors(config, rank, rank, size=0.3, only=part, vision=True)
        save_file(sight, tmp_path / f"{name}.safetensors")
    save_file(
        random_tensors(config, 7, 2, size=0.3, vision=True), tmp_path / "everything.safetensors"
    )
    names = (None, "3", "40", "tower", "16", "lens", "40", None, "3", "everything")
    settings = {"model_path": path, "cuda_graphs": cuda_graphs}
    expected = await answers(tmp_path, "cpu", names, model_path=path)
    assert len(set(expected)) > 5, "the adapters change nothing"
    assert await answers(tmp_path, "cuda", names, **settings) == expected
