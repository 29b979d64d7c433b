"""The attention interface of the text decoder, and its implementation in plain torch over a paged KV cache.

The implementation decides where the keys of a flat batch of tokens are stored and which keys each query attends to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .compiled import full_attention
from .kv_format import UNSCALED, Scales, gather, store


class Attention(Protocol):
    """Attention of one forward pass. Each batch has an object of its own."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores ``k`` and ``v`` and returns the attention output, in the shape of ``q``. ``q``, ``k``, ``v``:
        [num_tokens, num_heads, head_dim]."""
        ...


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive queries of one sequence that attend to the same run of keys, from position 0 on.

    ``queries``: the rows of the queries in the flat batch. ``fresh``: the rows of the keys, if the batch holds all of
    them. Otherwise ``slots`` are the slots of the keys in the KV cache, by position; a slice, which avoids a copy, if
    the pages are consecutive. ``causal``: the last query attends to all keys, and each one before it to one key less
    than the next one. Otherwise, every query attends to every key.
    """

    queries: slice
    fresh: slice | None = None
    slots: slice | Tensor | None = None
    causal: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """One query of each of several sequences that begin with the same pages, which are read once for all of them.
    ``queries``: [n] int64, their rows in the flat batch. ``shared``: the slots of the positions that all sequences
    share. ``own``: [n, longest] int64, the slots of further positions, padded with slots that hold finite numbers.
    ``unseen``: [n, 1, longest] bool, True for the padding."""

    queries: Tensor
    shared: slice | Tensor
    own: Tensor
    unseen: Tensor


class PagedAttention:
    """Scaled dot product attention over keys and values gathered from pages. ``key_pool``, ``value_pool``: [layers,
    num_slots, heads, head_dim]. ``slots``: [num_tokens] int64, the slot of each token of the batch. ``scales``: for
    each layer, those of an FP8 KV cache; None if the cache has the model's dtype. Queries attend to ``fresh`` keys and
    values as they were before rounding."""

    def __init__(
        self,
        key_pool: Tensor,
        value_pool: Tensor,
        slots: Tensor,
        spans: list[Span],
        groups: list[Group],
        scales: Sequence[Scales] | None = None,
    ) -> None:
        self._keys, self._values = key_pool, value_pool
        self._slots, self._spans, self._groups = slots, spans, groups
        self._scales = scales

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._keys[layer], self._values[layer]
        of_keys, of_values = self._scales[layer] if self._scales is not None else UNSCALED
        store(keys, self._slots, k, of_keys)
        store(values, self._slots, v, of_values)
        out = torch.empty_like(q)
        for span in self._spans:
            if span.fresh is not None:
                seen_k, seen_v = k[span.fresh], v[span.fresh]
            else:
                assert span.slots is not None, "a span needs fresh keys or slots"
                seen_k = gather(keys, span.slots, of_keys, q.dtype)
                seen_v = gather(values, span.slots, of_values, q.dtype)
            out[span.queries] = _attend(q[span.queries], seen_k, seen_v, span)
        for group in self._groups:
            pools = (keys, of_keys), (values, of_values)
            out[group.queries] = _attend_group(q[group.queries], pools, group)
        return out


class PrefixAttention:
    """Attention of rows that each begin with an image: BOS and the image attend to each other, and the positions after
    them as ``mask`` says. It stores nothing and permits gradients. The flat batch has all positions of one row after
    another. ``mask``: [rows, 1, length, prefix + length] bool, True where a position after the prefix attends to a key.
    ``text_only``: return no prefix positions."""

    def __init__(self, mask: Tensor, *, text_only: bool = False) -> None:
        self._mask, self._text_only = mask, text_only

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, _, length, positions = self._mask.shape
        q, k, v = (x.reshape(rows, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        prefix = positions - length
        attended = F.scaled_dot_product_attention(q[:, :, prefix:], k, v, attn_mask=self._mask)
        if not self._text_only:
            q, k, v = (each[:, :, :prefix] for each in (q, k, v))
            attended = torch.cat([F.scaled_dot_product_attention(q, k, v), attended], dim=2)
        return attended.transpose(1, 2).flatten(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, span: Span) -> Tensor:
    """Attention of [positions, heads, head_dim], in the same shape. torch's kernels compute the softmax in float32."""
    q, k, v = (x.unsqueeze(0) for x in (q, k, v))
    return full_attention.attend(q, k, v, causal=span.causal).squeeze(0)


def _attend_group(q: Tensor, pools: Sequence[tuple[Tensor, float]], group: Group) -> Tensor:
    """Attention of ``q`` [n, heads, head_dim], in the same shape: one float32 softmax over shared and own positions.
    ``pools``: the pool of keys and the pool of values, each with its scale."""
    n, heads, size = q.shape
    # Shared: [heads, positions, head_dim]. Own: [n * heads, positions, head_dim].
    shared_k, shared_v = (
        gather(pool, group.shared, scale, torch.float32).float().transpose(0, 1)
        for pool, scale in pools
    )
    own_k, own_v = (_gather_heads(pool, group.own, scale).float() for pool, scale in pools)
    q32 = q.float() * size**-0.5
    of_shared = (q32.transpose(0, 1) @ shared_k.mT).transpose(0, 1)
    of_own = (q32.view(n * heads, 1, size) @ own_k.mT).view(n, heads, -1)
    scores = torch.cat([of_shared, of_own.masked_fill_(group.unseen, -torch.inf)], dim=-1)
    weights = scores.softmax(dim=-1)
    num_shared = of_shared.shape[-1]
    attended = (weights[..., :num_shared].transpose(0, 1) @ shared_v).transpose(0, 1)
    on_own = weights[..., num_shared:].reshape(n * heads, 1, -1)
    return (attended + (on_own @ own_v).view(n, heads, size)).to(q.dtype)


def _gather_heads(pool: Tensor, slots: Tensor, scale: float) -> Tensor:
    """Gathers ``slots`` [n, positions] of ``pool`` [num_slots, heads, head_dim] to [n * heads, positions, head_dim]."""
    _, heads, size = pool.shape
    places = slots[:, None] * heads + torch.arange(heads, device=slots.device)[:, None]
    found = gather(pool.view(-1, size), places.flatten(), scale, torch.float32)
    return found.view(-1, slots.shape[1], size)
