"""Random adapters of a loaded model's text MLPs, read from files as a server reads them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch
from safetensors.torch import save_file

from kestrel_engine import LoRA, TextLoRAConfig
from kestrel_engine.types.adapter import Adapter

from .opening import Opened


def random_adapters(opened: Opened, folder: Path, count: int, rank: int) -> list[Adapter]:
    """Writes ``count`` adapters of ``rank`` to ``folder``, the model's folder of adapters, and loads them."""
    library = opened.built.adapters
    assert library is not None, "the model was opened without a folder of adapters"
    names = write_random_adapters(opened, folder, count, rank)

    async def load() -> list[Adapter]:
        return [(await library.acquire(name)).adapter for name in names]

    return asyncio.run(load())


def write_random_adapters(opened: Opened, folder: Path, count: int, rank: int) -> list[str]:
    """Writes ``count`` adapters of ``rank`` to ``folder``. Returns their names. Their changes are small."""
    names = [f"random-{number}" for number in range(count)]
    for number, name in enumerate(names):
        config = TextLoRAConfig(rank=rank)
        lora = LoRA.create(opened.built.model.text, lora_config=config, seed=number)
        generator = torch.Generator().manual_seed(number)
        for key, tensor in lora.tensors.items():
            if key.endswith(".B"):
                tensor.normal_(generator=generator).mul_(0.01)
        save_file(lora.tensors, folder / f"{name}.safetensors")
    return names
