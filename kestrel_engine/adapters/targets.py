"""The modules of a model that an adapter may change, with the shapes of their weights."""

from __future__ import annotations

import re

from ..checkpoint.weights.expected import Shapes, expected_tensors
from ..types.adapter import INPUT
from ..types.model_config import ModelConfig

MAX_RANK = 128

_TARGET = re.compile(
    r"^((?:text|vision)\.blocks\.\d+\.(?:attn\.(?:qkv|proj)|mlp\.fc[12])|vision\.proj_mlp\.fc[12])\.weight$"
)


def targets(model: ModelConfig) -> Shapes:
    """Returns the shape of each module's weight, (out, in) or (experts, out, in), by canonical name."""
    found = {
        match[1]: shape
        for name, shape in expected_tensors(model).items()
        if (match := _TARGET.match(name))
    }
    variants = {
        f"{name}{INPUT}": shape
        for name, shape in found.items()
        if name.startswith("text.") and name.endswith(".proj")
    }
    return found | variants
