"""Rows of a StepPlan as tensors: input embeddings, positions, slots, and the spans that attend.

Knows the model's input side (token, region and image embeddings) and the K/V pool's layout; runs no layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.attention import Group, PagedAttention, Span
from ..models.moondream import Moondream
from ..types.requests import Coord, ImageBlock, Size, Token, num_positions
from ..types.step import Previous, Row
from .kv_cache import KvCache
from .shared_beginning import SharedBeginning, find_groups


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows laid end to end. ``embeddings`` [num_tokens, dim]; ``positions`` [num_tokens] int64; ``last`` [num_rows]
    int64, the place of each row's last token; ``attention`` is good for one forward pass."""

    embeddings: Tensor
    positions: Tensor
    last: Tensor
    attention: PagedAttention


def build_batch(
    rows: Sequence[Row], model: Moondream, cache: KvCache, images: Mapping[str, Tensor]
) -> Batch:
    """Lays ``rows`` (at least one, none empty) out for one forward pass. Images come from ``images`` by key."""
    inputs = _Inputs()
    positions: list[Tensor] = []
    slots: list[Tensor] = []
    spans: list[Span] = []
    last: list[int] = []
    begin = 0
    groups, grouped = find_groups(rows, cache.page_size)
    for index, row in enumerate(rows):
        count = num_positions(known(row))
        assert count, f"sequence {row.sequence_id}: a row without tokens"
        end = row.start + count
        positions.append(torch.arange(row.start, end))
        if index in grouped:
            slots.append(torch.tensor([cache.slot(row.page_table, row.start)]))
        else:
            seen = cache.slots(row.page_table, end)
            slots.append(_indices(seen)[row.start :])
            spans += _spans(row, begin, seen, model, rounds=cache.eight_bits)
        inputs.add(row, begin)
        begin += count
        last.append(begin - 1)
    device = model.device
    return Batch(
        embeddings=inputs.embed(begin, model, images),
        positions=torch.cat(positions).to(device),
        last=torch.tensor(last, device=device),
        attention=PagedAttention(
            cache.keys,
            cache.values,
            torch.cat([s.to(device) for s in slots]),
            spans,
            [_group(group, last, cache) for group in groups],
            cache.scales,
        ),
    )


class _Inputs:
    """Sorts tokens by how they are embedded, remembering their place in the batch."""

    def __init__(self) -> None:
        self.ids: dict[int, int] = {}
        self.coords: dict[int, float] = {}
        self.sizes: dict[int, tuple[float, float]] = {}
        self.images: dict[int, ImageBlock] = {}

    def add(self, row: Row, place: int) -> None:
        for token in known(row):
            if isinstance(token, ImageBlock):
                self.images[place] = token
                place += token.num_positions
                continue
            if isinstance(token, Coord):
                self.coords[place] = token.value
            elif isinstance(token, Size):
                self.sizes[place] = (token.width, token.height)
            else:
                self.ids[place] = token
            place += 1

    def embed(self, count: int, model: Moondream, images: Mapping[str, Tensor]) -> Tensor:
        """[count, dim] in the model's type."""
        device, region = model.device, model.region
        x = torch.empty(count, model.config.text.dim, dtype=model.dtype, device=device)
        if self.ids:
            ids = torch.tensor(list(self.ids.values()), device=device)
            x[_places(self.ids, device)] = model.text.embed(ids)
        if self.coords:
            values = torch.tensor(list(self.coords.values()), dtype=torch.float32, device=device)
            x[_places(self.coords, device)] = region.embed_coords(values)
        if self.sizes:
            values = torch.tensor(list(self.sizes.values()), dtype=torch.float32, device=device)
            x[_places(self.sizes, device)] = region.embed_sizes(values)
        for place, block in self.images.items():
            assert block.key in images, f"image {block.key} was not encoded: {sorted(images)}"
            embedding = images[block.key]
            assert len(embedding) == block.num_positions, (len(embedding), block.num_positions)
            x[place : place + block.num_positions] = embedding
        return x


def _group(shared: SharedBeginning, last: list[int], cache: KvCache) -> Group:
    """``last``: each row's place in the batch."""
    device, size = cache.keys.device, cache.page_size
    begin = shared.num_pages * size
    counts = [row.start + 1 - begin for row in shared.rows]
    longest = max(counts)
    # Padding repeats the row's newest slot: it holds finite numbers, as slots that nobody wrote may not.
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
    """The row's tokens, none of them PREVIOUS: the runtime puts the sampled token in its place."""
    tokens = tuple(t for t in row.tokens if not isinstance(t, Previous))
    assert len(tokens) == len(row.tokens), f"sequence {row.sequence_id}: a token that is not known"
    return tokens


def _places(of: Mapping[int, object], device: torch.device) -> Tensor:
    return torch.tensor(list(of), device=device)


def _indices(slots: slice | Tensor) -> Tensor:
    return torch.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots


def _spans(
    row: Row, begin: int, seen: slice | Tensor, model: Moondream, *, rounds: bool
) -> list[Span]:
    """Cuts a row whose first token is at ``begin`` of the batch: BOS and image attend both ways, all else is causal.

    Every span sees the keys from position 0 to its own end. Where storing ``rounds`` them, only an image's prefix sees
    its own as they were computed, for it is always computed whole; text sees what is stored, so that nothing depends on
    what was cached or on where a prompt was cut.
    """
    pieces: list[tuple[int, int, bool]] = []  # first and one past the last position; bidirectional
    position = start = row.start
    for before, token in zip((None, *row.tokens), row.tokens, strict=False):
        if not isinstance(token, ImageBlock):
            position += 1
            continue
        assert before == model.config.ids.bos_id, (
            f"sequence {row.sequence_id}: image {token.key} does not follow a BOS in its row"
        )
        if start < position - 1:
            pieces.append((start, position - 1, False))
        start, position = position, position + token.num_positions
        pieces.append((start - 1, position, True))
        start = position
    if start < position:
        pieces.append((start, position, False))
    return [_span(row.start, begin, piece, seen, model.device, rounds=rounds) for piece in pieces]


def _span(
    row_start: int,
    begin: int,
    piece: tuple[int, int, bool],
    seen: slice | Tensor,
    device: torch.device,
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
    if bidirectional or end - first == 1:
        return Span(queries, fresh, slots)
    if first == 0:
        return Span(queries, fresh, slots, causal=True)
    mask = torch.ones(end - first, end, dtype=torch.bool, device=device).tril(first)
    return Span(queries, fresh, slots, mask=mask)
