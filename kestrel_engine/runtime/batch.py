"""Converts rows of a StepPlan to tensors: input embeddings, positions, slots, and the spans for attention.

This module computes the model's input embeddings (tokens, regions and images) and runs no layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.attention import Attention, Group, PagedAttention, Span
from ..models.compiled import decode_attention
from ..models.low_rank import TokenAdapters, token_adapters
from ..models.moondream import Moondream
from ..types.requests import Coord, ImageBlock, Size, Token, num_positions
from ..types.step import Previous, Row
from .kv_cache import KvCache
from .shared_beginning import SharedBeginning, find_groups


@dataclass(frozen=True, slots=True)
class RowBatch:
    """The tokens of all rows, end to end. ``embeddings``: [num_tokens, dim]. ``positions``: [num_tokens] int64.
    ``last``: [num_rows] int64, the index of each row's last token. ``attention``: valid for one forward pass.
    ``shared_groups``: as in StepResult. ``adapters``: None if no row has an adapter."""

    embeddings: Tensor
    positions: Tensor
    last: Tensor
    attention: Attention
    shared_groups: tuple[int, ...]
    adapters: TokenAdapters | None = None


def build_batch(
    rows: Sequence[Row], model: Moondream, cache: KvCache, images: Mapping[str, Tensor]
) -> RowBatch:
    """Builds the input of one forward pass over ``rows``, which are not empty.

    ``images``: the embedding [n, dim] of each image by key.
    """
    inputs = _Inputs()
    positions: list[Tensor] = []
    slots: list[Tensor] = []
    spans: list[Span] = []
    histories: list[Tensor] = []
    last: list[int] = []
    begin = 0
    is_decode = all(row.start and num_positions(known(row)) == 1 for row in rows)
    compiled = is_decode and decode_attention.available(cache.keys)
    groups, grouped = find_groups(rows, cache.page_size)
    for index, row in enumerate(rows):
        count = num_positions(known(row))
        assert count, f"sequence {row.sequence_id}: a row without tokens"
        end = row.start + count
        positions.append(torch.arange(row.start, end))
        if compiled:
            histories.append(_as_tensor(cache.slots(row.page_table, end)))
        elif index in grouped:
            slots.append(torch.tensor([cache.slot(row.page_table, row.start)]))
        else:
            seen = cache.slots(row.page_table, end)
            slots.append(_as_tensor(seen)[row.start :])
            spans += _spans(row, begin, seen, rounds=cache.eight_bits)
        inputs.add(row, begin)
        begin += count
        last.append(begin - 1)
    device = model.device
    attention: Attention
    if compiled:
        attention = decode_attention.DecodeAttention(cache.keys, cache.values, histories)
    else:
        attention = PagedAttention(
            cache.keys,
            cache.values,
            torch.cat([s.to(device) for s in slots]),
            spans,
            [_group(group, last, cache) for group in groups],
            cache.scales,
        )
    return RowBatch(
        embeddings=inputs.embed(begin, model, images),
        positions=torch.cat(positions).to(device),
        last=torch.tensor(last, device=device),
        attention=attention,
        shared_groups=tuple(len(group.rows) for group in groups),
        adapters=_adapters(rows, device),
    )


def _adapters(rows: Sequence[Row], device: torch.device) -> TokenAdapters | None:
    if all(row.adapter is None for row in rows):
        return None
    return token_adapters(
        [
            (num_positions(known(row)), None if row.adapter is None else row.adapter.weights)
            for row in rows
        ],
        device,
    )


class _Inputs:
    """The inputs of a batch, by kind. Each dict maps the index of a token in the batch to its value."""

    def __init__(self) -> None:
        self.ids: dict[int, int] = {}
        self.coords: dict[int, float] = {}
        self.sizes: dict[int, tuple[float, float]] = {}
        self.images: dict[int, ImageBlock] = {}

    def add(self, row: Row, index: int) -> None:
        for token in known(row):
            if isinstance(token, ImageBlock):
                self.images[index] = token
                index += token.num_positions
                continue
            if isinstance(token, Coord):
                self.coords[index] = token.value
            elif isinstance(token, Size):
                self.sizes[index] = (token.width, token.height)
            else:
                self.ids[index] = token
            index += 1

    def embed(self, count: int, model: Moondream, images: Mapping[str, Tensor]) -> Tensor:
        """Returns the embeddings [count, dim] of all tokens, in the model's dtype."""
        device, region = model.device, model.region
        x = torch.empty(count, model.config.text.dim, dtype=model.dtype, device=device)
        if self.ids:
            ids = torch.tensor(list(self.ids.values()), device=device)
            x[_indices_of(self.ids, device)] = model.text.embed(ids)
        if self.coords:
            values = torch.tensor(list(self.coords.values()), dtype=torch.float32, device=device)
            x[_indices_of(self.coords, device)] = region.embed_coords(values)
        if self.sizes:
            values = torch.tensor(list(self.sizes.values()), dtype=torch.float32, device=device)
            x[_indices_of(self.sizes, device)] = region.embed_sizes(values)
        for index, block in self.images.items():
            assert block.key in images, f"image {block.key} was not encoded: {sorted(images)}"
            embedding = images[block.key]
            assert len(embedding) == block.num_positions, (len(embedding), block.num_positions)
            x[index : index + block.num_positions] = embedding
        return x


def _group(shared: SharedBeginning, last: list[int], cache: KvCache) -> Group:
    """Converts a group of rows to tensors. ``last``: the index of each row's last token in the batch."""
    device, size = cache.keys.device, cache.page_size
    begin = shared.num_pages * size
    counts = [row.start + 1 - begin for row in shared.rows]
    longest = max(counts)
    # The padding repeats the row's newest slot, which holds finite numbers. A slot that was never written may not.
    slots = [cache.slot(row.page_table, row.start) for row in shared.rows]
    tables = [row.page_table[shared.num_pages :] for row in shared.rows]
    most = max(map(len, tables))
    pages = torch.tensor([[*table, *[0] * (most - len(table))] for table in tables])
    own = (pages[:, :, None] * size + torch.arange(size)).flatten(1)[:, :longest]
    unseen = torch.arange(longest) >= torch.tensor(counts)[:, None]
    own = torch.where(unseen, torch.tensor(slots)[:, None], own)
    return Group(
        queries=torch.tensor([last[i] for i in shared.indices], device=device),
        shared=cache.slots(shared.rows[0].page_table, begin),
        own=own.to(device),
        unseen=unseen[:, None].to(device),
    )


def known(row: Row) -> tuple[Token, ...]:
    """Returns the row's tokens. None of them may be PREVIOUS, which the runtime replaces by the sampled token."""
    tokens = tuple(t for t in row.tokens if not isinstance(t, Previous))
    assert len(tokens) == len(row.tokens), f"sequence {row.sequence_id}: a token that is not known"
    return tokens


def _indices_of(tokens: Mapping[int, object], device: torch.device) -> Tensor:
    return torch.tensor(list(tokens), device=device)


def _as_tensor(slots: slice | Tensor) -> Tensor:
    return torch.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots


def _spans(row: Row, begin: int, seen: slice | Tensor, *, rounds: bool) -> list[Span]:
    """Cuts a row into spans. ``begin``: the index of its first token in the batch.

    The positions of an image, and that of a BOS directly before it, attend to one another in both directions; all other
    tokens attend causally. A span attends to the keys from position 0 to its own end. ``rounds``: the KV cache rounds
    what it stores. In that case an image at the beginning, which is always computed as a whole, attends to its
    unrounded keys, and text and later images attend to the stored ones. So the result depends neither on what was
    cached nor on where a prompt was split.
    """
    pieces: list[tuple[int, int, bool]] = []  # first and one past the last position; bidirectional
    position = start = row.start
    for token in row.tokens:
        if not isinstance(token, ImageBlock):
            position += 1
            continue
        assert row.start != 1 or position != 1, (
            f"sequence {row.sequence_id}: image {token.key} is not in the row of its BOS"
        )
        block = 0 if position == 1 else position
        if start < block:
            pieces.append((start, block, False))
        start = position = position + token.num_positions
        pieces.append((block, position, True))
    if start < position:
        pieces.append((start, position, False))
    return [_span(row.start, begin, piece, seen, rounds=rounds) for piece in pieces]


def _span(
    row_start: int,
    begin: int,
    piece: tuple[int, int, bool],
    seen: slice | Tensor,
    *,
    rounds: bool,
) -> Span:
    first, end, bidirectional = piece
    queries = slice(begin + first - row_start, begin + end - row_start)
    as_computed = row_start == 0 and (not rounds or (bidirectional and first == 0))
    fresh = slice(begin, begin + end) if as_computed else None
    slots = None
    if fresh is None:
        slots = slice(seen.start, seen.start + end) if isinstance(seen, slice) else seen[:end]
    return Span(queries, fresh, slots, causal=not bidirectional and end - first > 1)
