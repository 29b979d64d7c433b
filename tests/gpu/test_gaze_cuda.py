"""Gaze on a GPU in float32: the targets that the CPU finds (tests/golden/test_gaze.py)."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kestrel_engine import InferenceEngine, RuntimeConfig
from tests.golden.test_gaze import EYES, IMAGE


@pytest.mark.parametrize("name", ["md2", "md3"])
async def test_gazes_are_those_of_the_cpu(
    name: str, golden_folder: Callable[[str], Path], golden_images: Path
) -> None:
    found: dict[str, list[Any]] = {}
    for device in ("cpu", "cuda"):
        config = RuntimeConfig(model_path=golden_folder(name), device=device, dtype="float32")
        async with await InferenceEngine.create(config) as engine:
            picture = golden_images / f"{IMAGE}.png"
            results = await asyncio.gather(*(engine.gaze(picture, eye) for eye in EYES))
        gazes = [result.output["gaze"] for result in results]
        found[device] = [gaze and (gaze["x"], gaze["y"]) for gaze in gazes]
    assert found["cuda"] == found["cpu"] and any(found["cpu"])
