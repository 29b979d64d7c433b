"""The pass of a batch of lessons through the text decoder, with gradients (models/text.py)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...models.attention import PrefixAttention
from ...models.low_rank import TextAdapters
from ...models.moondream import Moondream
from .packing import Batch


def hidden(
    model: Moondream,
    images: Tensor,
    batch: Batch,
    adapters: TextAdapters | None,
    checkpointing: bool = False,
) -> Tensor:
    """Returns the residual stream before ``post_ln`` at the text positions, [rows * length, dim].

    ``images``: the embedding of each row's image, [rows, image positions, dim].
    """
    rows, _, dim = batch.text.shape
    bos = model.text.embed(torch.tensor([model.config.ids.bos_id], device=model.device))
    x = torch.cat([bos.expand(rows, 1, dim), images, batch.text], dim=1)
    before = torch.arange(model.config.image_prefix, device=model.device).expand(rows, -1)
    placement = model.text.place(torch.cat([before, batch.positions], dim=1).flatten())
    mask = _mask(batch.lessons, before.shape[1])
    flat = x.flatten(0, 1)
    length = batch.text.shape[1]
    numbers = torch.arange(len(flat), device=model.device).view(rows, -1)
    # Nothing reads the other positions after the last block.
    texts = numbers[:, -length:].flatten()
    last = model.text.blocks[-1]
    for block in model.text.blocks:
        kept = texts if block is last else None
        attention = PrefixAttention(mask, text_only=block is last)
        if checkpointing:
            rest = (placement, attention, adapters, kept)
            flat = checkpoint(block, flat, *rest, use_reentrant=False)
        else:
            flat = block(flat, placement, attention, adapters, kept)
    return flat


def _mask(lessons: Tensor, prefix: int) -> Tensor:
    """Which keys each text position attends to, [rows, 1, length, prefix + length] bool: BOS and the image, and the
    tokens of its own lesson up to itself."""
    rows, length = lessons.shape
    same = lessons[:, :, None] == lessons[:, None, :]
    seen = same & same.new_ones(length, length).tril()
    return torch.cat([same.new_ones(rows, length, prefix), seen], dim=2)[:, None]
