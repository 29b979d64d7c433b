"""Keys and values in eight bits through the plain runtime: what is kept, who sees it, and that nothing else matters."""

import pytest
import torch

from kestrel_engine.models.kv_format import EIGHT_BITS, gather, store
from kestrel_engine.runtime.kv_cache import KvCache, bytes_per_page, kv_dtype
from kestrel_engine.types.requests import ImageBlock
from kestrel_engine.types.step import Row, StepPlan
from tests.engine.models.small import small_config
from tests.engine.runtime.rounded_attention import RoundedAttention
from tests.engine.runtime.test_torch_runtime import new_runtime, picture, whole

CPU = torch.device("cpu")
CLOSE = {"atol": 2e-5, "rtol": 2e-5}
PAGE = 2
"""It divides an image's prefix, 26 positions."""


def made_up_scales(layers):
    """Different everywhere, and such that some values are beyond the largest number."""
    return tuple((0.003 * (i + 1), 0.0007 * (i + 2)) for i in range(layers))


@pytest.fixture(params=["moondream2", "moondream3"])
def runtime(request):
    scales = made_up_scales(small_config(request.param).text.n_layers)
    sizes = {"num_pages": 120, "page_size": PAGE, "max_batch_size": 8}
    made = new_runtime(request.param, kv_scales=scales, **sizes)
    yield made
    made.close()


def table(first, pages=30):
    # Out of order: a gather, not a slice.
    return tuple(reversed(range(first, first + pages)))


def stepwise(runtime, tokens, pages, cuts):
    """The last hidden state of ``tokens`` fed in pieces that end at ``cuts``."""
    begin = start = 0
    for cut in (*cuts, len(tokens)):
        piece = tokens[begin:cut]
        hidden = runtime.hidden([Row(0, piece, start, pages, None)])
        start += sum(t.num_positions if isinstance(t, ImageBlock) else 1 for t in piece)
        begin = cut
    return hidden[0]


def test_a_number_comes_back_rounded_to_four_bits():
    torch.manual_seed(0)  # Numbers beyond the largest would be clipped.
    pool = torch.zeros(9, 2, 4).to(EIGHT_BITS)
    x = torch.randn(3, 2, 4) * torch.tensor([1.0, 0.1, 10.0])[:, None, None]
    x.clamp_(-22, 22)  # Numbers beyond 448 * 0.05 come back as that.
    slots = torch.tensor([7, 0, 3])
    store(pool, slots, x, 0.05)
    back = gather(pool, slots, 0.05, torch.float32)
    assert ((back - x).abs() <= x.abs() / 16 + 0.05 * 2**-10).all() and not torch.equal(back, x)
    assert torch.equal(gather(pool, slice(0, 9), 0.05, torch.float32)[slots], back)
    assert gather(pool, slots, 0.05, torch.bfloat16).dtype == torch.bfloat16
    # What is stored once stays what it is.
    store(pool, slots, back, 0.05)
    assert torch.equal(gather(pool, slots, 0.05, torch.float32), back)


def test_what_is_too_large_is_the_largest_and_nan_stays():
    pool = torch.zeros(2, 1, 3).to(EIGHT_BITS)
    store(pool, torch.tensor([1]), torch.tensor([[[1e9, -torch.inf, torch.nan]]]), 0.5)
    assert gather(pool, slice(1, 2), 0.5, torch.float32)[0, 0, :2].tolist() == [224.0, -224.0]
    assert gather(pool, slice(1, 2), 0.5, torch.float32)[0, 0, 2].isnan()


def test_pools_of_the_models_type_keep_every_bit():
    pool = torch.zeros(4, 2, 4)
    x = torch.randn(2, 2, 4)
    store(pool, torch.tensor([3, 1]), x, 1.0)
    assert torch.equal(gather(pool, torch.tensor([3, 1]), 1.0, torch.float32), x)
    assert gather(pool, slice(0, 2), 1.0, torch.float32).data_ptr() == pool.data_ptr()


def test_a_page_takes_a_byte_a_number():
    config = small_config("moondream2").text
    scales = made_up_scales(config.n_layers)
    sizes = {"num_pages": 7, "page_size": PAGE, "device": CPU, "dtype": torch.bfloat16}
    half, wide = KvCache(config, scales=scales, **sizes), KvCache(config, **sizes)
    assert half.keys.dtype == half.values.dtype == EIGHT_BITS == kv_dtype(torch.bfloat16, scales)
    assert 2 * (half.keys.nbytes + half.values.nbytes) == wide.keys.nbytes + wide.values.nbytes
    assert bytes_per_page(config, PAGE, EIGHT_BITS) * 7 == half.keys.nbytes + half.values.nbytes
    half.keys.copy_(torch.tensor(2.0))
    keys, values = half.read(torch.tensor([3, 1]))
    assert keys.shape == values.shape == (config.n_layers, 2, config.n_kv_heads, config.head_dim)
    assert [float(layer.max()) for layer in keys] == pytest.approx([2 * k for k, _ in scales])
    assert half.scales == scales and set(wide.scales) == {(1.0, 1.0)} and not wide.eight_bits
    with pytest.raises(AssertionError, match="1 layers"):
        KvCache(config, scales=scales[:1], **sizes)


def test_it_computes_what_plain_attention_does_that_rounds(runtime):
    runtime.collect(runtime.launch(StepPlan(0, encode=(whole(picture()),))))
    image = ImageBlock("picture", 25)
    for tokens in ((0, 30, 31, 32, 33, 34), (0, image, 30, 31, 32)):
        row = Row(0, tokens, 0, table(0), None)
        batch = runtime.batch([row])
        prefix = 26 if image in tokens else 0
        attention = RoundedAttention(runtime.cache.scales, prefix)
        with torch.inference_mode():
            expected = runtime.model.text(batch.embeddings, batch.positions, attention)[-1]
        torch.testing.assert_close(runtime.hidden([row])[0], expected, **CLOSE)
        assert attention.saturated > 0, "the scales were to be too small for some values"


def test_chunks_and_cached_beginnings_change_nothing(runtime):
    runtime.collect(runtime.launch(StepPlan(0, encode=(whole(picture()),))))
    text = (0, *range(20, 37))
    with_picture = (0, ImageBlock("picture", 25), *range(20, 32))
    for tokens, cuts in ((text, [(1,), (4, 9), (16, 17)]), (with_picture, [(2,), (3, 4, 9)])):
        expected = stepwise(runtime, tokens, table(0), ())
        for cut in cuts:
            torch.testing.assert_close(stepwise(runtime, tokens, table(40), cut), expected, **CLOSE)


def test_neighbours_in_a_batch_change_nothing(runtime):
    runtime.collect(runtime.launch(StepPlan(0, encode=(whole(picture()),))))
    image = ImageBlock("picture", 25)
    # The first two share their image's pages, whose rows are then computed as a group.
    shared = table(0, 13)
    stepwise(runtime, (0, image), shared, ())
    pages = [(*shared, 22, 20, 21), (*shared, 35, 36, 37), table(40, 4)]
    starts = [26, 26, 3]
    prompts = [(40, 41), (42, 43, 44), (0, 45, 46)]
    rows = [
        Row(i, tokens, start if i < 2 else 0, own, None)
        for i, (tokens, start, own) in enumerate(zip(prompts, starts, pages, strict=True))
    ]
    together = runtime.hidden(rows)
    alone = torch.cat([runtime.hidden([row]) for row in rows])
    torch.testing.assert_close(together, alone, **CLOSE)
    ends = [28, 29, 3]
    steps = [Row(i, (50 + i,), end, pages[i], None) for i, end in enumerate(ends)]
    together = runtime.hidden(steps)
    alone = torch.cat([runtime.hidden([row]) for row in steps])
    torch.testing.assert_close(together, alone, **CLOSE)
