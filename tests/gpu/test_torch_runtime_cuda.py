"""The torch runtime on a CUDA device: float32 gives the reference's tokens there too, as it does on the CPU."""

import asyncio
from pathlib import Path

from kestrel_engine import InferenceEngine, RuntimeConfig
from tests.tiny import TINY

IMAGE = Path(__file__).parents[2] / "clients/python/kestrel_client/commands/demo.jpg"


async def test_kestrel_tiny_answers_as_on_the_cpu(golden_images):
    answers = []
    for device in ("cpu", "cuda"):
        config = RuntimeConfig(model_path=TINY, device=device, dtype="float32", max_batch_size=8)
        async with await InferenceEngine.create(config) as engine:
            pictures = sorted(golden_images.iterdir())
            greedy = {"temperature": 0.0, "max_tokens": 60}
            calls = [engine.caption(p, "long", settings=greedy) for p in pictures]
            calls += [engine.detect(p, "shape") for p in pictures]
            answers.append([r.token_ids for r in await asyncio.gather(*calls)])
    assert answers[0] == answers[1]


async def test_kestrel_tiny_answers_in_bfloat16():
    """The default dtype on CUDA: not compared token by token, but it must see what is there."""
    async with await InferenceEngine.create(
        RuntimeConfig(model_path=TINY, device="cuda")
    ) as engine:
        assert engine.info.dtype == "bfloat16"
        result = await engine.query(
            IMAGE, "How many green crescents are there?", settings={"temperature": 0.0}
        )
        assert result.output["answer"] == "2"
        assert len((await engine.detect(IMAGE, "green crescent")).output["objects"]) == 2
