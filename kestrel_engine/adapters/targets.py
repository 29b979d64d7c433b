"""The modules of a model that an adapter may change, with the shapes of their weights."""

from __future__ import annotations

import re

from ..checkpoint.weights.expected import Shapes, expected_tensors, text_tensors
from ..types.adapter import INPUT
from ..types.model_config import ModelConfig, TextConfig

MAX_RANK = 128

_TARGET = re.compile(
    r"^((?:text|vision)\.blocks\.\d+\.(?:attn\.(?:qkv|proj)|mlp\.fc[12])|vision\.proj_mlp\.fc[12])\.weight$"
)


def targets(model: ModelConfig) -> Shapes:
    """Returns the shape of each module's weight, (out, in) or (experts, out, in), by canonical name."""
    found = _linear_layers(expected_tensors(model))
    variants = {
        f"{name}{INPUT}": shape
        for name, shape in found.items()
        if name.startswith("text.") and name.endswith(".proj")
    }
    return found | variants


def text_targets(text: TextConfig) -> Shapes:
    """As ``targets``, for the linear layers of the text decoder."""
    return _linear_layers(text_tensors(text))


def _linear_layers(tensors: Shapes) -> Shapes:
    return {m[1]: shape for name, shape in tensors.items() if (m := _TARGET.match(name))}
