"""Attention of many queries on a CPU agrees with torch's float32, whatever the sizes, and row by row with itself."""

import pytest
import torch
import torch.nn.functional as F

from kestrel_engine.models.compiled import few_rows, full_attention, host_code
from kestrel_engine.models.compiled.full_attention import attend

compiled = pytest.mark.skipif(
    not (few_rows.available() and host_code.features().get("avx512bf16")),
    reason="needs a processor with products of bfloat16, and llvmlite",
)


@pytest.fixture(autouse=True)
def features(monkeypatch):
    """Those of a processor without AMX. Tests may change them."""
    found = dict(host_code.features()) if few_rows.available() else {}
    found.pop("amx-bf16", None)
    monkeypatch.setattr(host_code, "features", lambda: found)
    return found


@compiled
@torch.inference_mode()
def test_a_processor_with_products_of_tiles_uses_torchs(features):
    assert full_attention._takes(*inputs(70, 90, 2, 64))
    features["amx-bf16"] = True
    assert not full_attention._takes(*inputs(70, 90, 2, 64))


def inputs(queries, keys, heads, size):
    """Queries, keys and values as slices of one product, as in the tower."""
    fused = torch.randn(2, max(queries, keys), 3, heads, size).mul_(2).bfloat16()
    q, k, v = fused.unbind(2)
    return q[:, :queries], k[:, :keys], v[:, :keys]


def expected(q, k, v, causal=False):
    wide = (x.float().transpose(1, 2) for x in (q, k, v))
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    mask = mask.tril(k.shape[1] - q.shape[1]) if causal else None
    return F.scaled_dot_product_attention(*wide, attn_mask=mask).transpose(1, 2)


@compiled
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(64, 96), (75, 75), (11, 101), (70, 1)])
@pytest.mark.parametrize("size", [8, 64, 72, 128])
def test_every_size_agrees_with_float32(queries, keys, size, causal):
    torch.manual_seed(size + keys)
    causal = causal and queries <= keys
    with torch.inference_mode():
        q, k, v = inputs(queries, keys, 3, size)
        assert full_attention._takes(q, k, v)
        found = attend(q, k, v, causal=causal)
    assert found.shape == q.shape and found.dtype == q.dtype
    torch.testing.assert_close(found.float(), expected(q, k, v, causal), rtol=2**-7, atol=2**-6)


@compiled
@torch.inference_mode()
def test_large_scores_and_numbers_that_are_not_finite_stay_in_their_row():
    q, k, v = inputs(67, 90, 2, 72)
    few = attend(q * 64, k * 64, v)
    assert few.isfinite().all()
    # The padding has scores of 0, which exceed all scores of this row.
    low = attend(-q.abs() * 64, k.abs() * 64, v)
    torch.testing.assert_close(
        low.float(), expected(-q.abs() * 64, k.abs() * 64, v), rtol=2**-7, atol=2**-5
    )
    whole = attend(q, k, v)
    assert torch.equal(attend(q[:, 1:], k, v), whole[:, 1:]), "a row depends on its block"
    q[0, 3, 1] = torch.nan
    found = attend(q, k, v)
    assert found[0, 3, 1].isnan().all()
    found[0, 3, 1] = whole[0, 3, 1]
    assert torch.equal(found, whole)


def test_float32_and_few_queries_are_torchs():
    q, k, v = inputs(70, 90, 2, 64)
    wide = [x.float() for x in (q, k, v)]
    assert torch.equal(attend(*wide), expected(q, k, v))
    assert torch.equal(attend(*wide, causal=True), expected(q, k, v, causal=True))
    with torch.inference_mode():
        assert not full_attention._takes(*wide)
        assert not full_attention._takes(q[:, :7], k, v)
        apart = torch.randn(2, 70, 2 * 64 + 1).bfloat16()[..., :-1].unflatten(2, (2, 64))
        assert not full_attention._takes(apart, k, v), "pairs of its numbers are not aligned"
        assert attend(q[:0], k[:0], v[:0]).shape == (0, *q.shape[1:])
    assert not full_attention._takes(q, k, v), "it has no gradients"
