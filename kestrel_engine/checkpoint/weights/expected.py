"""The tensors that an architecture needs: their canonical names and shapes, computed from the ModelConfig.

Canonical names are the hub's names (moondream.md section 2.2) without the leading ``model.``.
"""

from __future__ import annotations

from ...types.model_config import ModelConfig, RegionConfig, TextConfig, VisionConfig

OPTIONAL = frozenset({"region.ln.weight", "region.ln.bias"})
"""Tensors that a checkpoint may lack. Without them, the region heads read the hidden state as it is."""

Shapes = dict[str, tuple[int, ...]]


def expected_tensors(config: ModelConfig) -> Shapes:
    """Returns the shape of every tensor by canonical name, including those `OPTIONAL` ones that the model may have."""
    return {**text_tensors(config.text), **_vision(config.vision), **_region(config.region)}


def _linear(name: str, rows: int, columns: int) -> Shapes:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def text_tensors(text: TextConfig) -> Shapes:
    """Returns the shape of every tensor of the text decoder by canonical name."""
    out: Shapes = {"text.wte": (text.vocab_size, text.dim)}
    for layer in range(text.n_layers):
        block = f"text.blocks.{layer}"
        out |= _norm(f"{block}.ln", text.dim)
        out |= _linear(f"{block}.attn.qkv", 3 * text.dim, text.dim)
        out |= _linear(f"{block}.attn.proj", text.dim, text.dim)
        if text.tau_attn:
            out[f"{block}.attn.tau.wq"] = (text.n_heads, 3 * text.dim)
            out[f"{block}.attn.tau.wv"] = (text.n_heads, 3 * text.dim)
            out[f"{block}.attn.tau.alpha"] = (text.n_heads,)
        moe = text.moe
        if moe is not None and layer >= moe.start_layer:
            out |= _linear(f"{block}.mlp.router", moe.num_experts, text.dim)
            out[f"{block}.mlp.fc1.weight"] = (moe.num_experts, 2 * moe.expert_inner_dim, text.dim)
            out[f"{block}.mlp.fc2.weight"] = (moe.num_experts, text.dim, moe.expert_inner_dim)
        else:
            out |= _linear(f"{block}.mlp.fc1", text.ff_dim, text.dim)
            out |= _linear(f"{block}.mlp.fc2", text.dim, text.ff_dim)
    out |= _norm("text.post_ln", text.dim)
    out |= _linear("text.lm_head", text.vocab_size, text.dim)
    return out


def _vision(vision: VisionConfig) -> Shapes:
    width = vision.enc_dim
    out = _linear("vision.patch_emb", width, vision.in_channels * vision.enc_patch_size**2)
    out["vision.pos_emb"] = (1, vision.grid**2, width)
    for layer in range(vision.enc_n_layers):
        block = f"vision.blocks.{layer}"
        out |= _norm(f"{block}.ln1", width) | _norm(f"{block}.ln2", width)
        out |= _linear(f"{block}.attn.qkv", 3 * width, width)
        out |= _linear(f"{block}.attn.proj", width, width)
        out |= _linear(f"{block}.mlp.fc1", vision.enc_ff_dim, width)
        out |= _linear(f"{block}.mlp.fc2", width, vision.enc_ff_dim)
    out |= _norm("vision.post_ln", width)
    # The projector reads the features of the overview crop and those of the stitched tiles: twice the width.
    out |= _linear("vision.proj_mlp.fc1", vision.proj_inner_dim, 2 * width)
    out |= _linear("vision.proj_mlp.fc2", vision.proj_out_dim, vision.proj_inner_dim)
    return out


def _region(region: RegionConfig) -> Shapes:
    out: Shapes = {
        # Fourier features: a sine and a cosine for each frequency.
        "region.coord_features": (1, region.coord_feat_dim // 2),
        "region.size_features": (2, region.size_feat_dim // 2),
    }
    out |= _linear("region.coord_encoder", region.dim, region.coord_feat_dim)
    out |= _linear("region.size_encoder", region.dim, region.size_feat_dim)
    for name, bins in (("coord", region.coord_out_dim), ("size", region.size_out_dim)):
        if region.decoder == "linear":
            out |= _linear(f"region.{name}_decoder", bins, region.dim)
        else:
            out |= _linear(f"region.{name}_decoder.fc1", region.inner_dim, region.dim)
            out |= _linear(f"region.{name}_decoder.fc2", bins, region.inner_dim)
    if region.decoder == "linear":
        out |= _norm("region.ln", region.dim)
    return out
