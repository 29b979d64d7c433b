"""What rows are fed and what is kept of what they sampled, against plain torch."""

import pytest
import torch

from kestrel_engine.kernels.decode_io import (
    COORD,
    PREVIOUS,
    RESULT_WIDTH,
    SIZE,
    TEXT,
    Bins,
    SampledTokens,
    feed_rows,
    flag_rows,
    keep_rows,
)
from kestrel_engine.models.region import coord_of_bin, size_of_bins

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dim", [64, 100])
def test_rows_are_fed_what_was_told_or_what_was_sampled(dim):
    wte = torch.randn(50, dim, device=DEVICE)
    sampled = SampledTokens(
        ints(7, 8, 9),
        ints(TEXT, COORD, SIZE),
        torch.tensor([[0.0, 0], [0.5, 0], [0.25, 0.75]]).to(DEVICE),
    )
    kinds = ints(TEXT, PREVIOUS, PREVIOUS, PREVIOUS, COORD)
    values = torch.tensor([[9.0, 9], [9, 9], [9, 9], [9, 9], [0.125, 9]], device=DEVICE)
    x = torch.full((5, dim), torch.nan, device=DEVICE)
    kinds_out = ints(9, 9, 9, 9, 9)
    values_out = torch.full((5, 2), torch.nan, device=DEVICE)
    new_pages = ints(-1, -1, 5, 8, -1, -1, 0, 9, -1, -1).view(5, 2)
    page_table = torch.full((3, 2), 7, dtype=torch.int32, device=DEVICE)
    feed_rows(
        ints(2, 0, 1, 2, 0), kinds, ints(3, 4, 4, 4, 4000), values, sampled, wte, new_pages, page_table,
        x=x, kinds_out=kinds_out, values_out=values_out,
    )  # fmt: skip
    assert kinds_out.tolist() == [TEXT, TEXT, COORD, SIZE, COORD]
    assert torch.equal(x[0], wte[3]) and torch.equal(x[1], wte[7])
    assert values_out[2, 0] == 0.5 and values_out[3].tolist() == [0.25, 0.75]
    assert values_out[4, 0] == 0.125
    assert page_table.tolist() == [[9, 7], [7, 7], [7, 8]]


def test_what_was_sampled_is_kept_and_reported():
    sampled = SampledTokens.empty(4, DEVICE)
    results = torch.full((3, RESULT_WIDTH), -7, dtype=torch.int32, device=DEVICE)
    logprobs = torch.tensor([-0.5, -1.5, -2.5], device=DEVICE)
    coords = Bins(ints(100, 200, 300).view(3, 1), torch.full((3, 1), 0.75, device=DEVICE), 1024)
    sizes = Bins(
        ints(1, 2, 3, 4, 1023, 512).view(3, 2), torch.full((3, 2), 0.5, device=DEVICE), 1024
    )
    keep_rows(
        torch.ones(3, 70, device=DEVICE),
        ints(3, 0, 2), ints(0, 1, 2), ints(5, 5, 6), logprobs, ints(0, 0, 1), coords, sizes, sampled, results,
        coord_id=5, size_id=6, reads_coord=1, reads_size=2,
    )  # fmt: skip
    assert sampled.ids[[3, 0, 2]].tolist() == [5, 5, 6]
    assert sampled.kinds[[3, 0, 2]].tolist() == [TEXT, COORD, SIZE], "only rows that asked read"
    assert sampled.values[0, 0] == torch.tensor(coord_of_bin(200).value)
    size = size_of_bins(1023, 512)
    assert torch.equal(sampled.values[2].cpu(), torch.tensor([size.width, size.height]))
    assert results[:, 0].tolist() == [5, 5, 6] and results[:, 1].tolist() == [0, 0, 1]
    assert torch.equal(results[:, 2].view(torch.float32), logprobs)
    assert results[1, 3] == 200 and results[2, 4:6].tolist() == [1023, 512]
    assert results[:, 6:].view(torch.float32).tolist() == [[0.75, 0.25]] * 3


def test_without_heads_a_row_is_text():
    sampled = SampledTokens.empty(2, DEVICE)
    sampled.kinds.fill_(SIZE)
    results = torch.zeros(1, RESULT_WIDTH, dtype=torch.int32, device=DEVICE)
    keep_rows(
        torch.ones(1, 64, device=DEVICE),
        ints(1), ints(3), ints(5), torch.zeros(1, device=DEVICE), ints(0), None, None, sampled, results,
        coord_id=5, size_id=6, reads_coord=1, reads_size=2,
    )  # fmt: skip
    assert sampled.kinds.tolist() == [SIZE, TEXT] and sampled.ids.tolist() == [0, 5]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dim", [64, 100])
def test_a_row_with_a_number_that_is_not_finite_is_bad(dim, value):
    hidden = torch.randn(4, dim, device=DEVICE)
    hidden[1, dim - 1] = value
    flags = torch.full((4, 1), 9, dtype=torch.int32, device=DEVICE)
    flag_rows(hidden, flags)
    assert flags.tolist() == [[0], [1], [0], [0]]
    results = torch.zeros(4, RESULT_WIDTH, dtype=torch.int32, device=DEVICE)
    sampled = SampledTokens.empty(4, DEVICE)
    ids, none = ints(1, 2, 3, 4), torch.zeros(4, device=DEVICE)
    keep_rows(
        hidden, ints(0, 1, 2, 3), ints(0, 0, 0, 0), ids, none, ints(0, 0, 0, 1), None, None, sampled, results,
        coord_id=5, size_id=6, reads_coord=1, reads_size=2,
    )  # fmt: skip
    assert results[:, 1].tolist() == [0, 1, 0, 1]


def test_a_value_is_bad_only_for_those_who_read_it():
    near = torch.tensor([[0.5], [torch.nan], [torch.nan]], device=DEVICE)
    coords = Bins(ints(1, 2, 3).view(3, 1), near, 1024)
    sizes = Bins(ints(*range(6)).view(3, 2), torch.full((3, 2), 0.5, device=DEVICE), 1024)
    results = torch.zeros(3, RESULT_WIDTH, dtype=torch.int32, device=DEVICE)
    keep_rows(
        torch.ones(3, 64, device=DEVICE), ints(0, 1, 2), ints(1, 1, 3), ints(5, 5, 6),
        torch.zeros(3, device=DEVICE), ints(0, 0, 0), coords, sizes,
        SampledTokens.empty(3, DEVICE), results,
        coord_id=5, size_id=6, reads_coord=1, reads_size=2,
    )  # fmt: skip
    assert results[:, 1].tolist() == [0, 1, 0]
