"""Decode rows that begin with the same pages: found by their tables, attended as if each were alone."""

import random

import pytest
import torch

from kestrel_engine.models.attention import Group, PagedAttention, Span
from kestrel_engine.runtime.shared_beginning import find_groups
from kestrel_engine.types.step import Row

PAGE = 4
HEADS, SIZE = 3, 8


def row(number, table, start):
    return Row(number, (7,), start, tuple(table), None)


def grouped(rows):
    groups, members = find_groups(rows, PAGE)
    assert members == {i for group in groups for i in group.indices}
    return [(group.indices, group.num_pages) for group in groups]


def test_rows_of_one_image_form_a_group():
    rows = [row(1, [5, 6, 7, 1], 13), row(2, [9], 2), row(3, [5, 6, 7, 2], 12)]
    assert grouped(rows) == [([0, 2], 3)]


def test_a_page_that_a_row_writes_is_its_own():
    rows = [row(1, [5, 6, 7], 8), row(2, [5, 6, 8], 8), row(3, [5, 3], 5)]
    assert grouped(rows) == [([0, 1, 2], 1)]


def test_what_is_alone_or_gains_nothing_is_left_as_it_is():
    assert grouped([row(1, [1, 2], 5), row(2, [3, 4], 5)]) == []
    assert grouped([Row(1, (7, 8), 4, (1, 2), None), row(2, [1, 3], 5)]) == []
    # 40 positions against 1: padding the short one costs more than a page of four.
    assert grouped([row(1, [1, *range(10, 20)], 43), row(2, [1, 2], 4)]) == []
    assert grouped([]) == []


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("seed", range(5))
def test_group_equals_each_alone(seed, dtype, tolerance):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    counts = [rng.randint(1, 9) for _ in range(rng.randint(2, 6))]
    places = rng.sample(range(200), 12 + sum(counts) + 3)
    shared, rest = places[:12], places[12:]
    pools = torch.randn(2, 2, 200, HEADS, SIZE).to(dtype)
    pools[:, :, rest[-1]] = torch.nan  # nobody's: padding must not read it
    q, k, v = torch.randn(3, len(counts), HEADS, SIZE).to(dtype)
    own = [[rest.pop(0) for _ in range(count)] for count in counts]
    longest = max(counts)
    group = Group(
        queries=torch.arange(len(counts)),
        shared=torch.tensor(shared),
        own=torch.tensor([[*o, *[o[-1]] * (longest - len(o))] for o in own]),
        unseen=(torch.arange(longest) >= torch.tensor(counts)[:, None])[:, None],
    )
    spans = [Span(slice(i, i + 1), None, torch.tensor(shared + o)) for i, o in enumerate(own)]
    newest = torch.tensor([o[-1] for o in own])
    together = PagedAttention(*pools.clone(), newest, [], [group])
    alone = PagedAttention(*pools.clone(), newest, spans, [])
    for layer in range(2):
        torch.testing.assert_close(
            together(layer, q, k, v), alone(layer, q, k, v), atol=tolerance, rtol=tolerance
        )
