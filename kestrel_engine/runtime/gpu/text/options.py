"""TextOptions: how the text decoder computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....models.kv_format import Scales
from ..adapters.layout import SlabLayout
from ..attention.decode import DecodeAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """``max_rows``: the most rows of a decode step. ``pdl``: launch decode kernels before the preceding kernels have
    ended (programmatic dependent launch, sm_90). ``attention``: for decode steps; None for our own kernel. ``fp8``:
    prefill computes qkv and the dense layers' fc1, proj and fc2 in FP8, with FP8 copies of their weights.
    ``fp8_decode``: decode steps read these copies too, and those of proj in MoE layers. ``kv_scales``: the scales of
    each layer for an FP8 KV cache. ``priority``: of the streams of a decode step, as in torch. ``adapters``: the layout
    of adapters' slabs; None if rows have none.
    """

    max_rows: int
    page_size: int
    pdl: bool = False
    attention: DecodeAttention | None = None
    fp8: bool = False
    fp8_decode: bool = False
    kv_scales: Sequence[Scales] | None = None
    priority: int = 0
    adapters: SlabLayout | None = None
