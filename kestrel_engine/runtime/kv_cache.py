"""The device K/V pool: every position of every running sequence, in pages.

Owns the two tensors and how large they are. Which page belongs to whom is the scheduler's business.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..model_config import TextConfig


class KvCache:
    """``keys`` and ``values``: [layers, num_pages * page_size, heads, head_dim]. Contents start undefined."""

    def __init__(
        self,
        config: TextConfig,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (config.n_layers, num_pages * page_size, config.n_kv_heads, config.head_dim)
        self.page_size = page_size
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)

    def slot(self, page_table: tuple[int, ...], position: int) -> int:
        """The slot of one position."""
        page, offset = divmod(position, self.page_size)
        return page_table[page] * self.page_size + offset

    def slots(self, page_table: tuple[int, ...], end: int) -> slice | Tensor:
        """Slots of positions 0 up to ``end``, on the device; a slice if the pages lie in order."""
        size = self.page_size
        assert len(page_table) * size >= end, (
            f"{len(page_table)} pages of {size} for {end} positions"
        )
        first, used = page_table[0], -(-end // size)
        if page_table[:used] == tuple(range(first, first + used)):
            return slice(first * size, first * size + end)
        pages = torch.tensor(page_table[:used], dtype=torch.int64)
        slots = (pages[:, None] * size + torch.arange(size)).flatten()[:end]
        return slots.to(self.keys.device)


def bytes_per_page(config: TextConfig, page_size: int, dtype: torch.dtype) -> int:
    """Memory of one page: keys and values of all layers."""
    return 2 * config.n_layers * page_size * config.n_kv_heads * config.head_dim * dtype.itemsize
