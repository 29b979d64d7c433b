"""Prompt text over pages, against plain torch, with pools full of what is no number."""

import pytest
import torch
import torch.nn.functional as F

from kestrel_engine.kernels.attention.paged_text import TILE_QUERIES, TILE_WIDTH, paged_text

pytestmark = pytest.mark.usefixtures("checked_addresses")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("dtype", "page_size", "heads", "dim"),
    [(torch.float32, 10, 2, 64), (torch.float32, 1, 3, 24), (torch.float16, 5, 2, 32)],
)
def test_queries_see_all_up_to_themselves(dtype, page_size, heads, dim):
    torch.manual_seed(3)
    segments = [(0, 1), (37, 20), (140, 5), (0, 33)]
    """First position and number of queries of each sequence."""
    pages = 60
    pool = torch.full((2, pages * page_size * 4, heads, dim), torch.nan, dtype=dtype)
    order = torch.randperm(pages * 4)
    table = torch.zeros(len(segments), 200, dtype=torch.int32)
    used, rows, wanted, tiles = 0, [], [], []
    for index, (start, count) in enumerate(segments):
        length = start + count
        number = -(-length // page_size)
        own = order[used : used + number]
        used += number
        table[index, :number] = own
        position = torch.arange(length)
        slots = own[position // page_size] * page_size + position % page_size
        kv = torch.randn(2, length, heads, dim).to(dtype)
        pool[:, slots] = kv
        q = torch.randn(count, heads, dim).to(dtype)
        first = sum(len(r) for r in rows) + 2
        for begin in range(0, count, TILE_QUERIES):
            size = min(TILE_QUERIES, count - begin)
            tiles.append([index, first + begin, size, start + begin])
        rows.append(q)
        mask = torch.arange(length)[None] <= start + torch.arange(count)[:, None]
        k, v = (part.float().transpose(0, 1) for part in kv)
        attended = F.scaled_dot_product_attention(q.float().transpose(0, 1), k, v, attn_mask=mask)
        wanted.append(attended.transpose(0, 1).flatten(1))
    tiles.insert(2, [0] * TILE_WIDTH)
    flat = torch.cat([torch.full((2, heads, dim), torch.nan, dtype=dtype), *rows]).to(DEVICE)
    # Queries as a view of wider rows, results into a view as well.
    wide = torch.full((len(flat), 3 * heads * dim), torch.nan, dtype=dtype, device=DEVICE)
    wide[:, : heads * dim] = flat.flatten(1)
    out = torch.full((len(flat), 2 * heads * dim), 7.0, dtype=dtype, device=DEVICE)
    paged_text(
        wide[:, : heads * dim].unflatten(1, (heads, dim)),
        pool[0].to(DEVICE),
        pool[1].to(DEVICE),
        table.to(DEVICE),
        torch.tensor(tiles, dtype=torch.int32, device=DEVICE),
        page_size=page_size,
        out=out[:, heads * dim :],
    )
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    got = out[2:, heads * dim :].float().cpu()
    assert torch.allclose(got, torch.cat(wanted), atol=tolerance, rtol=tolerance)
    assert (out[:2] == 7).all() and (out[:, : heads * dim] == 7).all()
