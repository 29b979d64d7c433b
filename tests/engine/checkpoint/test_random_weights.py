"""Made-up weights: the right tensors, repeatable, and a network in which nothing explodes or always goes one way."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

from kestrel_engine.checkpoint.catalog import BUNDLED
from kestrel_engine.checkpoint.open import load_weights, open_model
from kestrel_engine.checkpoint.weights.expected import expected_tensors
from kestrel_engine.checkpoint.weights.random_weights import random_checkpoint
from kestrel_engine.config.runtime import RuntimeConfig
from kestrel_engine.errors import ConfigError
from kestrel_engine.models.moondream import Moondream
from kestrel_engine.models.text import Moe
from kestrel_engine.types.model_config import parse_model_config

DEEP = {
    "config": {
        "text": {"dim": 128, "n_layers": 12, "n_heads": 4, "n_kv_heads": 4, "ff_dim": 256, "vocab_size": 800,
                 "tau_attn": True, "rotary_dim": 16, "moe": {"num_experts": 16, "experts_per_token": 4,
                 "start_layer": 2, "expert_inner_dim": 64}},
        "vision": {"enc_dim": 64, "enc_n_layers": 12, "enc_n_heads": 2, "enc_ff_dim": 128, "crop_size": 126,
                   "overlap_margin": 1, "proj_inner_dim": 256, "proj_out_dim": 128},
        "region": {"dim": 128, "coord_feat_dim": 32, "coord_out_dim": 64, "size_feat_dim": 32, "size_out_dim": 64},
    }
}  # fmt: skip


def made(config, seed=0, dtype=torch.float32, **options):
    return random_checkpoint(config, seed, dtype, "cpu", progress=lambda *report: None, **options)


def test_all_tensors_are_there_and_none_is_zero_or_constant(config_of, family):
    config = config_of(family)
    loaded = made(config, dtype=torch.bfloat16)
    shapes = {name: tuple(tensor.shape) for name, tensor in loaded.tensors.items()}
    assert shapes == expected_tensors(config)
    for name, tensor in loaded.tensors.items():
        assert tensor.dtype == torch.bfloat16 and tensor.isfinite().all(), name
        assert tensor.float().std() > 0, name
    assert loaded.fingerprint == "random:0:cpu:bfloat16"


def test_the_same_seed_gives_the_same_weights(config_of):
    config = config_of("moondream3")
    first, again, other = (made(config, seed).tensors for seed in (5, 5, 6))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_kept_and_widened_experts_are_the_same_weights(config_of):
    config = config_of("moondream3")
    kept, wide = (made(config, keep_fp8=keep).tensors for keep in (True, False))
    name = "text.blocks.2.mlp.fc1"
    assert kept[f"{name}.weight"].dtype == torch.float8_e4m3fn
    scales = kept[f"{name}.scale"]
    assert scales.shape == (4, 40) and scales.std() > 0, "each row has its own"
    widened = kept[f"{name}.weight"].float() * scales[..., None]
    assert torch.equal(widened, wide[f"{name}.weight"])
    assert "text.blocks.0.mlp.fc1.scale" not in kept, "layer 0 is dense"


def test_progress_ends_at_the_total(config_of):
    seen = []
    loaded = random_checkpoint(
        config_of("moondream3"), 0, torch.bfloat16, "cpu", keep_fp8=True,
        progress=lambda *report: seen.append(report),
    )  # fmt: skip
    total = sum(tensor.nbytes for tensor in loaded.tensors.values())
    assert seen[-1][:2] == (total, total)


@torch.inference_mode()
def test_activations_stay_healthy_and_tokens_choose_different_experts():
    config = parse_model_config(DEEP)
    model = Moondream(config, made(config).tensors)
    side = config.vision.crop_size
    ramp = torch.arange(side * side).view(side, side) * 255 // side**2
    picture = torch.stack([ramp, ramp.t(), 255 - ramp], -1).to(torch.uint8)
    features = model.vision.encode_crops(picture[None])
    embedding = model.vision.embed(features, (1, 1))
    assert 0.8 < features.std() < 1.3 and 0.3 < embedding.std() < 2
    ids = torch.randint(0, 800, (60,), generator=torch.Generator().manual_seed(1))
    x = torch.cat([embedding, model.text.embed(ids)])
    place = model.text.place(torch.arange(len(x)))

    def attention(layer, q, k, v):
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)

    for block in model.text.blocks:
        if isinstance(block.mlp, Moe):
            logits = block.mlp.router(block.ln(x))
            weights, chosen = logits.topk(4, dim=-1)
            counts = torch.bincount(chosen.flatten(), minlength=16)
            fair = 4 * len(x) / 16
            assert (counts > 0).all() and counts.max() < 3.5 * fair, counts.tolist()
            first = weights.softmax(-1)[:, 0].mean()
            assert 0.3 < first < 0.8, "several experts matter, and not all alike"
        x = block(x, place, attention)
        assert 0.5 < x.std() < 4
    logits = model.text.logits(x)
    assert logits.isfinite().all() and 0.5 < logits.std() < 2
    assert len(logits.argmax(-1).unique()) > len(x) // 4, "answers depend on what was asked"
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    assert (entropy > 0.5 * math.log(800)).all()
    assert model.region.coord_logits(x).std() > 0.5 and model.region.size_logits(x).std() > 0.5


@pytest.mark.parametrize(
    ("model", "family"),
    [("moondream2", "moondream2"), ("Moondream3-preview", "moondream3"),
     ("moondream3.1-9b-a2b", "moondream3")],
)  # fmt: skip
def test_a_released_name_needs_no_file_and_no_network(model, family):
    opened = open_model(RuntimeConfig(model=model, random_weights=True, seed=3))
    assert opened.config == parse_model_config({}, family=family)
    assert opened.name == f"{model.lower()} (random weights)"
    assert opened.files == () and opened.random_seed == 3
    assert opened.tokenizer_path == BUNDLED / "kestrel_small/tokenizer.json"


def test_a_config_file_is_enough(tmp_path, raw_of, config_of):
    folder = tmp_path / "shape"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw_of("moondream3")))
    for given in (
        {"model_path": folder},
        {"model_path": folder / "config.json"},
        {"model": str(folder)},
    ):
        opened = open_model(RuntimeConfig(random_weights=True, **given))
        assert opened.name == "shape (random weights)"
        assert opened.config == config_of("moondream3")
    loaded = load_weights(opened, dtype=torch.float32, device="cpu", keep_fp8=True)
    assert loaded.tensors["text.blocks.1.mlp.fc2.scale"].shape == (4, 32)
    other = folder / "wide.json"
    other.write_text(json.dumps(raw_of("moondream2")))
    opened = open_model(RuntimeConfig(random_weights=True, model_path=other))
    assert opened.name == "wide (random weights)" and opened.config.family == "moondream2"


def test_the_bundled_model_has_its_own_shape():
    opened = open_model(RuntimeConfig(random_weights=True))
    assert opened.name == "kestrel-small (random weights)" and opened.config.text.vocab_size == 2048


@pytest.mark.parametrize("given", [{"model": "org/repo"}, {"model_path": "/no/such/folder"}])
def test_an_unknown_shape_is_refused(given):
    with pytest.raises(
        ConfigError, match=r"random weights need one of kestrel-small, moondream2"
    ) as caught:
        open_model(RuntimeConfig(random_weights=True, **given))
    assert caught.value.field == next(iter(given))
