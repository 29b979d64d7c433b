"""Attention of one query a sequence, compiled for the processor: exact but for rounding, whatever the other rows."""

import pytest
import torch

from kestrel_engine.models.attention import PagedAttention
from kestrel_engine.models.compiled import decode_attention, few_rows
from kestrel_engine.models.compiled.decode_attention import DecodeAttention
from kestrel_engine.models.moondream import Moondream
from kestrel_engine.runtime.batch import build_batch
from kestrel_engine.runtime.kv_cache import KvCache
from kestrel_engine.types.step import Row
from tests.engine.models.small import random_tensors, small_config

pytestmark = pytest.mark.skipif(
    not few_rows.available(), reason="needs a processor of the kind x86-64, Linux and llvmlite"
)

LENGTHS = (1, 2, 15, 16, 17, 64, 65, 333)


SHAPES = [
    (torch.bfloat16, 4, 64),
    (torch.float16, 3, 32),
    (torch.bfloat16, 1, 16),
    (torch.float32, 6, 64),
    (torch.float32, 2, 16),
]


@pytest.fixture(params=SHAPES)
def shape(request):
    return request.param


def tokens(count, shape, *, seed=1):
    dtype, heads, size = shape
    generator = torch.Generator().manual_seed(seed)
    # Scores differ enough for the softmax to have a few large weights.
    return (2 * torch.randn(3, count, heads, size, generator=generator)).to(dtype)


def histories(lengths=LENGTHS):
    """Pages of 16 slots in no order. All sequences begin with the same page."""
    own = iter(torch.randperm(59, generator=torch.Generator().manual_seed(2)).tolist())
    tables = [[59, *(next(own) for _ in range((length - 1) // 16))] for length in lengths]
    slots = [(torch.tensor(table)[:, None] * 16 + torch.arange(16)).flatten() for table in tables]
    return [each[:length] for each, length in zip(slots, lengths, strict=True)]


def pools_of(slots, shape):
    """Keys and values of two layers; NaN where no sequence has written."""
    pools = torch.full((2, 2, 60 * 16, *shape[1:]), torch.nan, dtype=shape[0])
    written = torch.cat(slots).unique()
    pools[:, 1, written] = tokens(len(written), shape, seed=3)[:2]
    return pools


def test_it_is_the_softmax_of_each_row_alone_and_together(shape):
    slots = histories()
    q, k, v = tokens(len(slots), shape)
    pools = pools_of(slots, shape)
    for row, each in enumerate(slots):
        pools[0, 1, each[-1]], pools[1, 1, each[-1]] = k[row], v[row]
    found = DecodeAttention(*pools, slots)(1, q, k, v)
    assert found.dtype == shape[0]
    for row, each in enumerate(slots):
        keys, values = pools[:, 1, each].double()
        weights = (torch.einsum("hd,nhd->hn", q[row].double(), keys) * shape[2] ** -0.5).softmax(-1)
        wanted = torch.einsum("hn,nhd->hd", weights, values)
        rtol = 1e-5 if shape[0] == torch.float32 else 0.01
        torch.testing.assert_close(found[row], wanted.to(shape[0]), rtol=rtol, atol=1e-5)
        one = slice(row, row + 1)
        alone = DecodeAttention(*pools, slots[one])(1, q[one], k[one], v[one])
        assert torch.equal(alone[0], found[row])


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(threads, shape):
    slots, (q, k, v) = histories((40, 18)), tokens(2, shape)
    before, results = torch.get_num_threads(), []
    for count in (before, threads):
        torch.set_num_threads(count)
        try:
            results.append(DecodeAttention(*pools_of(slots, shape), slots)(1, q, k, v))
        finally:
            torch.set_num_threads(before)
    assert torch.equal(*results) and results[0].isfinite().all()


@pytest.mark.parametrize(
    ("which", "bad"), [(0, torch.nan), (1, torch.nan), (2, torch.nan), (2, torch.inf)]
)
def test_a_number_that_is_not_finite_shows_in_its_row_only(which, bad, shape):
    slots, qkv = histories((40, 18)), tokens(2, shape)
    qkv[which, 0, 0, 5] = bad
    found = DecodeAttention(*pools_of(slots, shape), slots)(1, *qkv)
    assert not found[0, 0].isfinite().all()
    assert found[1].isfinite().all()


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("small", [0, decode_attention._SMALL])
def test_decode_uses_it_and_agrees_with_torch(dtype, small, monkeypatch):
    monkeypatch.setattr(decode_attention, "_SMALL", small)
    config = small_config("moondream3")
    tensors = {name: tensor.to(dtype) for name, tensor in random_tensors(config).items()}
    sizes = {"num_pages": 20, "page_size": 4, "dtype": dtype, "device": torch.device("cpu")}
    model, cache = Moondream(config, tensors), KvCache(config.text, **sizes)
    tables = [(3, 4, 9), (3, 4, 7)]
    ids = list(range(20, 31))

    def run(*rows):
        batch = build_batch([Row(i, *row, None) for i, row in enumerate(rows)], model, cache, {})
        return batch, model.text(batch.embeddings, batch.positions, batch.attention)

    prompts = [(tuple(ids[: 9 + i]), 0, table) for i, table in enumerate(tables)]
    decode = [((40 + i,), 9 + i, table) for i, table in enumerate(tables)]
    assert isinstance(run(*prompts)[0].attention, PagedAttention)
    batch, found = run(*decode)
    assert isinstance(batch.attention, DecodeAttention) == (dtype == torch.bfloat16 or not small)
    assert batch.shared_groups == (2,)
    monkeypatch.setattr(decode_attention, "available", lambda _: False)
    close = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(found, run(*decode)[1], rtol=close, atol=close)
