"""Which weights become narrower while they are loaded, and the bytes that they take then.

``narrow`` is one of: wide (all weights in the model's dtype), stored (4-bit weights stay as they are), int4 (the
linears of text blocks are rounded to 4 bits, and on a CPU the others to 8) and int8 (all linears, on a CPU).
"""

from __future__ import annotations

import re
from math import prod

import torch

from ...models.weight_only import GROUP, round_rows, round_to_groups, scale_of

_AT_ONCE = 1 << 23
"""Numbers that are rounded together. Their copies in float32 take 100 MB."""
_BLOCK = re.compile(r"text\.blocks\.\d+\.(attn\.(qkv|proj)|mlp\.fc[12])\.weight")
_OTHERS = re.compile(r"(text\.lm_head|vision\.(blocks\.\d+\.\w+\.\w+|proj_mlp\.fc[12]))\.weight")


def may_stay(name: str, shape: tuple[int, ...], group: int) -> bool:
    """Whether a 4-bit weight of ``shape`` [..., N, K] in groups of ``group`` has a place in products. The region's
    small heads have kernels for wide weights."""
    power = group >= 16 and group & (group - 1) == 0
    return _BLOCK.fullmatch(name) is not None and power and shape[-1] % (2 * group) == 0


def form_of(
    name: str, shape: tuple[int, ...], narrow: str, device: torch.device
) -> torch.dtype | None:
    """Returns the dtype to which a wide weight is rounded, uint8 for 4 bits; None to leave it."""
    if narrow not in ("int4", "int8") or len(shape) < 2:
        return None
    if narrow == "int4" and may_stay(name, shape, GROUP):
        return torch.uint8
    fits = shape[-2] % 4 == 0 and shape[-1] % 16 == 0
    if device.type == "cpu" and fits and (_BLOCK.fullmatch(name) or _OTHERS.fullmatch(name)):
        return torch.int8
    return None


def rounded_bytes(shape: tuple[int, ...], form: torch.dtype) -> int:
    """Returns the bytes of a weight of ``shape`` in ``form``, with its scales in bfloat16."""
    if form == torch.int8:
        return prod(shape) + 2 * prod(shape[:-1])
    return prod(shape) // 2 + 4 * (prod(shape) // GROUP)


def rounded(name: str, weight: torch.Tensor, form: torch.dtype) -> dict[str, torch.Tensor]:
    """Rounds ``weight`` [..., N, K], some rows at a time. Returns it and its scales by canonical names."""
    rounding = round_rows if form == torch.int8 else round_to_groups
    rows = weight.view(-1, weight.shape[-1])
    some = torch.split(rows, max(1, _AT_ONCE // weight.shape[-1]))
    numbers, scales = map(torch.cat, zip(*map(rounding, some), strict=True))
    outer = weight.shape[:-1]
    return {
        name: numbers.view(*outer, -1),
        scale_of(name): scales.view(*outer, *scales.shape[1:]),
    }
