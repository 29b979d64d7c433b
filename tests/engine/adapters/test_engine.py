"""Adapters by name through the whole engine, on the bundled model: mixed requests, caches, errors of one request."""

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kestrel_engine import (
    AdapterNotFound,
    AdapterUnfit,
    ConfigError,
    EngineResult,
    ImageFeatures,
    InferenceEngine,
    InvalidRequest,
    LoRA,
    RuntimeConfig,
    TextLoRAConfig,
)
from kestrel_engine.building import factory
from kestrel_engine.checkpoint.open import load_weights, open_model
from kestrel_engine.models.moondream import Moondream
from tests.engine.adapters.random_adapters import merged, random_tensors
from tests.engine.models.small import small_config
from tests.tiny import SPARE_REFINER, TINY

IMAGE = np.random.default_rng(4).integers(0, 256, (70, 90, 3), dtype=np.uint8)
ASKS: tuple[tuple[Any, str], ...] = ((None, "what is this?"), (IMAGE, "what is in the image?"))
NAMES = (None, "one", "two@7", "sight")


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    opened = open_model(RuntimeConfig(model_path=TINY))
    loaded = load_weights(opened, dtype=torch.float32, device=torch.device("cpu"))
    return dict(loaded.tensors)


@pytest.fixture(scope="module")
def tensors() -> Mapping[str, dict[str, Tensor]]:
    model = open_model(RuntimeConfig(model_path=TINY)).config
    return {
        "one": random_tensors(model, 1, rank=4, size=0.3, vision=True),
        "two@7": random_tensors(model, 2, rank=8, size=0.3, only=".mlp."),
        "sight": random_tensors(model, 3, rank=4, size=0.3, only="vision.", vision=True),
    }


@pytest.fixture
def folder(tmp_path: Path, tensors: Mapping[str, dict[str, Tensor]]) -> Path:
    for name, each in tensors.items():
        save_file(each, tmp_path / f"{name}.safetensors")
    return tmp_path


async def ask(engine: InferenceEngine, index: int, adapter: str | None) -> EngineResult:
    image, question = ASKS[index]
    settings = {"temperature": 0.0, "max_tokens": 8, "adapter": adapter}
    result = await engine.query(image, question, settings=settings)
    assert isinstance(result, EngineResult)
    return result


@pytest.mark.slow
async def test_mixed_requests_equal_merged_weights(
    folder: Path, weights: dict[str, Tensor], tensors: Mapping[str, dict[str, Tensor]]
) -> None:
    expected = {}
    whole = folder / "merged"
    whole.mkdir()
    opened = open_model(RuntimeConfig(model_path=TINY))
    for file in (opened.files[0].parent / "config.json", opened.tokenizer_path):
        shutil.copy(file, whole)
    for name in NAMES:
        made = weights if name is None else merged(weights, tensors[name])
        save_file(made, whole / "model.safetensors")
        async with await InferenceEngine.create(RuntimeConfig(model_path=whole)) as engine:
            for index in range(len(ASKS)):
                expected[name, index] = (await ask(engine, index, None)).token_ids
    answers = {tuple(expected[name, index] for index in range(len(ASKS))) for name in NAMES}
    assert len(answers) == len(NAMES), "the adapters change nothing"
    async with await InferenceEngine.create(
        RuntimeConfig(model_path=TINY, adapters_dir=folder)
    ) as engine:
        order = [(name, index) for index in range(len(ASKS)) for name in (*NAMES, *NAMES)]
        results = await asyncio.gather(*(ask(engine, index, name) for name, index in order))
        for key, result in zip(order, results, strict=True):
            assert result.token_ids == expected[key], key
        for name, index in expected:
            alone = await ask(engine, index, name)
            assert alone.token_ids == expected[name, index]


@pytest.mark.parametrize("crop_cache_bytes", [0, 1 << 24])
@pytest.mark.slow_with(0)
async def test_what_is_reused(folder: Path, crop_cache_bytes: int) -> None:
    """A prefix with the same adapter, and the embedding of an image with those that leave the tower as it is."""
    config = RuntimeConfig(model_path=TINY, adapters_dir=folder, crop_cache_bytes=crop_cache_bytes)
    async with await InferenceEngine.create(config) as engine:
        order = (None, "two@7", "one", "sight", "two@7", "one")
        plain, text, *vision, text_again, vision_again = [
            (await ask(engine, 1, name)).metrics for name in order
        ]
        for metrics in (plain, *vision):
            assert metrics.encoded_crops > 0
            assert (metrics.cached_tokens, metrics.reused_crops) == (0, 0)
        assert (text.cached_tokens, text.encoded_crops) == (0, 0)
        for metrics in (text_again, vision_again):
            assert metrics.cached_tokens > plain.input_tokens // 2
            assert metrics.encoded_crops == 0


async def test_embeddings_are_those_of_the_adapter(
    folder: Path, weights: dict[str, Tensor], tensors: Mapping[str, dict[str, Tensor]]
) -> None:
    opened = open_model(RuntimeConfig(model_path=TINY))
    model = Moondream(opened.config, merged(weights, tensors["sight"]))
    config = RuntimeConfig(model_path=TINY, adapters_dir=folder)
    async with await InferenceEngine.create(config) as engine:
        prepared = await engine.prepare_image(IMAGE)
        arguments = {"whole_image": True, "crops": True, "pooling": "none"}
        results = []
        for name in ("sight", "two@7", None):
            stream = await engine.submit("embed", prepared, arguments, {"adapter": name})
            results.append((await stream.result()).output)
    count = prepared.num_distinct
    with torch.inference_mode():
        features = model.vision.encode_crops(torch.from_numpy(prepared.crops[:count]))
        expected = model.vision.embed(features, prepared.tiling)
        crops = torch.stack([model.vision.embed(each[None], (1, 1)) for each in features])
    sight, text, plain = results
    torch.testing.assert_close(torch.tensor(sight["image"]), expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(torch.tensor(sight["crops"]), crops, rtol=1e-3, atol=1e-4)
    assert np.array_equal(text["image"], plain["image"])
    assert not np.allclose(sight["image"], plain["image"], atol=1e-2)


async def test_features_of_an_adapter_stand_for_the_image_with_this_adapter(folder: Path) -> None:
    arguments = {"question": "What is in this picture?"}

    async def answer(image: object, adapter: str | None) -> tuple[int, ...]:
        stream = await engine.submit(
            "query", image, arguments, {"temperature": 0.0, "max_tokens": 8}, adapter=adapter
        )
        return (await stream.result()).token_ids

    async with await InferenceEngine.create(
        RuntimeConfig(model_path=TINY, adapters_dir=folder)
    ) as engine:
        sent = {}
        for name in ("sight", "two@7", None):
            stream = await engine.submit("embed", IMAGE, {"pooling": "none"}, adapter=name)
            array = (result := await stream.result()).output["image"]
            sent[name] = ImageFeatures(
                array.tobytes(), *array.shape, *result.image_size, name or ""
            )
            expected = await answer(IMAGE, name)
            await engine.flush_caches()
            assert await answer(sent[name], name) == expected, name
        for made_with, used in (("sight", None), (None, "sight"), ("two@7", "sight")):
            with pytest.raises(InvalidRequest, match=r"image\.features\.adapter: was made with"):
                await answer(sent[made_with], used)
        assert await answer(sent[None], "two@7")  # It changes the text only.


async def test_an_error_fails_its_request_alone(folder: Path) -> None:
    save_file({"text.blocks.0.mlp.fc1.A": torch.ones(4, 5)}, folder / "unfit.safetensors")
    async with await InferenceEngine.create(
        RuntimeConfig(model_path=TINY, adapters_dir=folder)
    ) as engine:
        results = await asyncio.gather(
            *(ask(engine, 0, name) for name in ("one", "none@1", "unfit", None)),
            return_exceptions=True,
        )
        assert isinstance(results[0], EngineResult) and isinstance(results[3], EngineResult)
        assert isinstance(results[1], AdapterNotFound) and isinstance(results[2], AdapterUnfit)
        assert "text.blocks.0.mlp.fc1.A has the shape [4, 5]; expected [rank, " in str(results[2])
        assert engine.num_requests == 0 and engine.places.held == 0


def test_settings_that_can_not_be_served(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        factory.build(RuntimeConfig(model_path=TINY, adapters_dir=tmp_path / "none"))


async def test_a_lora_applies_to_requests_that_name_no_adapter(folder: Path) -> None:
    """A new one has no effect, and a changed one that of its tensors in a file."""
    text = open_model(RuntimeConfig(model_path=TINY)).config.text
    lora = LoRA.create(text, lora_config=TextLoRAConfig(rank=8, alpha=16.0))
    config = RuntimeConfig(model_path=TINY, adapters_dir=folder)
    async with await InferenceEngine.create(config, lora=lora) as engine:
        new = (await ask(engine, 0, None)).token_ids
        two = (await ask(engine, 0, "two@7")).token_ids
    generator = torch.Generator().manual_seed(1)
    for name, tensor in lora.tensors.items():
        if name.endswith(".B"):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    save_file(lora.tensors, folder / "same.safetensors", {"alpha": "16", "rank": "8"})
    async with await InferenceEngine.create(config, lora=lora) as engine:
        changed = (await ask(engine, 0, None)).token_ids
        assert (await ask(engine, 0, "same")).token_ids == changed != new
        assert (await ask(engine, 0, "two@7")).token_ids == two
    async with await InferenceEngine.create(config) as engine:
        assert (await ask(engine, 0, None)).token_ids == new


def test_a_lora_that_does_not_fit() -> None:
    text = small_config("moondream3").text
    with pytest.raises(ConfigError, match="rank=3: must be divisible by 2, the experts"):
        LoRA.create(text, lora_config=TextLoRAConfig(rank=3))
    with pytest.raises(ConfigError, match="from 1 to 128"):
        TextLoRAConfig(rank=129)
    with pytest.raises(ConfigError, match="alpha"):
        TextLoRAConfig(alpha=0)
    lora = LoRA.create(text, lora_config=TextLoRAConfig(rank=4, alpha=2.0))
    cpu = torch.device("cpu")
    assert lora.tensors["text.blocks.1.mlp.fc1.A"].shape == (6, 2, 32)
    made = lora.adapter(text, torch.bfloat16, cpu)
    assert made.num_bytes == 2 * sum(tensor.numel() for tensor in lora.tensors.values())
    with pytest.raises(
        ConfigError, match=r"text\.blocks\.1\.mlp\.fc1\.A.*the model needs \(4, 32\)"
    ):
        lora.adapter(small_config("moondream2").text, torch.float32, cpu)
    lora.tensors["text.blocks.0.mlp.fc1.B"].fill_(torch.inf)
    with pytest.raises(ConfigError, match="not finite"):
        lora.adapter(text, torch.float32, cpu)


@pytest.mark.slow
async def test_refined_outlines_equal_merged_weights(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    opened = open_model(RuntimeConfig(model_path=TINY))
    change = random_tensors(opened.config, 5, rank=4, size=0.03, only="vision.", vision=True)
    save_file(change, tmp_path / "sight.safetensors")
    whole = tmp_path / "merged"
    whole.mkdir()
    shutil.copy(opened.files[0].parent / "config.json", whole)
    shutil.copy(opened.tokenizer_path, whole)
    save_file(merged(weights, change), whole / "model.safetensors")

    async def outlines(config: RuntimeConfig, *adapters: str | None) -> list[dict[str, Any]]:
        found = []
        async with await InferenceEngine.create(config) as engine:
            for adapter in adapters:
                settings = {"temperature": 0.0, "adapter": adapter, "max_tokens": 30}
                sample = opened.files[0].parent / "sample.jpg"
                result = await engine.segment(sample, "blue star", settings=settings)
                found.append(result.output["segments"][0])
        return found

    (expected,) = await outlines(RuntimeConfig(model_path=whole, refiner=SPARE_REFINER), None)
    config = RuntimeConfig(model_path=TINY, adapters_dir=tmp_path, refiner=SPARE_REFINER)
    found, plain = await outlines(config, "sight", None)
    assert expected["refined"] and found["refined"]
    assert found["coarse_path"] == expected["coarse_path"]
    assert plain["svg_path"] != found["svg_path"] == expected["svg_path"]
