"""The parameters that are fitted: A and B of each layer that the adapter changes, in float32, and their file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...adapters.lora import first_sides, side_shapes
from ...adapters.targets import targets
from ...models.low_rank import LowRank
from ...types.adapter import INPUT
from ...types.model_config import ModelConfig
from ..settings import TeachingSettings
from .image_embeddings import NOTHING, PROJECTOR, TOWER, Changed

_LAYERS = {
    "mlp": r"text\..*\.mlp\.",
    "attention": r"text\..*\.attn\.",
    "all": r"text\.",
    "all+projector": r"text\.|vision\.proj_mlp\.",
    "all+vision": r"text\.|vision\.",
}
_PROJECTOR, _TOWER = "vision.proj_mlp.", "vision.blocks."
PROJECTOR_RATE = 2.0
"""Times the learning rate of the other layers. What tells new objects from known ones is in the tower's features, and
the projector drops a part of it, so the decoder cannot learn it before the projector does (docs/use/teaching.md)."""


@dataclass(frozen=True, slots=True, eq=False)
class FittedAdapter:
    """The adapter of all tokens of a pass, with gradients. ``changes``: by module; a list has one for each expert."""

    changes: Mapping[str, LowRank | list[LowRank]]

    def of(self, tokens: Tensor) -> FittedAdapter:
        """As ``TextAdapters.of``."""
        return self

    def add_(self, module: str, x: Tensor, y: Tensor) -> None:
        """As ``Adapters.add_``."""
        change = self.changes.get(module)
        if change is not None:
            assert isinstance(change, LowRank), module
            y.add_(change(x))

    def add_expert_(self, module: str, index: int, x: Tensor, y: Tensor) -> None:
        """As ``TextAdapters.add_expert_``."""
        change = self.changes.get(module)
        if change is not None:
            assert isinstance(change, list), module
            y.add_(change[index](x))


class Parameters:
    """A is random with a spread of 1 / sqrt(inputs), and B is 0, so that nothing changes at first. Experts have the
    rank divided by the number of experts of a token."""

    def __init__(
        self, model: ModelConfig, settings: TeachingSettings, device: torch.device | str = "cpu"
    ) -> None:
        """Raises ConfigError if the rank is not divisible by the number of experts of a token."""
        self._rank, self._alpha = settings.rank, settings.alpha or float(settings.rank)
        modules = {
            name: shape
            for name, shape in targets(model).items()
            if re.match(_LAYERS[settings.layers], name) and not name.endswith(INPUT)
        }
        sides = first_sides(side_shapes(modules, model.text, settings.rank), settings.seed)
        self.sides = {name: side.to(device).requires_grad_() for name, side in sides.items()}
        """By the module's canonical name with ``.A`` and ``.B``."""

    @property
    def changed(self) -> Changed:
        """What the adapter changes of images first, as ImageEmbeddings counts it."""
        if any(name.startswith(_TOWER) for name in self.sides):
            return TOWER
        return PROJECTOR if any(name.startswith("vision.") for name in self.sides) else NOTHING

    @property
    def tensors(self) -> list[Tensor]:
        return list(self.sides.values())

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameters for an optimiser. ``factor``: multiplies their learning rate."""
        projector = [side for name, side in self.sides.items() if name.startswith(_PROJECTOR)]
        others = [side for name, side in self.sides.items() if not name.startswith(_PROJECTOR)]
        both = {"params": others, "factor": 1.0}, {"params": projector, "factor": PROJECTOR_RATE}
        return [group for group in both if group["params"]]

    def adapter(self, dtype: torch.dtype) -> FittedAdapter:
        """The adapter for a pass in ``dtype``. Gradients reach the parameters."""
        scale = self._alpha / self._rank
        changes: dict[str, LowRank | list[LowRank]] = {}
        for module in dict.fromkeys(name[:-2] for name in self.sides):
            a = self.sides[f"{module}.A"].to(dtype)
            b = (self.sides[f"{module}.B"] * scale).to(dtype)
            if a.dim() == 2:
                changes[module] = LowRank(a, b)
            else:
                # The gradient of an index would be as large as all experts together, for each of them.
                changes[module] = [
                    LowRank(*sides) for sides in zip(a.unbind(), b.unbind(), strict=True)
                ]
        return FittedAdapter(changes)

    def state(self) -> dict[str, Tensor]:
        """A copy of all values."""
        return {name: side.detach().clone() for name, side in self.sides.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, side in self.sides.items():
                side.copy_(state[name])

    def write(self, file: Path, described: Mapping[str, str]) -> None:
        """Writes the file of the adapter, in our own names. ``described``: more metadata."""
        from safetensors.torch import save_file

        stored = {name: side.detach().cpu().contiguous() for name, side in self.sides.items()}
        metadata = {**described, "alpha": f"{self._alpha:g}", "rank": str(self._rank)}
        save_file(stored, file, metadata=metadata)
