"""Attention of a few prompt tokens in the launches of a decode step."""

from __future__ import annotations

from torch import Tensor

from ....kernels.attention.paged_text import paged_text
from ....kernels.attention.rope_store import rope_store
from ....kernels.attention.shared_prefix import SharedPrefixes
from ....models.kv_format import UNSCALED, Scales


class PagedPrompts:
    """Implements `DecodeAttention` for rows that may be tokens of one sequence.

    Such rows attend to each other, so all keys and values are stored before the first row attends. ``page_table``:
    [num_seqs, max_pages] int32.
    """

    def __init__(self, page_table: Tensor, page_size: int) -> None:
        self._page_table, self._page_size = page_table, page_size

    def __call__(
        self,
        qkv: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        angles: tuple[Tensor, Tensor],
        tau: tuple[Tensor, Tensor] | None,
        out: Tensor,
        scales: Scales = UNSCALED,
        *,
        shared: SharedPrefixes | None = None,
    ) -> None:
        """As `DecodeAttention`. ``rows``: positions and slots, both [M] int64, and the tiles of `paged_text`."""
        assert shared is None, "tiles of one sequence share their reads already"
        positions, slots, tiles = rows
        rope_store(qkv, positions, slots, keys, values, *angles, tau=tau, scales=scales)
        _, heads, head_dim = keys.shape
        q = qkv[:, : heads * head_dim].unflatten(1, (heads, head_dim))
        paged_text(
            q,
            keys,
            values,
            self._page_table,
            tiles,
            page_size=self._page_size,
            scales=scales,
            out=out,
        )
