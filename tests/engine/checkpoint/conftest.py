"""Random checkpoints of a few hundred KiB with the real structure, and an independent writer of the other naming."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kestrel_engine.checkpoint.weights.expected import expected_tensors
from kestrel_engine.types.model_config import Family, ModelConfig, parse_model_config

Tensors = dict[str, torch.Tensor]

_REGION = {"dim": 32, "coord_feat_dim": 16, "coord_out_dim": 64, "size_feat_dim": 24, "size_out_dim": 128}  # fmt: skip
_RAW: dict[str, Any] = {
    "text": {"dim": 32, "ff_dim": 48, "n_layers": 3, "n_heads": 2, "n_kv_heads": 2, "vocab_size": 80,
             "max_context": 256},
    "vision": {"enc_dim": 24, "enc_n_layers": 2, "enc_ff_dim": 40, "enc_n_heads": 2, "crop_size": 126,
               "overlap_margin": 2, "proj_inner_dim": 56, "proj_out_dim": 32},
}  # fmt: skip


def raw_config(family: Family) -> dict[str, Any]:
    text = dict(_RAW["text"])
    if family == "moondream3":
        moe = {"num_experts": 4, "experts_per_token": 2, "start_layer": 1, "expert_inner_dim": 20}
        text |= {"tau_attn": True, "moe": moe}
        return {"config": {**_RAW, "text": text, "region": _REGION}}
    return {"config": {**_RAW, "text": text, "region": {**_REGION, "inner_dim": 44}}}


def random_tensors(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """Canonical names; the same values on every call."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in expected_tensors(config).items()
    }


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(
        left.view(torch.uint8), right.view(torch.uint8)
    )


_B_TEXT = {"attn.qkv": "mixer.Wqkv", "attn.proj": "mixer.out_proj", "mlp.router": "gate"}
_B_TAU = {"attn.tau.wq": "tau_wq", "attn.tau.wv": "tau_wv", "attn.tau.alpha": "tau_alpha"}
_B_EXPERTS = {"mlp.fc1.weight": "mlp.experts.weight", "mlp.fc2.weight": "mlp.output_experts.weight"}
_VISUAL = "vision_encoder.encoder.model.visual"
_B_OTHER = {
    "text.wte": "text_model.transformer.embd.wte.weight",
    "text.post_ln.": "text_model.lm_head.ln.",
    "text.lm_head.": "text_model.lm_head.linear.",
    "vision.patch_emb.": f"{_VISUAL}.patch_embed.linear.",
    "vision.pos_emb": f"{_VISUAL}.pos_embed",
    "vision.post_ln.": f"{_VISUAL}.norm.",
    "vision.proj_mlp.": "vision_encoder.projection.mlp.",
    "region.coord_encoder.": "region_model.coordinate_encoder.",
    "region.size_encoder.": "region_model.size_encoder.",
    "region.coord_decoder.fc": "region_model.coordinate_decoder.fc",
    "region.size_decoder.fc": "region_model.size_decoder.fc",
    "region.coord_decoder.": "region_model.coordinate_head.",
    "region.size_decoder.": "region_model.size_head.",
    "region.ln.": "region_model.ln.",
    "region.coord_features": "region_model.coordinate_features.weight",
    "region.size_features": "region_model.size_features.weight",
}


def scheme_b_name(name: str, *, expert: bool = False) -> str:
    """The training naming of a canonical name (moondream.md section 2.3)."""
    if block := re.match(r"text\.blocks\.(\d+)\.(.+)", name):
        head, leaf = f"text_model.transformer.h.{block[1]}.", block[2]
        if expert:
            return head + _B_EXPERTS[leaf]
        if leaf in _B_TAU:
            return head + _B_TAU[leaf]
        module, _, end = leaf.rpartition(".")
        return f"{head}{_B_TEXT.get(module, module)}.{end}"
    if block := re.match(r"vision\.blocks\.(\d+)\.(.+)", name):
        leaf = block[2].replace("ln1.", "norm1.").replace("ln2.", "norm2.")
        return f"{_VISUAL}.blocks.{block[1]}.{leaf}"
    return next(b + name.removeprefix(a) for a, b in _B_OTHER.items() if name.startswith(a))


def to_scheme_b(tensors: Tensors) -> Tensors:
    out: Tensors = {}
    for name, tensor in tensors.items():
        stored = tensor.t().contiguous() if name.endswith("_features") else tensor
        out[scheme_b_name(name, expert=tensor.ndim == 3 and ".mlp." in name)] = stored
    return out


def to_scheme_a(tensors: Tensors) -> Tensors:
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


@pytest.fixture(params=["moondream2", "moondream3"])
def family(request: pytest.FixtureRequest) -> Family:
    chosen: Family = request.param
    return chosen


@pytest.fixture
def config_of() -> Callable[[Family], ModelConfig]:
    return lambda family: parse_model_config(raw_config(family))


@pytest.fixture
def raw_of() -> Callable[[Family], dict[str, Any]]:
    return raw_config


@pytest.fixture
def random_of() -> Callable[..., Tensors]:
    return random_tensors


@pytest.fixture
def schemes() -> dict[str, Callable[[Tensors], Tensors]]:
    return {"a": to_scheme_a, "a without model.": dict, "b": to_scheme_b}


@pytest.fixture
def golden_names() -> Callable[[str], list[dict[str, Any]]]:
    """From "md2" or "md3" to the stored reference's two names of every tensor."""
    folder = Path(__file__).parents[2] / "data/goldens"

    def names(model: str) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = json.loads(
            (folder / model / "tensor_names.json").read_text()
        )["tensors"]
        return entries

    return names
