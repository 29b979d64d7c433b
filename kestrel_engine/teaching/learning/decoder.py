"""The text decoder as a function with gradients: the layers of models/text.py, without their operations in place.

Its results equal those of the served decoder up to rounding; tests/engine/teaching compares them.
"""

from __future__ import annotations

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


def hidden(
    model: Moondream,
    images: Tensor,
    batch: Batch,
    adapters: TextAdapters | None,
    *,
    checkpointing: bool = False,
) -> Tensor:
    """Returns the residual stream before ``post_ln`` at the text positions, [rows * length, dim].

    ``images``: the embedding of each row's image, [rows, image positions, dim].
    """
    rows, length, dim = batch.text.shape
    bos = model.text.embed(torch.tensor([model.config.ids.bos_id], device=model.device))
    x = torch.cat([bos.expand(rows, 1, dim), images, batch.text], dim=1)
    prefix = model.config.image_prefix
    before = torch.arange(prefix, device=model.device).expand(rows, -1)
    placement = model.text.place(torch.cat([before, batch.positions], dim=1).flatten())
    mask = _mask(batch.lessons, prefix)
    flat = x.flatten(0, 1)
    for block in model.text.blocks:
        if checkpointing:
            flat = checkpoint(_through, block, flat, placement, mask, adapters, use_reentrant=False)
        else:
            flat = _through(block, flat, placement, mask, adapters)
    return flat.view(rows, prefix + length, dim)[:, prefix:].flatten(0, 1)


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
    return x + _attended(block, u, placement, mask, adapters) + block.mlp(u, adapters)


def _attended(
    block: TextBlock,
    u: Tensor,
    placement: Placement,
    mask: Tensor,
    adapters: TextAdapters | None,
) -> Tensor:
    qkv = block.qkv(u, adapters)
    q, k, v = qkv.view(len(u), 3, block.n_heads, -1).unbind(1)
    if block.tau is not None:
        q_factors, v_factors = block.tau.factors(qkv, placement.log_position)
        # As in place: the product is rounded to the dtype of q.
        q = (q * q_factors.unsqueeze(-1)).to(q.dtype)
        v = (v * v_factors.unsqueeze(-1)).to(v.dtype)
    q, k = _rotated(q, placement.rotation), _rotated(k, placement.rotation)
    rows = len(mask)
    # [rows, heads, positions, head_dim]
    q, k, v = (each.reshape(rows, -1, *each.shape[1:]).transpose(1, 2) for each in (q, k, v))
    prefix = mask.shape[-1] - mask.shape[-2]
    of_prefix = F.scaled_dot_product_attention(q[:, :, :prefix], k[:, :, :prefix], v[:, :, :prefix])
    of_text = F.scaled_dot_product_attention(q[:, :, prefix:], k, v, attn_mask=mask)
    together = torch.cat([of_prefix, of_text], dim=2).transpose(1, 2)
    attended = block.proj(together.reshape(len(u), -1), adapters)
    if adapters is not None:
        adapters.add_(f"{block.proj.name}{INPUT}", u, attended)
    return attended


def _rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """As ``Rotation.apply_``, as a new tensor."""
    half = rotation.cos.shape[-1]
    a, b, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    first = a * rotation.cos - b * rotation.sin
    second = a * rotation.sin + b * rotation.cos
    return torch.cat([first.to(x.dtype), second.to(x.dtype), rest], dim=-1)
