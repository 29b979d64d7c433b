"""A checkpoint's scales for an FP8 KV cache: which layers have scales, and their checked values.

A layer may have one scale for its keys and one for its values, a single number each. A stored value times its scale is
the real value (moondream.md section 2.4). A checkpoint is made for an FP8 KV cache only if all layers have both scales.
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
"""The smallest valid scale. The reciprocal of a smaller one, by which kernels multiply, exceeds float32."""
_FALLBACK = "; --precision bfloat16 does not use them"


def is_complete(plan: CheckpointPlan, n_layers: int) -> bool:
    """Returns whether all layers have both scales. Logs a warning if only some of the scales are there."""
    if some := incomplete(plan, n_layers):
        logger.warning(
            "%s; the KV cache has the model's dtype, unless --precision is fp8 or fp8-kv", some
        )
    return all(name in plan.kv_scales for name in _names(n_layers))


def incomplete(plan: CheckpointPlan, n_layers: int) -> str:
    """Returns a description of the scales if some, but not all, of them are there; else an empty text."""
    names = _names(n_layers)
    missing = [name for name in names if name not in plan.kv_scales]
    if not missing or len(missing) == len(names):
        return ""
    found = len(names) - len(missing)
    return f"the checkpoint has {found} of {len(names)} scales of an FP8 KV cache, not {missing[0]}"


def read(
    plan: CheckpointPlan, files: tuple[Path, ...], n_layers: int
) -> tuple[tuple[float, float], ...]:
    """Returns each layer's scale of keys and scale of values. Logs a warning if only some of them are missing. A
    missing scale is 1: the range of float8_e4m3fn, 2**18, covers keys and values. Raises CheckpointError, which names
    all scales that are not one positive finite number, and for files that can't be read."""
    from .loader import read_tensors

    if some := incomplete(plan, n_layers):
        logger.warning("%s; missing scales are taken as 1", some)
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
