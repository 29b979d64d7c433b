"""Decode rows that read shared positions once, compared with plain torch in float64."""

from dataclasses import replace

import pytest
import torch

from kestrel_engine.kernels.attention.shared_prefix import ROWS, TILE_WIDTH, SharedPrefixes
from tests.kernels.attention.attention_cases import Case, decode_reference, relative_error

pytestmark = pytest.mark.usefixtures("checked_addresses")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}

Group = tuple[list[int], int]
"""Rows, and the pages that they share."""


def sharing(case: Case, groups: list[Group]) -> tuple[Case, SharedPrefixes]:
    """The case with page tables that share pages, and the tiles for it. The last tile has no rows."""
    table = case.page_table.clone()
    counts = torch.zeros(len(case.positions), dtype=torch.int32)
    tiles = []
    for rows, pages in groups:
        seqs = case.row_seq[rows].long()
        table[seqs, :pages] = table[seqs[0], :pages]
        counts[rows] = pages * case.page_size
        for first in range(0, len(rows), ROWS):
            part = rows[first : first + ROWS]
            # Columns without a row may hold anything.
            tiles.append([len(part), pages * case.page_size, *part, *[99] * (ROWS - len(part))])
    tiles.append([0] * TILE_WIDTH)
    on_device = torch.tensor(tiles, dtype=torch.int32, device=DEVICE), counts.to(DEVICE)
    shared = SharedPrefixes.allocate(*on_device, case.num_heads, case.head_dim)
    shared.sums.fill_(float("nan"))
    shared.stats.fill_(float("nan"))
    return replace(case, page_table=table), shared


def decode(case: Case, shared: SharedPrefixes | None, splits: int) -> torch.Tensor:
    pools = {"keys": case.keys.clone(), "values": case.values.clone()}
    return case.decoded(case.workspace(splits), splits=splits, shared=shared, **pools)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("splits", "tau", "page_size"), [(1, False, 5), (3, True, 10)])
def test_shared_positions_are_attended_to(splits, tau, page_size, dtype):
    case = Case.make(
        [60, 41, 9, 40, 62, 30, 0], page_size=page_size, tau=tau, dtype=dtype, device=DEVICE
    )
    # Row 3 has no position of its own but the new one. Rows 2 and 6 share nothing.
    case, shared = sharing(case, [([0, 3, 1], 40 // page_size), ([5, 4], 10 // page_size)])
    found = decode(case, shared, splits)
    assert relative_error(found, decode_reference(case)[0]) < LIMITS[dtype]


def test_rows_that_share_nothing_keep_their_bits():
    case = Case.make([60, 41, 9, 40], page_size=10, tau=True, device=DEVICE)
    case, shared = sharing(case, [([0, 1], 3)])
    with_tiles, without = decode(case, shared, 2), decode(case, None, 2)
    assert torch.equal(with_tiles[2:], without[2:])
    assert not torch.equal(with_tiles[:2], torch.zeros_like(with_tiles[:2]))


def test_a_group_may_need_several_tiles():
    case = Case.make(
        [22 + i for i in range(18)], page_size=10, tau=False, num_heads=2, device=DEVICE
    )
    case, shared = sharing(case, [(list(range(17, -1, -1)), 2)])
    assert len(shared.tiles) == 3
    assert relative_error(decode(case, shared, 2), decode_reference(case)[0]) < 2e-6


def test_shapes_that_are_no_powers_of_two():
    case = Case.make(
        [30, 40], page_size=13, tau=True, num_heads=3, head_dim=24, rotary=16, device=DEVICE
    )
    case, shared = sharing(case, [([0, 1], 2)])
    assert relative_error(decode(case, shared, 2), decode_reference(case)[0]) < 2e-6


def test_content_of_tau_may_come_in_parts():
    case = Case.make([30, 40], page_size=10, tau=True, device=DEVICE)
    case, shared = sharing(case, [([0, 1], 2)])
    assert case.tau is not None
    content, alpha = case.tau
    parts = torch.randn(37, *content.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    parts[-1] += content - parts.sum(0)
    found = decode(replace(case, tau=(parts, alpha)), shared, 2)
    assert relative_error(found, decode_reference(case)[0]) < 1e-5
