"""LoRA: an adapter of the text MLPs that is made in this process, for the whole engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..checkpoint.weights.expected import Shapes
from ..errors import ConfigError
from ..types.adapter import Adapter
from ..types.model_config import TextConfig
from .files import Packer
from .targets import MAX_RANK, text_targets

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_NAME = "the engine's LoRA"
"""No file has this name or content hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLoRAConfig:
    """``rank``: of dense layers, from 1 to 128. Experts have the rank divided by the number of experts of a token.
    ``alpha``: the change is multiplied by alpha / rank; None stands for the factor 1. Raises ConfigError."""

    rank: int = 16
    alpha: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not 1 <= self.rank <= MAX_RANK:
            raise ConfigError("rank", self.rank, f"must be a whole number from 1 to {MAX_RANK}")
        if self.alpha is not None and not 0 < self.alpha < 1e6:
            raise ConfigError("alpha", self.alpha, "must be a number above 0 and below 1e6")

    @property
    def scale(self) -> float:
        return 1.0 if self.alpha is None else self.alpha / self.rank


@dataclass(frozen=True, slots=True, eq=False)
class LoRA:
    """A and B of each MLP's layers. ``tensors``: by canonical name with ``.A`` and ``.B``. An engine copies them."""

    config: TextLoRAConfig
    tensors: dict[str, Tensor]

    @classmethod
    def create(
        cls,
        text_config: TextConfig,
        *,
        lora_config: TextLoRAConfig,
        dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> LoRA:
        """Returns an adapter that changes nothing yet: A is random with a spread of 1 / sqrt(inputs), and B is 0.
        ``dtype``: default float32. Raises ConfigError if the model has experts and the rank is not divisible by the
        number of experts of a token."""
        tensors = first_sides(_shapes(text_config, lora_config), seed)
        return cls(lora_config, {name: tensor.to(dtype) for name, tensor in tensors.items()})

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> LoRA:
        """Returns the adapter with its tensors on ``device``. The engine does not need this: it has its own copy."""
        return LoRA(
            self.config, {n: tensor.to(device, dtype) for n, tensor in self.tensors.items()}
        )

    def adapter(
        self,
        text: TextConfig,
        dtype: torch.dtype,
        device: torch.device,
        packer: Packer | None = None,
    ) -> Adapter:
        """Returns the adapter for ``text``. ``packer``: as of `files.read`. Raises ConfigError if it does not fit."""
        import torch

        from ..models.low_rank import LowRank

        shapes = _shapes(text, self.config)
        for name in {**shapes, **self.tensors}:
            shape = tuple(self.tensors[name].shape) if name in self.tensors else "missing"
            expected = shapes.get(name, "none")
            if shape != expected:
                raise ConfigError("lora", f"{name} {shape}", f"the model needs {expected}")
            if not torch.isfinite(self.tensors[name]).all():
                raise ConfigError("lora", name, "holds values that are not finite")
        sides = {
            name: (tensor * (self.config.scale if name.endswith(".B") else 1.0))
            .detach()
            .to(device if packer is None else "cpu", dtype, copy=True)
            for name, tensor in self.tensors.items()
        }
        modules = dict.fromkeys(name[:-2] for name in sides)
        weights = {
            module: LowRank(sides[f"{module}.A"], sides[f"{module}.B"]) for module in modules
        }
        if packer is not None:
            ranks = {module: change.a.shape[-2] for module, change in weights.items()}
            if (refusal := packer.refusal(ranks)) is not None:
                raise ConfigError("lora", "given", refusal)
            slabs = {kind: each.to(device) for kind, each in packer.packed(weights).items()}
            return Adapter(_NAME, _NAME, {}, sum(each.nbytes for each in slabs.values()), slabs)
        return Adapter(_NAME, _NAME, weights, sum(side.nbytes for side in sides.values()))


def _shapes(text: TextConfig, config: TextLoRAConfig) -> Shapes:
    """The shape of each tensor. Raises ConfigError."""
    modules = {name: shape for name, shape in text_targets(text).items() if ".mlp." in name}
    return side_shapes(modules, text, config.rank)


def side_shapes(modules: Shapes, text: TextConfig, rank: int) -> Shapes:
    """The shapes of A and B by each module's name with ``.A`` and ``.B``. ``modules``: the shapes of their weights.
    Experts have the rank divided by the number of experts of a token. Raises ConfigError if it is not divisible."""
    shapes: Shapes = {}
    for module, (*experts, rows, columns) in modules.items():
        own = rank
        if experts and text.moe is not None:
            own, rest = divmod(rank, text.moe.experts_per_token)
            if rest:
                limit = f"must be divisible by {text.moe.experts_per_token}, the experts of a token"
                raise ConfigError("rank", rank, limit)
        shapes[f"{module}.A"] = (*experts, own, columns)
        shapes[f"{module}.B"] = (*experts, rows, own)
    return shapes


def first_sides(shapes: Shapes, seed: int) -> dict[str, Tensor]:
    """Float32 tensors of ``shapes`` (`side_shapes`) that change nothing yet: A is random with a spread of
    1 / sqrt(inputs), and B is 0."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.zeros(shape)
        if name.endswith(".B")
        else torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }
