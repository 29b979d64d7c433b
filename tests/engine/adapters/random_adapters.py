"""Random adapters for small models, in memory and in files, and the weights with an adapter merged into them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kestrel_engine.adapters.targets import targets
from kestrel_engine.models.low_rank import Changes, LowRank
from kestrel_engine.types.adapter import INPUT, Adapter
from kestrel_engine.types.model_config import ModelConfig


def random_tensors(
    model: ModelConfig,
    seed: int,
    rank: int = 4,
    *,
    size: float = 1.0,
    only: str = "",
    vision: bool = False,
) -> dict[str, Tensor]:
    """A and B of the modules whose name contains ``only``, by canonical name with ``.A`` and ``.B``: those of the text
    decoder, and with ``vision`` those of the tower, too. Their product has about ``size`` times the spread of a weight.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in targets(model).items():
        if not vision and name.startswith("vision."):
            continue
        if only in name and not name.endswith(INPUT):
            *experts, rows, columns = shape
            a, b = (*experts, rank, columns), (*experts, rows, rank)
            tensors[f"{name}.A"] = torch.randn(a, generator=generator) * columns**-0.5
            tensors[f"{name}.B"] = torch.randn(b, generator=generator) * size * rank**-0.5
    return tensors


def changes(tensors: Mapping[str, Tensor], scale: float = 1.0) -> Changes:
    modules = dict.fromkeys(name[:-2] for name in tensors)
    return {m: LowRank(tensors[f"{m}.A"], tensors[f"{m}.B"] * scale) for m in modules}


def adapter(name: str, tensors: Mapping[str, Tensor]) -> Adapter:
    return Adapter(name, f"key of {name}", changes(tensors), 0)


def merged(
    weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], scale: float = 1.0
) -> dict[str, Tensor]:
    """The model's weights with an adapter added, computed in float64."""
    made = dict(weights)
    for module in dict.fromkeys(name[:-2] for name in tensors):
        delta = tensors[f"{module}.B"].double() @ tensors[f"{module}.A"].double() * scale
        weight = weights[f"{module}.weight"]
        made[f"{module}.weight"] = (weight.double() + delta).to(weight.dtype)
    return made
