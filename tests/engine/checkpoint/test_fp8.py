"""FP8 experts: kept with their row scales or widened, the same weights either way."""

import json

import pytest
import torch
from safetensors.torch import save_file

from kestrel_engine.checkpoint.weights.fp8 import LARGEST, dequantise, quantise_rows
from kestrel_engine.errors import CheckpointError
from kestrel_engine.models.text import Moe
from tests.checkpoint_loading import load_checkpoint
from tests.engine.checkpoint.conftest import same_bits

FP8 = torch.float8_e4m3fn


@pytest.fixture
def fp8_folder(tmp_path, config_of, random_of, raw_of, schemes):
    """A checkpoint with FP8 experts under the training names, and what it holds: canonical name -> (fp8, scale)."""
    config = config_of("moondream3")
    stored = schemes["b"](random_of(config))
    generator = torch.Generator().manual_seed(3)
    experts = {}
    for layer in range(config.text.moe.start_layer, config.text.n_layers):
        head = f"text_model.transformer.h.{layer}"
        for leaf, weight, scale in (
            ("fc1", "mlp.experts.weight", "up_scale"),
            ("fc2", "mlp.output_experts.weight", "down_scale"),
        ):
            eight_bit = stored[f"{head}.{weight}"].to(FP8)
            scales = torch.rand(eight_bit.shape[:2], generator=generator) + 0.1
            stored[f"{head}.{weight}"] = eight_bit
            stored[f"{head}.moe_quant.{scale}"] = scales
            experts[f"text.blocks.{layer}.mlp.{leaf}"] = (eight_bit, scales)
    save_file({k: v.contiguous() for k, v in stored.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw_of("moondream3")))
    return tmp_path, experts, stored


def test_kept_experts_are_the_stored_bits_with_their_scales(fp8_folder):
    folder, experts, _ = fp8_folder
    kept = load_checkpoint(folder, dtype=torch.bfloat16, keep_fp8=True)
    wide = load_checkpoint(folder, dtype=torch.bfloat16)
    assert len(experts) == 4
    for name, (eight_bit, scales) in experts.items():
        assert same_bits(kept.tensors[f"{name}.weight"], eight_bit)
        assert torch.equal(kept.tensors[f"{name}.scale"], scales)
        assert kept.tensors[f"{name}.scale"].dtype == torch.float32
        assert f"{name}.scale" not in wide.tensors
    others = set(wide.tensors) - {f"{name}.weight" for name in experts}
    assert all(torch.equal(kept.tensors[n], wide.tensors[n]) for n in others)
    assert all(kept.tensors[n].dtype == torch.bfloat16 for n in others)
    assert kept.fingerprint == wide.fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layer_computes_the_same_from_both(fp8_folder, dtype):
    folder, _, _ = fp8_folder
    kept, wide = (
        Moe.load(
            load_checkpoint(folder, dtype=dtype, keep_fp8=keep).tensors, "text.blocks.1.mlp", 2
        )
        for keep in (True, False)
    )
    assert kept.fc1.dtype == FP8 and wide.fc1.dtype == dtype
    for tokens in (1, 7):
        u = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(tokens)).to(dtype)
        assert torch.equal(kept(u), wide(u))


def test_progress_counts_what_is_loaded(fp8_folder):
    folder, _, _ = fp8_folder
    seen = []
    kept = load_checkpoint(folder, keep_fp8=True, progress=lambda *report: seen.append(report))
    total = sum(tensor.nbytes for tensor in kept.tensors.values())
    assert seen[-1][:2] == (total, total)


@pytest.mark.parametrize("place", ["weight", "scale", "their product"])
def test_a_value_that_is_no_number_is_found_in_eight_bits_too(fp8_folder, place):
    folder, _, stored = fp8_folder
    name = "text_model.transformer.h.2.mlp.output_experts.weight"
    if place == "weight":
        stored[name].view(torch.uint8).view(-1)[-3] = 0xFF
    else:
        scale = float("inf") if place == "scale" else 3e38
        stored["text_model.transformer.h.2.moe_quant.down_scale"][0, 0] = scale
    save_file({k: v.contiguous() for k, v in stored.items()}, folder / "model.safetensors")
    for keep in (True, False):
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(folder, keep_fp8=keep)
        assert caught.value.nonfinite == ("text.blocks.2.mlp.fc2.weight",)


def test_quantising_uses_the_whole_range_of_every_row():
    weight = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    weight *= torch.tensor([1e-3, 1.0, 50.0, 1e3, 0.0])[:, None]
    eight_bit, scale = quantise_rows(weight.clone())
    assert eight_bit.dtype == FP8 and scale.shape == (2, 5)
    largest = eight_bit.float().abs().amax(-1)
    assert torch.equal(largest[:, :4], torch.full((2, 4), LARGEST)) and not largest[:, 4].any()
    back = dequantise(eight_bit, scale, torch.float32, torch.device("cpu"))
    # Three bits of mantissa: half a step is a sixteenth; the smallest are multiples of scale / 512.
    assert ((back - weight).abs() <= weight.abs() / 16 + scale[..., None] / 1024).all()
