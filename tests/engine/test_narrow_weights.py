"""Engines whose weights are in 4 or 8 bits: 4-bit checkpoints answer as their widened values do."""

import json
import shutil

import numpy as np
import pytest
import torch

from kestrel_engine import ConfigError, InferenceEngine, RuntimeConfig
from kestrel_engine.building import device as devices
from kestrel_engine.building import factory
from kestrel_engine.checkpoint.open import load_weights, open_model
from kestrel_engine.checkpoint.weights.int4 import Order
from kestrel_engine.models.compiled import few_rows
from kestrel_engine.models.moondream import Moondream
from kestrel_engine.models.weight_only import pack_for_cpu
from kestrel_engine.sizing import GIB, fit
from tests.checkpoint_loading import load_checkpoint
from tests.four_bit_checkpoint import in_four_bits, write
from tests.tiny import TINY

GREEDY = {"max_tokens": 12, "temperature": 0.0, "logprobs": True}


@pytest.fixture(scope="module", params=["md2", "md3"])
def folders(request, golden_folder, tmp_path_factory):
    """A golden model in 4 bits, and the model of the same values in float32."""
    golden = golden_folder(request.param)
    raw = json.loads((golden / "config.json").read_text())
    stored, values = in_four_bits(load_checkpoint(golden).tensors, Order.HALVES)
    made = []
    for kind, tensors in (("int4", stored), ("wide", values)):
        folder = write(tmp_path_factory.mktemp(f"{request.param}-{kind}"), tensors, raw)
        shutil.copy(TINY / "tokenizer.json", folder)
        made.append(folder)
    return made


async def answers(folder, **settings):
    config = RuntimeConfig(model_path=folder, device="cpu", max_batch_size=2, **settings)
    picture = np.random.default_rng(3).integers(0, 255, (300, 260, 3), np.uint8)
    async with await InferenceEngine.create(config) as engine:
        asked = await engine.query(picture, "What is this?", settings=GREEDY)
        return asked.output, engine.info


@pytest.mark.slow_with("md2")
async def test_in_float32_four_bits_answer_exactly_as_the_widened_weights(folders):
    (four, small), (wide, large) = [
        await answers(folder, precision="float32") for folder in folders
    ]
    assert four == wide
    assert small.num_parameters == large.num_parameters
    assert small.weights_bytes < 0.7 * large.weights_bytes


def text_logits(model):
    """Logits of one prompt of 40 positions, and of each of its last two tokens alone."""
    config = model.config.text
    x = model.text.embed(torch.arange(5, 45) % config.vocab_size)

    def own_values(layer, q, k, v):
        return v

    return [
        model.text.logits(model.text(x[rows], torch.arange(40)[rows], own_values))
        for rows in (slice(40), slice(38, 39), slice(39, 40))
    ]


@pytest.mark.slow_with("md2")
@torch.inference_mode()
def test_torchs_own_product_of_four_bits_is_near_the_widened_weights(folders, monkeypatch):
    """Rounding x and scales to bfloat16 moves the logits by less than 2 % of their norm; many rows stay in float32."""
    monkeypatch.setattr(few_rows, "available", lambda: False)
    four, wide = [
        load_weights(
            open_model(RuntimeConfig(model_path=folder)),
            dtype=torch.float32,
            device="cpu",
            narrow="stored",
        )
        for folder in folders
    ]
    pack_for_cpu(four.tensors)
    assert any(t.dtype == torch.uint8 and t.dim() == 3 for t in four.tensors.values())
    pairs = zip(*(text_logits(Moondream(x.config, x.tensors)) for x in (four, wide)), strict=True)
    for found, wanted in pairs:
        assert (found - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "int4"])
async def test_any_checkpoint_can_be_rounded_while_it_is_loaded(precision):
    config = RuntimeConfig(model_path=TINY, precision=precision, device="cpu")
    device, dtype = torch.device("cpu"), devices.dtype_of(config)
    expected = open_model(config).weight_bytes(dtype, device, narrow=precision)
    settings = {"max_tokens": 30, "temperature": 0.0}
    async with await InferenceEngine.create(config) as engine:
        assert engine.info.weights_bytes == expected
        assert engine.info.precision.endswith(f" with {precision} weights")
        result = await engine.caption(TINY / "sample.jpg", settings=settings)
        assert result.output["caption"]
    built = factory.build(RuntimeConfig(model_path=TINY, device="cpu"))
    built.runtime.close()
    assert expected < 0.6 * built.info.weights_bytes
    assert built.info.num_parameters == engine.info.num_parameters


def test_what_a_device_keeps_narrow():
    cuda = torch.device("cuda")
    with pytest.raises(ConfigError, match="is for CPUs"):
        devices.narrow_of(RuntimeConfig(precision="int8"), cuda, kernels=True)
    # Products in FP8 round the wide weights.
    for precision, narrow in (("auto", "stored"), ("int4", "int4"), ("fp8", "wide")):
        assert devices.narrow_of(RuntimeConfig(precision=precision), cuda, kernels=True) == narrow


@pytest.mark.parametrize("name", ["moondream2", "moondream3-preview"])
def test_four_bits_are_a_part_of_the_plan_for_a_card(name):
    sizes = {"max_batch_size": 2, "step_crops": 1, "max_seq_length": 1500, "random_weights": True}
    four, wide = (
        fit(RuntimeConfig(model=name, precision=precision, **sizes), 80 * GIB)
        for precision in ("int4", "bfloat16")
    )
    assert four.weights_bytes < (0.55 if name == "moondream2" else 0.33) * wide.weights_bytes
    assert four.num_pages >= wide.num_pages
    if name == "moondream3-preview":
        fit(RuntimeConfig(model=name, precision="int4", **sizes), 8 * GIB)
