"""A checkpoint's scales of the KV cache in FP8: which layers have them, and their values, checked.

Each layer may have one for its keys and one for its values, a single number each: what is stored times it is the real
value (moondream.md section 2.4). A checkpoint counts as made for such a cache only if all layers have both.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path

from ...errors import CheckpointError
from .names import kv_scale_name
from .plan import CheckpointPlan

logger = logging.getLogger(__name__)

SMALLEST = 2.0**-126
"""Below it, the reciprocal that kernels multiply by isn't a float32 any more."""
_FALLBACK = "; --kv-cache-dtype model goes without them"


def is_complete(plan: CheckpointPlan, n_layers: int) -> bool:
    """Whether all layers have both scales. Says so in the log where only some have."""
    if some := incomplete(plan, n_layers):
        logger.warning(
            "%s: the KV cache keeps the model's type, unless --kv-cache-dtype is fp8", some
        )
    return all(name in plan.kv_scales for name in _names(n_layers))


def incomplete(plan: CheckpointPlan, n_layers: int) -> str:
    """What there is if only some of the layers' scales are; else nothing."""
    names = _names(n_layers)
    missing = [name for name in names if name not in plan.kv_scales]
    if not missing or len(missing) == len(names):
        return ""
    there = len(names) - len(missing)
    return f"{there} of {len(names)} scales of an FP8 KV cache are there, {missing[0]} isn't"


def read(
    plan: CheckpointPlan, files: tuple[Path, ...], n_layers: int
) -> tuple[tuple[float, float], ...]:
    """Each layer's scales of keys and values; 1 where the checkpoint has none, which the log tells if it has others:
    eight-bit floats have a range of 2**18 of their own, which keys and values are in without any scale.

    Raises CheckpointError, which names them all, for scales that aren't one positive finite number, and for files that
    can't be read.
    """
    from .loader import read_tensors

    if some := incomplete(plan, n_layers):
        logger.warning("%s: 1 stands for what is missing", some)
    names = [name for name in _names(n_layers) if name in plan.kv_scales]
    stored = [plan.kv_scales[name] for name in names]
    wrong, values = [], {}
    for name, tensor, found in zip(names, stored, read_tensors(files, stored), strict=True):
        if found.numel() != 1 or not tensor.is_float:
            wrong.append(f"{tensor.name} {list(tensor.shape)} of {tensor.dtype}")
            continue
        value = float(found.float().item())
        if not math.isfinite(value) or value < SMALLEST:
            wrong.append(f"{tensor.name} = {value:g}")
        values[name] = value
    if wrong:
        more = f" and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise CheckpointError(
            "scales of the KV cache must be one positive finite number each, not "
            f"{', '.join(wrong[:10])}{more}{_FALLBACK}"
        )
    return tuple(
        (
            values.get(kv_scale_name(layer, "k"), 1.0),
            values.get(kv_scale_name(layer, "v"), 1.0),
        )
        for layer in range(n_layers)
    )


def _names(n_layers: int) -> list[str]:
    return [kv_scale_name(layer, side) for layer in range(n_layers) for side in "kv"]
