"""The torch runtime on a CUDA device: float32 gives the reference's tokens there too, as it does on the CPU."""

import asyncio
from pathlib import Path

import pytest

from kestrel_engine import InferenceEngine, RuntimeConfig
from tests.golden.test_engine import CHECKS, cases, check_text, run

IMAGE = Path(__file__).parents[2] / "clients/python/kestrel_client/commands/demo.jpg"


@pytest.mark.parametrize("model", ["md2", "md3"])
async def test_every_golden_case_in_one_mixed_batch(model, golden_folder, golden_images):
    config = RuntimeConfig(
        model_path=golden_folder(model), device="cuda", dtype="float32", max_batch_size=8
    )
    todo = cases(model)
    async with await InferenceEngine.create(config) as engine:
        assert engine.info.device.startswith("cuda")
        results = await asyncio.gather(*(run(engine, case, golden_images) for case in todo))
    for case, result in zip(todo, results, strict=True):
        CHECKS.get(case["skill"], check_text)(case, result)


async def test_kestrel_tiny_answers_as_on_the_cpu(golden_images):
    answers = []
    for device in ("cpu", "cuda"):
        config = RuntimeConfig(device=device, dtype="float32", max_batch_size=8)
        async with await InferenceEngine.create(config) as engine:
            pictures = sorted(golden_images.iterdir())
            greedy = {"temperature": 0.0, "max_tokens": 60}
            calls = [engine.caption(p, "long", settings=greedy) for p in pictures]
            calls += [engine.detect(p, "shape") for p in pictures]
            answers.append([r.token_ids for r in await asyncio.gather(*calls)])
    assert answers[0] == answers[1]


async def test_kestrel_tiny_answers_in_bfloat16():
    """The default dtype on CUDA: not compared token by token, but it must see what is there."""
    async with await InferenceEngine.create(RuntimeConfig(device="cuda")) as engine:
        assert engine.info.dtype == "bfloat16"
        result = await engine.query(
            IMAGE, "How many green crescents are there?", settings={"temperature": 0.0}
        )
        assert result.output["answer"] == "2"
        assert len((await engine.detect(IMAGE, "green crescent")).output["objects"]) == 2
