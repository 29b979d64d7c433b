"""Paths of cards that aren't here, forced on the one that is: without FP8, FlashInfer, graphs or Triton."""

import dataclasses

import numpy as np
import pytest
import torch

from kestrel_engine import InferenceEngine, RuntimeConfig
from kestrel_engine.building import factory
from kestrel_engine.runtime.gpu import device as gpu_device
from kestrel_engine.types.step import Row
from tests.golden.test_engine import check_cases
from tests.gpu.test_torch_runtime_cuda import IMAGE
from tests.tiny import TINY


@pytest.mark.parametrize("model", ["md2", "md3"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"attention": "torch"},
        {"attention": "triton"},
        {"cuda_graphs": False},
        {"compile": False},
    ],
    ids=str,
)
async def test_every_path_gives_the_references_tokens(
    model, settings, golden_folder, golden_images
):
    config = RuntimeConfig(
        model_path=golden_folder(model),
        device="cuda",
        dtype="float32",
        max_batch_size=8,
        kv_cache_gib=2.0,
        **settings,
    )
    async with await InferenceEngine.create(config) as engine:
        assert engine.info.device.startswith("cuda")
        await check_cases(engine, model, golden_images)


async def test_an_ampere_card_answers_in_bfloat16(monkeypatch):
    real = gpu_device.capabilities(torch.device("cuda"))
    ampere = dataclasses.replace(real, compute_capability=(8, 6))
    for module in ("device", "parts", "room"):
        monkeypatch.setattr(
            f"kestrel_engine.runtime.gpu.{module}.capabilities", lambda device: ampere
        )
    config = RuntimeConfig(model_path=TINY, device="cuda", kv_cache_gib=1.0)
    async with await InferenceEngine.create(config) as engine:
        greedy = {"temperature": 0.0}
        question = "How many green crescents are there?"
        result = await engine.query(IMAGE, question, settings=greedy)
        assert result.output["answer"] == "2"


@pytest.mark.parametrize("compile", [True, False])
def test_kept_and_widened_experts_compute_alike(golden_folder, compile):
    """The weights are the same numbers; the order of rounding isn't."""
    hidden = []
    for fp8_experts in ("keep", "dequantise"):
        config = RuntimeConfig(
            model_path=golden_folder("md3") / "config.json",
            random_weights=True,
            fp8_experts=fp8_experts,
            device="cuda",
            compile=compile,
            kv_cache_gib=1.0,
        )
        built = factory.build(config)
        kept = built.runtime.model.text.blocks[-1].mlp.fc1.dtype == torch.float8_e4m3fn
        assert kept == (fp8_experts == "keep")
        rows = [
            Row(
                number,
                tuple(range(20 + number, 60)),
                0,
                tuple(range(4 * number, 4 * number + 4)),
                None,
            )
            for number in range(5)
        ]
        hidden.append(built.runtime.hidden(rows).float().cpu())
        built.runtime.close()
    difference = (hidden[0] - hidden[1]).norm() / hidden[1].norm()
    assert hidden[1].std() > 0.3 and difference < 2e-2


async def test_a_cache_larger_than_the_card_says_what_to_lower():
    from kestrel_engine import InsufficientMemoryError

    config = RuntimeConfig(model_path=TINY, device="cuda", kv_cache_gib=5000.0)
    with pytest.raises(InsufficientMemoryError, match=r"lower --kv-cache-gib to at most \d+"):
        await InferenceEngine.create(config)


async def test_a_image_on_random_weights_of_the_default_path(golden_folder):
    config = RuntimeConfig(
        model_path=golden_folder("md3") / "config.json",
        random_weights=True,
        device="cuda",
        kv_cache_gib=1.0,
    )
    async with await InferenceEngine.create(config) as engine:
        assert engine.info.weights_fingerprint == "random:0:cuda:bfloat16"
        picture = np.full((300, 500, 3), 120, np.uint8)
        greedy = {"temperature": 0.0, "max_tokens": 8}
        first, again = [
            await engine.query(picture, "What is this?", settings=greedy) for _ in range(2)
        ]
        assert first.metrics.output_tokens == 8 and first.token_ids == again.token_ids
