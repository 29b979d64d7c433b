"""Prefill's turn-and-store kernel, compared with plain torch in float64."""

import pytest
import torch

from kestrel_engine.kernels.attention.rope_store import rope_store
from tests.kernels.attention.attention_cases import prepared, relative_error

pytestmark = pytest.mark.usefixtures("checked_addresses")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("with_tau", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "rotary", "extra"),
    [(4, 64, 32, 0), (3, 24, 16, 8), (5, 16, 16, 40), (130, 8, 4, 0)],
)
def test_it_turns_scales_and_stores(num_heads, head_dim, rotary, extra, with_tau, dtype):
    g = torch.Generator().manual_seed(1)
    tokens, dim = 5, num_heads * head_dim
    buffer = torch.randn(tokens, 3 * dim + extra, generator=g).to(DEVICE, dtype)
    qkv = buffer[:, : 3 * dim]
    before = buffer.clone()
    positions = torch.tensor([0, 3, 31, 7, 8], device=DEVICE)
    slots = torch.tensor([11, 2, 0, 7, 5], device=DEVICE)
    angles = torch.outer(torch.arange(32.0), 100.0 ** -(torch.arange(rotary // 2) / rotary))
    cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    tau = None
    if with_tau:
        content = torch.randn(tokens, 2 * num_heads + 1, generator=g).to(DEVICE, dtype)
        tau = (content[:, : 2 * num_heads], torch.randn(num_heads, generator=g).to(DEVICE))
    keys = torch.full((12, num_heads, head_dim), float("nan"), dtype=dtype, device=DEVICE)
    values = keys.clone()

    rope_store(qkv, positions, slots, keys, values, cos, sin, tau=tau)

    q, k, v = prepared(before, num_heads, head_dim, cos, sin, positions, tau)
    new_q, new_k, new_v = qkv.view(tokens, 3 * num_heads, head_dim).chunk(3, dim=1)
    for new, expected in ((new_q, q), (new_k, k), (new_v, v)):
        assert relative_error(new, expected) < LIMITS[dtype]
    assert torch.equal(keys[slots], new_k) and torch.equal(values[slots], new_v)
    untouched = torch.ones(len(keys), dtype=torch.bool)
    untouched[slots.cpu()] = False
    assert keys[untouched].isnan().all() and values[untouched].isnan().all()
    assert torch.equal(buffer[:, 3 * dim :], before[:, 3 * dim :])


def test_no_tokens_are_no_launch():
    empty = torch.empty(0, 48, device=DEVICE)
    index = torch.empty(0, dtype=torch.int64, device=DEVICE)
    pool, table = torch.zeros(2, 2, 8, device=DEVICE), torch.ones(4, 2, device=DEVICE)
    rope_store(empty, index, index, pool, pool.clone(), table, table)
    assert not pool.any()
