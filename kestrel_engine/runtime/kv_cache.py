"""The device K/V pool: every position of every running sequence, in pages.

Owns the two tensors, what the numbers in them stand for, and how large they are. Which page belongs to whom is the
scheduler's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..models.kv_format import EIGHT_BITS, UNSCALED, Scales, gather
from ..types.model_config import TextConfig


class KvCache:
    """``keys`` and ``values``: [layers, num_pages * page_size, heads, head_dim], of ``dtype``. With ``scales``, a pair
    for each layer, they are float8_e4m3fn instead, and a stored value times its scale is the real one; else all scales
    are 1. Contents start undefined.
    """

    def __init__(
        self,
        config: TextConfig,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Sequence[Scales] | None = None,
    ) -> None:
        shape = (config.n_layers, num_pages * page_size, config.n_kv_heads, config.head_dim)
        assert scales is None or len(scales) == config.n_layers, f"scales of {len(scales)} layers"
        self.page_size = page_size
        self.eight_bits = scales is not None
        self.scales = tuple(scales or [UNSCALED] * config.n_layers)
        dtype = kv_dtype(dtype, scales)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)

    def read(self, slots: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Real keys and values of all layers at ``slots`` [n]: [layers, n, heads, head_dim] float32, copies."""
        keys, values = zip(*self.scales, strict=True)
        return self._read(self.keys, slots, keys), self._read(self.values, slots, values)

    def _read(self, pools: Tensor, slots: slice | Tensor, scales: Sequence[float]) -> Tensor:
        found = [
            gather(pool, slots, scale, torch.float32).float()
            for pool, scale in zip(pools, scales, strict=True)
        ]
        return torch.stack(found)

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


def kv_dtype(model: torch.dtype, scales: Sequence[Scales] | None) -> torch.dtype:
    """Of the pool of a model that computes in ``model``."""
    return model if scales is None else EIGHT_BITS


def bytes_per_page(config: TextConfig, page_size: int, dtype: torch.dtype) -> int:
    """Memory of one page: keys and values of all layers."""
    return 2 * config.n_layers * page_size * config.n_kv_heads * config.head_dim * dtype.itemsize
