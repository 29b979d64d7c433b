"""Maps every released form of a tensor's name to its canonical name. A file may mix both schemes.

Scheme A is the hub's naming, with or without ``model.``. Scheme B is the training code's naming (``text_model.``,
``vision_encoder.``, ``region_model.``), which also fuses the tau projections, stores Fourier features transposed and
contains FP8 scales (moondream.md sections 2.2 to 2.4).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from ...errors import CheckpointError
from ...types.model_config import Family


class TensorPart(Enum):
    """The part of a stored tensor that is the canonical tensor."""

    WHOLE = "whole"
    TRANSPOSED = "transposed"
    FIRST_ROWS = "first half of the rows"
    LAST_ROWS = "last half of the rows"
    INT4 = "4-bit numbers, which need scales and zero points"


@dataclass(frozen=True, slots=True)
class TensorSource:
    """The source of a canonical tensor: a stored name, and the part of that tensor."""

    stored: str
    part: TensorPart = TensorPart.WHOLE


@dataclass(frozen=True, slots=True)
class NameMap:
    """The names of a checkpoint. ``tensors``: the source of each canonical name. ``scales``: the stored name of the FP8
    scale of each canonical expert weight. ``kv_scales``: the stored name of each scale of an FP8 KV cache, by
    ``text.blocks.N.attn.k_scale`` and ``….v_scale``. ``groups``: the stored names of the scales and the zero points of
    each canonical 4-bit weight, by "scale" and "zero_point". ``ignored``: buffers that the model does not need.
    ``unknown``: names of no known scheme. ``prefix``: that of scheme A names in this checkpoint, for messages.
    """

    tensors: dict[str, TensorSource] = field(default_factory=dict)
    scales: dict[str, str] = field(default_factory=dict)
    kv_scales: dict[str, str] = field(default_factory=dict)
    groups: dict[str, dict[str, str]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    prefix: str = ""


_KV_SCALE = re.compile(
    r"^(?:text_model\.transformer\.h|text\.blocks)\.(\d+)\.(?:\w+\.)?kv_quantizer\.([kv])_scale$"
)
# The other buffers of a KV quantiser are not needed.
_IGNORED = re.compile(
    r"(^|\.)(freqs_cis|inv_freq|attn_mask|k_cache|v_cache|rotary_emb\.\w+|kv_quantizer\.\w+)$"
)
_SCALE = re.compile(
    r"^(?:text_model\.transformer\.h|text\.blocks)\.(\d+)\.(?:mlp\.)?moe_quant\.(up|down)_scale$"
)
_INT4 = re.compile(r"^((?:text|region)\..+\.weight)\.(packed|scale|zero_point)$")
_TAU_FUSED = re.compile(r"^text_model\.transformer\.h\.(\d+)\.tau_wqwv$")
_BLOCK_B = re.compile(r"^text_model\.transformer\.h\.(\d+)\.(.+)$")
_VISUAL = "vision_encoder.encoder.model.visual."
_VISION_BLOCK_B = re.compile(re.escape(_VISUAL) + r"blocks\.(\d+)\.(.+)\.(weight|bias)$")

_TEXT_LEAVES = {
    **{f"ln.{p}": f"ln.{p}" for p in ("weight", "bias")},
    **{f"mixer.Wqkv.{p}": f"attn.qkv.{p}" for p in ("weight", "bias")},
    **{f"mixer.out_proj.{p}": f"attn.proj.{p}" for p in ("weight", "bias")},
    **{f"mlp.{f}.{p}": f"mlp.{f}.{p}" for f in ("fc1", "fc2") for p in ("weight", "bias")},
    **{f"gate.{p}": f"mlp.router.{p}" for p in ("weight", "bias")},
    "mlp.experts.weight": "mlp.fc1.weight",
    "mlp.output_experts.weight": "mlp.fc2.weight",
    "tau_wq": "attn.tau.wq",
    "tau_wv": "attn.tau.wv",
    "tau_alpha": "attn.tau.alpha",
}
_VISION_LEAVES = {
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn.qkv",
    "attn.proj": "attn.proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
# Modules outside the blocks. Each has a weight and a bias.
_MODULES_B = {
    "text_model.lm_head.ln": "text.post_ln",
    "text_model.lm_head.linear": "text.lm_head",
    f"{_VISUAL}patch_embed.linear": "vision.patch_emb",
    f"{_VISUAL}norm": "vision.post_ln",
    "vision_encoder.projection.mlp.fc1": "vision.proj_mlp.fc1",
    "vision_encoder.projection.mlp.fc2": "vision.proj_mlp.fc2",
    "region_model.coordinate_encoder": "region.coord_encoder",
    "region_model.size_encoder": "region.size_encoder",
    "region_model.coordinate_head": "region.coord_decoder",
    "region_model.size_head": "region.size_decoder",
    "region_model.coordinate_decoder.fc1": "region.coord_decoder.fc1",
    "region_model.coordinate_decoder.fc2": "region.coord_decoder.fc2",
    "region_model.size_decoder.fc1": "region.size_decoder.fc1",
    "region_model.size_decoder.fc2": "region.size_decoder.fc2",
    "region_model.ln": "region.ln",
}
_PLAIN_B = {
    "text_model.transformer.embd.wte.weight": ("text.wte", TensorPart.WHOLE),
    f"{_VISUAL}pos_embed": ("vision.pos_emb", TensorPart.WHOLE),
    "region_model.coordinate_features.weight": ("region.coord_features", TensorPart.TRANSPOSED),
    "region_model.size_features.weight": ("region.size_features", TensorPart.TRANSPOSED),
}


def map_names(stored_names: Iterable[str]) -> NameMap:
    """Maps the names of a checkpoint. Raises CheckpointError if two stored names mean the same tensor."""
    tensors: dict[str, TensorSource] = {}
    scales: dict[str, str] = {}
    kv_scales: dict[str, str] = {}
    groups: dict[str, dict[str, str]] = {}
    ignored: list[str] = []
    unknown: list[str] = []
    clashes: list[str] = []
    prefix = ""
    for stored in stored_names:
        # torch.compile adds the name of its wrapper to the names of parameters.
        name = stored.replace("._orig_mod", "").removeprefix("_orig_mod.")
        if name.startswith("model.") and not name.startswith("model.text_model."):
            prefix = "model."
        name = name.removeprefix("model.")
        if scale := _KV_SCALE.match(name):
            target = kv_scale_name(int(scale[1]), scale[2])
            if target in kv_scales:
                clashes.append(f"{stored} and {kv_scales[target]}")
            kv_scales[target] = stored
            continue
        if _IGNORED.search(name):
            ignored.append(stored)
            continue
        if scale := _SCALE.match(name):
            leaf = "fc1" if scale[2] == "up" else "fc2"
            target = f"text.blocks.{scale[1]}.mlp.{leaf}.weight"
            if target in scales:
                clashes.append(f"{stored} and {scales[target]}")
            scales[target] = stored
            continue
        int4 = _INT4.match(name)
        if int4 and int4[2] != "packed":
            groups.setdefault(int4[1], {})[int4[2]] = stored
            continue
        found = [(int4[1], TensorPart.INT4)] if int4 else _canonical(name)
        if not found:
            unknown.append(stored)
        for canonical, part in found:
            if canonical in tensors:
                clashes.append(f"{stored} and {tensors[canonical].stored}")
            tensors[canonical] = TensorSource(stored, part)
    if clashes:
        raise CheckpointError(
            f"names that mean the same tensor: {'; '.join(clashes[:10])}"
            + (f" and {len(clashes) - 10} more" if len(clashes) > 10 else "")
        )
    return NameMap(tensors, scales, kv_scales, groups, tuple(ignored), tuple(unknown), prefix)


def kv_scale_name(layer: int, side: str) -> str:
    """Returns the canonical name of a layer's scale of keys ("k") or values ("v")."""
    return f"text.blocks.{layer}.attn.{side}_scale"


def scale_name(canonical: str) -> str:
    """Returns the usual stored name of the FP8 scale of an expert weight, for messages."""
    layer = canonical.split(".")[2]
    side = "up" if ".fc1." in canonical else "down"
    return f"text_model.transformer.h.{layer}.moe_quant.{side}_scale"


def detect_family(canonical: Iterable[str]) -> Family | None:
    """Returns the family that canonical names belong to, or None. Moondream 3 has experts, tau attention or linear
    region heads. Moondream 2 has region MLPs."""
    names = set(canonical)
    if "region.coord_decoder.weight" in names or any(
        name.endswith(".mlp.router.weight") or ".attn.tau." in name for name in names
    ):
        return "moondream3"
    if "region.coord_decoder.fc1.weight" in names:
        return "moondream2"
    return None


def _canonical(name: str) -> list[tuple[str, TensorPart]]:
    if name.startswith(("text.", "vision.", "region.")):
        return [(name, TensorPart.WHOLE)]
    if name in _PLAIN_B:
        return [_PLAIN_B[name]]
    if fused := _TAU_FUSED.match(name):
        tau = f"text.blocks.{fused[1]}.attn.tau"
        return [(f"{tau}.wq", TensorPart.FIRST_ROWS), (f"{tau}.wv", TensorPart.LAST_ROWS)]
    if (block := _BLOCK_B.match(name)) and block[2] in _TEXT_LEAVES:
        return [(f"text.blocks.{block[1]}.{_TEXT_LEAVES[block[2]]}", TensorPart.WHOLE)]
    if (block := _VISION_BLOCK_B.match(name)) and block[2] in _VISION_LEAVES:
        return [
            (f"vision.blocks.{block[1]}.{_VISION_LEAVES[block[2]]}.{block[3]}", TensorPart.WHOLE)
        ]
    module, _, leaf = name.rpartition(".")
    if module in _MODULES_B and leaf in ("weight", "bias"):
        return [(f"{_MODULES_B[module]}.{leaf}", TensorPart.WHOLE)]
    return []
