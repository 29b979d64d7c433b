"""The KV cache on the device: the keys and values of all positions, in pages.

This module owns the two tensors, their format and their size. The scheduler assigns pages to sequences.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..models.compiled import large_pages
from ..models.kv_format import EIGHT_BITS, UNSCALED, Scales, gather
from ..types.model_config import TextConfig


def untouched_bytes(tensor: Tensor) -> int:
    """Returns the bytes of ``tensor``'s memory that do not exist yet; all of them where the host reports nothing, and 0
    on a device."""
    if tensor.device.type != "cpu" or not tensor.nbytes:
        return 0
    if sys.platform != "linux":
        return tensor.nbytes
    size = mmap.PAGESIZE
    begin = tensor.data_ptr() // size * size
    pages = -(-(tensor.data_ptr() + tensor.nbytes - begin) // size)
    present = np.empty(pages, np.uint8)
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    if mincore(begin, pages * size, present.ctypes.data):
        return tensor.nbytes
    absent = pages - int((present & 1).sum())
    return min(absent * size, tensor.nbytes)


class KvCache:
    """The pools of keys and values. ``keys``, ``values``: [layers, num_pages * page_size, heads, head_dim].

    The pools have ``dtype``, or float8_e4m3fn with ``scales``, a pair for each layer: a stored value times its scale is
    the real value. Without ``scales``, all scales are 1. The initial contents are undefined.
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
        for pool in (self.keys, self.values):
            large_pages.prefer(pool)

    def untouched(self) -> Callable[[], int]:
        """Returns what counts the bytes of the pools that the host has not given yet. It does not keep the pools."""
        pools = weakref.ref(self.keys), weakref.ref(self.values)

        def count() -> int:
            return sum(untouched_bytes(pool) for ref in pools if (pool := ref()) is not None)

        return count

    def read(self, slots: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Returns copies of the real keys and values at ``slots`` [n]: [layers, n, heads, head_dim] float32."""
        keys, values = zip(*self.scales, strict=True)
        return self._read(self.keys, slots, keys), self._read(self.values, slots, values)

    def _read(self, pools: Tensor, slots: slice | Tensor, scales: Sequence[float]) -> Tensor:
        found = [
            gather(pool, slots, scale, torch.float32).float()
            for pool, scale in zip(pools, scales, strict=True)
        ]
        return torch.stack(found)

    def slot(self, page_table: tuple[int, ...], position: int) -> int:
        page, offset = divmod(position, self.page_size)
        return page_table[page] * self.page_size + offset

    def slots(self, page_table: tuple[int, ...], end: int) -> slice | Tensor:
        """Returns the slots of positions 0 to ``end``, exclusive: a slice for consecutive pages, else a tensor."""
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
    """Returns the dtype of the KV cache of a model that computes in ``model``."""
    return model if scales is None else EIGHT_BITS


def bytes_per_page(config: TextConfig, page_size: int, dtype: torch.dtype) -> int:
    """Returns the bytes of one page, with the keys and values of all layers."""
    return 2 * config.n_layers * page_size * config.n_kv_heads * config.head_dim * dtype.itemsize
