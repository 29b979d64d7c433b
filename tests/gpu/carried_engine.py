"""Starts an engine with carried kernels, asks everything, and prints what was compiled: ``MODEL KERNELS PRECISION``.
Without kernels ("") it has those of Triton's own cache.

A process of its own, because a process keeps the kernels that it has launched.
"""

import asyncio
import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path

from kestrel_engine import InferenceEngine, RuntimeConfig
from tests.gpu.test_compiled_early import ask_everything

logging.basicConfig(level=logging.INFO)


async def main(model: str, kernels: str, precision: str) -> None:
    config = RuntimeConfig(
        model_path=Path(model),
        kernel_cache_dir=kernels or None,
        precision=precision,
        device="cuda",
        max_batch_size=16,
        kv_cache_gib=2.0,
    )
    async with await InferenceEngine.create(config) as engine:
        ready = asdict(engine.compiled)
        await ask_everything(engine, segments="segment" in engine.info.skills)
        print(json.dumps({"ready": ready, "asked": asdict(engine.compiled)}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
