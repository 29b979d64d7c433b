"""Small random Moondreams: every shape differs from every other, and the grid is not the number of layers."""

import torch
from torch import Tensor

from kestrel_engine.checkpoint.weights.expected import expected_tensors
from kestrel_engine.checkpoint.weights.rounding import may_stay
from kestrel_engine.models.moondream import Moondream
from kestrel_engine.models.weight_only import scale_of, to_groups
from kestrel_engine.types.model_config import Family, ModelConfig, parse_model_config

NUMBERS = {
    "text": {
        "dim": 32,
        "ff_dim": 48,
        "n_layers": 3,
        "n_heads": 2,
        "n_kv_heads": 2,
        "vocab_size": 60,
        "max_context": 200,
        "rotary_dim": 8,
    },
    "vision": {
        "enc_dim": 24,
        "enc_patch_size": 6,
        "enc_n_layers": 2,
        "enc_ff_dim": 40,
        "enc_n_heads": 2,
        "crop_size": 30,
        "overlap_margin": 1,
        "proj_inner_dim": 28,
        "proj_out_dim": 32,
    },
    "region": {
        "dim": 32,
        "coord_feat_dim": 10,
        "coord_out_dim": 64,
        "size_feat_dim": 12,
        "size_out_dim": 64,
        "inner_dim": 20,
    },
}
MOE = {"start_layer": 1, "num_experts": 6, "experts_per_token": 2, "expert_inner_dim": 16}


def small_config(family: Family) -> ModelConfig:
    numbers = {name: dict(part) for name, part in NUMBERS.items()}
    if family == "moondream3":
        numbers["text"]["moe"] = MOE
    return parse_model_config({"config": numbers}, family=family)


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Weights of spread 1 / sqrt(inputs), so that activations keep their size."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_tensors(config).items():
        values = torch.randn(shape, generator=generator)
        is_norm = name.endswith("ln.weight") or ".ln1.w" in name or ".ln2.w" in name
        tensors[name] = 1 + 0.1 * values if is_norm else values / max(1, shape[-1]) ** 0.5
    return tensors


def with_fp8_experts(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rounds the experts to FP8 with a scale for each row, as in released checkpoints."""
    assert config.text.moe is not None
    rounded = dict(tensors)
    for layer in range(config.text.moe.start_layer, config.text.n_layers):
        for name in ("fc1", "fc2"):
            place = f"text.blocks.{layer}.mlp.{name}"
            weight = tensors[f"{place}.weight"].float()
            scale = rounded[f"{place}.scale"] = weight.abs().amax(-1) / 448
            rounded[f"{place}.weight"] = (weight / scale[..., None]).to(torch.float8_e4m3fn)
    return rounded


def in_four_bits(tensors: dict[str, Tensor], group: int = 16) -> dict[str, Tensor]:
    """Rounds the weights that may stay in 4 bits to groups, with zero points that aren't whole."""
    rounded = dict(tensors)
    for name, weight in tensors.items():
        if may_stay(name, tuple(weight.shape), group):
            groups = weight.reshape(-1, group)
            low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
            scale = (high - low) / 15
            q = ((groups - low) / scale).round().clamp(0, 15).byte()
            shape = tuple(weight.shape)
            rounded[name], rounded[scale_of(name)] = to_groups(q, scale, -low / scale, shape)
    return rounded


def small_model(family: Family) -> Moondream:
    config = small_config(family)
    return Moondream(config, random_tensors(config))
