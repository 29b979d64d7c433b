"""The layers that all parts of Moondream use. They hold references to checkpoint tensors and copy none.

``tensors`` is the checkpoint: a dict from canonical names without the leading ``model.`` (moondream.md section 2.2) to
tensors in the dtype and on the device of the computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch.nn.functional as F
from torch import Tensor

from .compiled import many_rows
from .low_rank import Adapters
from .weight_only import product, scale_of

Tensors: TypeAlias = Mapping[str, Tensor]

LAYER_NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Linear:
    """``x @ weight.T + bias``. ``weight``: [out, in]. ``bias``: [out] or None. ``name``: the module's canonical name,
    by which adapters change it. ``scale``: the scales of a weight in 4 or 8 bits (`weight_only`). ``keeps_rows``: many
    rows are not rounded to int8 for a weight in int8."""

    weight: Tensor
    bias: Tensor | None = None
    name: str = ""
    scale: Tensor | None = None
    keeps_rows: bool = False

    @classmethod
    def load(cls, tensors: Tensors, name: str, *, keeps_rows: bool = False) -> Linear:
        weight, scale = f"{name}.weight", tensors.get(scale_of(f"{name}.weight"))
        return cls(tensors[weight], tensors[f"{name}.bias"], name, scale, keeps_rows)

    def __call__(self, x: Tensor, adapters: Adapters | None = None) -> Tensor:
        """``adapters``: those of the rows of ``x``."""
        y = product(x, self.weight, self.scale, self.bias, keeps_rows=self.keeps_rows)
        if adapters is not None:
            adapters.add_(self.name, x, y)
        return y


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Normalises the last dimension. For half-precision inputs, torch computes the statistics in float32."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def load(cls, tensors: Tensors, name: str) -> LayerNorm:
        return cls(tensors[f"{name}.weight"], tensors[f"{name}.bias"])

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, LAYER_NORM_EPS)


@dataclass(frozen=True, slots=True)
class Mlp:
    """``fc2(gelu_tanh(fc1(x)))``, in vision blocks, projector, dense text layers and Moondream 2's region decoders."""

    fc1: Linear
    fc2: Linear

    @classmethod
    def load(cls, tensors: Tensors, name: str) -> Mlp:
        return cls(Linear.load(tensors, f"{name}.fc1"), Linear.load(tensors, f"{name}.fc2"))

    def __call__(self, x: Tensor, adapters: Adapters | None = None) -> Tensor:
        return self.fc2(gelu_tanh(self.fc1(x, adapters)), adapters)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU, used by all MLPs."""
    y = many_rows.gelu(x)
    return F.gelu(x, approximate="tanh") if y is None else y


def gelu_erf(x: Tensor) -> Tensor:
    """The exact GELU, used by tau attention and by experts (moondream.md section 14)."""
    return F.gelu(x)
