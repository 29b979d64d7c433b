"""Weights in 4 bits: groups of numbers that share a scale and a zero point, two numbers in a byte.

A weight of n numbers is n / g groups of g: W = (q - zero_point) * scale, q in 0..15 (moondream.md section 2.5). A row
of packed bytes holds two groups. Moondream 2's release has the high nibbles of all rows first, then the low ones. For
Moondream 3, public loaders disagree: one takes the two groups of a row one after the other. So `find_order` decides by
the numbers: the weights of a group have a mean near 0, so its q have a mean near its own zero point.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from enum import Enum
from typing import TypeAlias

import torch

from ...errors import CheckpointError
from ...models.weight_only import to_groups

logger = logging.getLogger(__name__)

CLEAR = 0.5
"""The best order is clear if its error is at most this share of the second best one's."""

Packed: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The bytes [..., n / 2g, g] uint8, and the scales and zero points of the groups [..., n / g, 1]."""


class Order(Enum):
    """The place of the two groups in a row of bytes."""

    HALVES = "halves, high nibbles first"
    HALVES_LOW_FIRST = "halves, low nibbles first"
    INTERLEAVED = "interleaved, high nibble first"
    INTERLEAVED_LOW_FIRST = "interleaved, low nibble first"


def unpack(packed: torch.Tensor, order: Order) -> torch.Tensor:
    """Returns the groups [..., n / g, g] uint8 of ``packed`` [..., n / 2g, g] uint8."""
    first, second = packed >> 4, packed & 15
    if order in (Order.HALVES_LOW_FIRST, Order.INTERLEAVED_LOW_FIRST):
        first, second = second, first
    if order in (Order.INTERLEAVED, Order.INTERLEAVED_LOW_FIRST):
        return torch.stack([first, second], dim=-2).flatten(-3, -2)
    return torch.cat([first, second], dim=-2)


def dequantise(
    weight: Packed, shape: tuple[int, ...], order: Order, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Returns the real values of ``weight`` in ``shape``, as ``dtype`` on ``device``, converted a matrix at a time."""
    packed, scale, zero = weight
    groups, size = scale.shape[-2], packed.shape[-1]
    out = torch.empty(shape, dtype=dtype, device=device)
    flat = out.view(-1, groups, size)
    scale, zero = (
        x.reshape(-1, groups, 1).to(device=device, dtype=torch.float32) for x in (scale, zero)
    )
    for part, rows in enumerate(packed.reshape(-1, *packed.shape[-2:])):
        q = unpack(rows.to(device), order).float()
        flat[part].copy_(q.sub_(zero[part]).mul_(scale[part]))
    return out


def keep(
    weight: Packed, shape: tuple[int, ...], order: Order, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``weight`` of ``shape`` [..., N, K], still in 4 bits, and its scales, as `weight_only` has them. Converts
    a matrix at a time, unless the file has one for all experts. K is a multiple of two groups."""
    packed, scale, zero = weight
    numbers = torch.empty(*shape[:-1], shape[-1] // 2, dtype=torch.uint8, device=device)
    parts = packed.reshape(-1, *packed.shape[-2:])
    places = numbers.view(len(parts), -1, shape[-1] // 2)
    own = (x.reshape(len(parts), -1, 1).to(device) for x in (scale, zero))
    scales: list[torch.Tensor] = []
    for rows, place, s, z in zip(parts, places, *own, strict=True):
        q = unpack(rows.to(device), order)
        made, pairs = to_groups(q, s, z, (len(place), shape[-1]))
        place.copy_(made)
        scales.append(pairs)
    return numbers, torch.stack(scales).view(*shape[:-1], -1, 2)


def ends(scale: torch.Tensor, zero: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the values of 0 and of 15 in each group, as ``dtype``. If they are finite, all values of a group are."""
    scale, zero = scale.float(), zero.float()
    return torch.stack([-zero * scale, (15 - zero) * scale]).to(dtype)


def find_order(samples: Iterable[Packed], *, default: Order | None) -> Order:
    """Returns the order under which the groups of ``samples`` agree best with their zero points. ``default``: for
    weights that don't show it, such as those with equal zero points. Raises CheckpointError if there is none.
    """
    errors = dict.fromkeys(Order, 0.0)
    for packed, _, zero in samples:
        for order in Order:
            means = unpack(packed, order).float().mean(-1, keepdim=True)
            errors[order] += float((means - zero.float()).square().sum())
    ranked = sorted(errors, key=errors.__getitem__)
    best, second = ranked[:2]
    if errors[best] <= CLEAR * errors[second]:
        logger.info(
            "4-bit weights: %s (squared distance of the groups' means from their zero points %.3g, next %.3g)",
            best.value,
            errors[best],
            errors[second],
        )
        return best
    if default is None:
        raise CheckpointError(
            "the weights do not show the order of their 4-bit numbers: "
            + ", ".join(f"{order.value}: {errors[order]:.3g}" for order in ranked)
        )
    logger.warning(
        "the weights do not show the order of their 4-bit numbers; assumed: %s", default.value
    )
    return default
