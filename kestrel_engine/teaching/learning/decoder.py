"""The text decoder as a function with gradients: the layers of models/text.py, without their operations in place.

Its results equal those of the served decoder up to rounding; tests/engine/teaching compares them.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...models.low_rank import TextAdapters
from ...models.moondream import Moondream
from ...models.rope import Rotation
from ...models.text import Placement, TextBlock
from ...types.adapter import INPUT
from .packing import Batch

Heads: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, [rows, heads, positions, head_dim] each."""


def hidden(
    model: Moondream,
    images: Tensor,
    batch: Batch,
    adapters: TextAdapters | None,
    *,
    places: Tensor | None = None,
    checkpointing: bool = False,
) -> Tensor:
    """Returns the residual stream before ``post_ln`` at the text positions, [rows * length, dim].

    ``images``: the embedding of each row's image, [rows, image positions, dim]. ``places``: the image positions that
    the pass computes, [rows, number] int64; None for all.
    """
    rows, _, dim = batch.text.shape
    bos = model.text.embed(torch.tensor([model.config.ids.bos_id], device=model.device))
    if places is not None:
        images = images.gather(1, places.unsqueeze(-1).expand(-1, -1, dim))
    x = torch.cat([bos.expand(rows, 1, dim), images, batch.text], dim=1)
    before = torch.arange(model.config.image_prefix, device=model.device).expand(rows, -1)
    if places is not None:
        before = torch.cat([before[:, :1], places + 1], dim=1)
    placement = model.text.place(torch.cat([before, batch.positions], dim=1).flatten())
    mask = _mask(batch.lessons, before.shape[1])
    flat = x.flatten(0, 1)
    *blocks, last = model.text.blocks
    for block, through in (*((block, _through) for block in blocks), (last, _through_last)):
        if checkpointing:
            flat = checkpoint(through, block, flat, placement, mask, adapters, use_reentrant=False)
        else:
            flat = through(block, flat, placement, mask, adapters)
    return flat


def _mask(lessons: Tensor, prefix: int) -> Tensor:
    """Which keys each text position attends to, [rows, 1, length, prefix + length] bool: BOS and the image, and the
    tokens of its own lesson up to itself."""
    rows, length = lessons.shape
    same = lessons[:, :, None] == lessons[:, None, :]
    seen = same & same.new_ones(length, length).tril()
    return torch.cat([same.new_ones(rows, length, prefix), seen], dim=2)[:, None]


def _through(
    block: TextBlock,
    x: Tensor,
    placement: Placement,
    mask: Tensor,
    adapters: TextAdapters | None,
) -> Tensor:
    """As ``TextBlock.__call__`` for ``x`` [rows * positions, dim]."""
    u = block.ln(x)
    heads = _heads(block, u, placement, mask, adapters)
    attended = torch.cat([_of_prefix(heads, mask), _of_text(heads, mask)], dim=1).flatten(0, 1)
    return x + _projected(block, u, attended, adapters) + block.mlp(u, adapters)


def _through_last(
    block: TextBlock,
    x: Tensor,
    placement: Placement,
    mask: Tensor,
    adapters: TextAdapters | None,
) -> Tensor:
    """As ``_through``, at the text positions only: nothing reads the others behind the last block."""
    rows, _, length, positions = mask.shape
    u = block.ln(x)
    attended = _of_text(_heads(block, u, placement, mask, adapters), mask).flatten(0, 1)
    x, u = (each.view(rows, positions, -1)[:, -length:].flatten(0, 1) for each in (x, u))
    return x + _projected(block, u, attended, adapters) + block.mlp(u, adapters)


def _heads(
    block: TextBlock,
    u: Tensor,
    placement: Placement,
    mask: Tensor,
    adapters: TextAdapters | None,
) -> Heads:
    qkv = block.qkv(u, adapters)
    q, k, v = qkv.view(len(u), 3, block.n_heads, -1).unbind(1)
    if block.tau is not None:
        q_factors, v_factors = block.tau.factors(qkv, placement.log_position)
        # As in place: the product is rounded to the dtype of q.
        q = (q * q_factors.unsqueeze(-1)).to(q.dtype)
        v = (v * v_factors.unsqueeze(-1)).to(v.dtype)
    q, k = _rotated(q, placement.rotation), _rotated(k, placement.rotation)
    rows = len(mask)
    q, k, v = (each.reshape(rows, -1, *each.shape[1:]).transpose(1, 2) for each in (q, k, v))
    return q, k, v


def _of_prefix(heads: Heads, mask: Tensor) -> Tensor:
    """What the positions of BOS and the image attend to, each other, [rows, prefix, dim]."""
    prefix = mask.shape[-1] - mask.shape[-2]
    q, k, v = (each[:, :, :prefix] for each in heads)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _of_text(heads: Heads, mask: Tensor) -> Tensor:
    """What the text positions attend to, [rows, length, dim]."""
    q, k, v = heads
    q = q[:, :, -mask.shape[-2] :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def _projected(
    block: TextBlock, u: Tensor, attended: Tensor, adapters: TextAdapters | None
) -> Tensor:
    projected = block.proj(attended, adapters)
    if adapters is not None:
        adapters.add_(f"{block.proj.name}{INPUT}", u, projected)
    return projected


def _rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """As ``Rotation.apply_``, as a new tensor."""
    half = rotation.cos.shape[-1]
    a, b, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    first = a * rotation.cos - b * rotation.sin
    second = a * rotation.sin + b * rotation.cos
    return torch.cat([first.to(x.dtype), second.to(x.dtype), rest], dim=-1)
