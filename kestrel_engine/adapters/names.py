"""Maps every form of an adapter's tensor names to a module's canonical name and a side, A or B.

Four forms (moondream.md section 11): Moondream's fine-tunes (``text_lora.dense.0.up_a``, ``text_lora.moe.0.down_b``),
Moondream's variants of Moondream 2 (``text_model.transformer.h.0.mlp.fc1.parametrizations.weight.0.A``), PEFT's names
(``base_model.model.text.blocks.0.mlp.fc1.lora_A.weight``), and a module's canonical name with ``.A`` and ``.B``.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from ..checkpoint.weights.names import TensorPart, map_names
from ..errors import CheckpointError
from ..types.adapter import INPUT
from ..types.model_config import TextConfig

Side = Literal["a", "b"]


class Target(NamedTuple):
    """What a stored tensor is: one side of the change of ``module``."""

    module: str
    side: Side


_KESTREL = re.compile(r"^_?text(?:_lora)?\.(dense|moe)\.(\d+)\.(up|down)_([ab])$")
_SIDED = re.compile(
    r"^(.+?)(?:\.parametrizations\.weight\.0)?\.(?:lora_)?([abAB])(?:\.default)?(?:\.weight)?$"
)
_WRAPPERS = ("base_model.model.", "module.")
_VARIANT_PROJ = ".mixer.out_proj"


def target_of(stored: str, text: TextConfig) -> Target | None:
    """Returns what a stored name means for a model with the text decoder ``text``; None if it has no known form."""
    name = stored.replace("._orig_mod", "").removeprefix("_orig_mod.")
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper)
    if kestrel := _KESTREL.match(name):
        kind, number, way, side = kestrel.groups()
        first = text.moe.start_layer if text.moe is not None and kind == "moe" else 0
        module = f"text.blocks.{first + int(number)}.mlp.{'fc1' if way == 'up' else 'fc2'}"
        return Target(module, "a" if side == "a" else "b")
    sided = _SIDED.match(name)
    if sided is None:
        return None
    module, side = sided[1], sided[2].lower()
    try:
        found = map_names([f"{module}.weight"]).tensors
    except CheckpointError:
        return None
    canonical, source = next(iter(found.items()), ("", None))
    if source is None or source.part is not TensorPart.WHOLE or len(found) != 1:
        return None
    # Moondream applies this change of its variants to the block's normalised input.
    place = INPUT if _VARIANT_PROJ in module else ""
    return Target(canonical.removesuffix(".weight") + place, "a" if side == "a" else "b")
