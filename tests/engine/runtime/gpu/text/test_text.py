"""The fused decoder against the plain one on the CPU: prompts, then steps of one token a row. Without a GPU its kernels
are interpreted."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kestrel_engine.models.attention import PagedAttention, Span
from kestrel_engine.models.moondream import Moondream
from kestrel_engine.runtime.gpu import gemm
from kestrel_engine.runtime.gpu.text import decode_step as text_decode
from kestrel_engine.runtime.gpu.text.decoder import FusedText
from kestrel_engine.runtime.gpu.text.options import TextOptions
from kestrel_engine.runtime.gpu.weights import pack_weights
from kestrel_engine.types.model_config import ModelConfig
from tests.checkpoint_loading import load_checkpoint
from tests.engine.models.small import in_four_bits, random_tensors, small_config, with_fp8_experts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CLOSE = 1e-5 if DEVICE.type == "cpu" else 5e-5
"""exp and tanh of a GPU are units off in the last place."""
FAMILIES = ["moondream2", "moondream3"]
PAGE = 5
PAGES = [[7, 3, 9, 1, 4], [12, 2, 6, 8, 5], [0, 11, 13, 14, 10]]
SPARE = 15


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@dataclass
class Pair:
    """The same weights in both decoders, the plain one's on the CPU, each with its own pool; sequence i has the pages
    ``PAGES[i]``. What goes in and comes out is on the CPU."""

    model: Moondream
    fused: FusedText
    plain_pool: tuple[Tensor, Tensor]
    pool: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, config: ModelConfig, tensors: dict[str, Tensor], **options) -> Pair:
        there = {name: tensor.to(DEVICE, copy=True) for name, tensor in tensors.items()}
        options = {"max_rows": 4, "page_size": PAGE} | options
        fused = FusedText(config.text, pack_weights(config, there), TextOptions(**options))
        text = config.text
        shape = (2, text.n_layers, (SPARE + 1) * PAGE, text.n_heads, text.head_dim)
        pools = [
            tuple(torch.full(shape, torch.nan, device=device).unbind())
            for device in ("cpu", DEVICE)
        ]
        return cls(Moondream(config, tensors), fused, pools[0], pools[1])

    def prefill(self, sequence: int, x: Tensor, prefix: int, rows: Tensor | None = None):
        """Both decoders' streams of a prompt whose first ``prefix`` positions see one another."""
        count = len(x)
        places, slots = slice(0, count), slots_of(sequence, count)
        mask = torch.ones(count, count, dtype=torch.bool).tril()
        mask[:prefix, :prefix] = True
        spans = [Span(slice(prefix, count), fresh=places, causal=True)]
        if prefix:
            spans.append(Span(slice(0, prefix), fresh=slice(0, prefix)))
        expected = self.model.text(
            x, torch.arange(count), PagedAttention(*self.plain_pool, slots, spans, [])
        )

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
            heads_first = (part.transpose(0, 1) for part in (q, k, v))
            out.copy_(
                F.scaled_dot_product_attention(*heads_first, attn_mask=mask.to(DEVICE))
                .transpose(0, 1)
                .flatten(1)
            )

        actual = self.fused.prefill(
            x.to(DEVICE, copy=True),
            torch.arange(count, device=DEVICE),
            slots.to(DEVICE),
            attention,
            *self.pool,
            rows=None if rows is None else rows.to(DEVICE),
        )
        return actual.cpu(), expected

    def decode(self, positions: dict[int, int], x: Tensor, padding: int = 0, **options):
        """Both decoders' streams of one token for each sequence at its position."""
        spans, slots = [], []
        for row, (sequence, position) in enumerate(positions.items()):
            seen = slots_of(sequence, position + 1)
            spans.append(Span(slice(row, row + 1), slots=seen))
            slots.append(seen[-1])
        at = list(positions.values())
        attention = PagedAttention(*self.plain_pool, torch.stack(slots), spans, [])
        expected = self.model.text(x, torch.tensor(at), attention)
        table = torch.full((len(PAGES) + 1, 7), SPARE, dtype=torch.int32)
        table[: len(PAGES), : len(PAGES[0])] = torch.tensor(PAGES)
        row_seq = [*positions, *[len(PAGES)] * padding]
        actual = self.fused.decode(
            torch.cat([x, torch.randn(padding, x.shape[1])]).to(DEVICE),
            torch.tensor([*at, *[0] * padding], dtype=torch.int32, device=DEVICE),
            torch.tensor(row_seq, dtype=torch.int32, device=DEVICE),
            table.to(DEVICE),
            *self.pool,
            **options,
        )
        return actual[: len(x)].cpu(), expected

    def check_pools(self) -> None:
        used = slice(0, SPARE * PAGE)
        for actual, expected in zip(self.pool, self.plain_pool, strict=True):
            torch.testing.assert_close(
                actual[:, used].cpu(), expected[:, used], atol=CLOSE, rtol=CLOSE, equal_nan=True
            )


def slots_of(sequence: int, count: int) -> Tensor:
    return torch.tensor([PAGES[sequence][p // PAGE] * PAGE + p % PAGE for p in range(count)])


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.cpu(), expected, atol=CLOSE, rtol=CLOSE)


def small_pair(family: str, **options) -> Pair:
    config = small_config(family)
    return Pair.of(config, random_tensors(config), **options)


@pytest.mark.parametrize(
    ("family", "inline_tau"),
    [
        ("moondream2", 0),  # Without tau attention there is one way.
        ("moondream3", 64),
        pytest.param("moondream3", 0, marks=pytest.mark.slow),
    ],
)
def test_a_prompt_and_steps_of_several_sequences(family, inline_tau, monkeypatch):
    """Four rows with a launch for what tau needs, and with a GEMM that leaves it."""
    monkeypatch.setattr(text_decode, "INLINE_TAU_ROWS", inline_tau)
    pair = small_pair(family)
    torch.manual_seed(1)
    lengths = {0: 11, 2: 4, 1: 1}
    for sequence, length in lengths.items():
        assert_same(*pair.prefill(sequence, torch.randn(length, 32), prefix=min(length, 7)))
    for step in range(2):
        positions = {sequence: length + step for sequence, length in lengths.items()}
        assert_same(*pair.decode(positions, torch.randn(3, 32), padding=1))
    pair.check_pools()


@pytest.mark.slow_with("moondream2")
@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_in_four_bits(family, whole, few, monkeypatch):
    """Few rows read them, more rows widen them. Where parts of a joined weight can't all stay, none does."""
    if not few:
        for module, limit in (
            (text_decode, "MAX_ROWS"),
            (text_decode, "MAX_TOKENS"),
            (gemm, "MAX_ROWS"),
        ):
            monkeypatch.setattr(module, limit, 2)
    config = small_config(family)
    if whole:
        moe = config.text.moe
        moe = None if moe is None else replace(moe, expert_inner_dim=32)
        config = replace(config, text=replace(config.text, ff_dim=64, moe=moe))
    pair = Pair.of(config, in_four_bits(random_tensors(config)))
    kept = {
        linear.weight.dtype for layer in pair.fused.layers for linear in (layer.proj, layer.writes)
    }
    assert kept == {torch.uint8} if whole else torch.float32 in kept
    torch.manual_seed(1)
    lengths = {0: 11, 2: 4, 1: 1}
    for sequence, length in lengths.items():
        assert_same(*pair.prefill(sequence, torch.randn(length, 32), prefix=min(length, 7)))
    positions = dict(lengths)
    assert_same(*pair.decode(positions, torch.randn(3, 32), padding=1))
    pair.check_pools()


@pytest.mark.slow_with(False)
@pytest.mark.parametrize("fp8", [False, True])
def test_experts_that_begin_ahead_change_no_bit(fp8, monkeypatch):
    """Steps whose router computes the LayerNorm, and the same steps with a LayerNorm in front of the router."""
    config = small_config("moondream3")
    tensors = random_tensors(config)
    tensors = with_fp8_experts(config, tensors) if fp8 else tensors
    torch.manual_seed(2)
    prompts = torch.randn(3, 4, 32)
    tokens = [torch.randn(rows, 32) for rows in (1, 2, 3, 3, 1)]
    found = []
    for ahead in (range(0), range(1, 4)):
        monkeypatch.setattr(text_decode, "AHEAD_ROWS", ahead)
        pair = Pair.of(config, tensors)
        for sequence, prompt in enumerate(prompts):
            pair.prefill(sequence, prompt, 1)
        streams, lengths = [], [len(prompt) for prompt in prompts]
        for x in tokens:
            normed = torch.empty(len(x), 32, device=DEVICE)
            positions = dict(enumerate(lengths[: len(x)]))
            streams += [pair.decode(positions, x, normed=normed)[0], normed.cpu()]
            lengths = [length + (i < len(x)) for i, length in enumerate(lengths)]
        found.append((streams, *pair.pool))
    (plain, *plain_pool), (ahead, *ahead_pool) = found
    for one, other in zip([*plain, *plain_pool], [*ahead, *ahead_pool], strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.slow_with("moondream3")
@pytest.mark.parametrize("family", FAMILIES)
def test_only_wanted_rows_come_back(family):
    pair = small_pair(family)
    rows = torch.tensor([8, 2])
    actual, expected = pair.prefill(0, torch.randn(9, 32), 4, rows)
    assert_same(actual, expected[rows])


def test_logits_are_those_of_the_stream_and_of_its_norm():
    pair = small_pair("moondream2")
    pair.prefill(0, torch.randn(6, 32), 1)
    normed = torch.empty(2, 32, device=DEVICE)
    hidden, _ = pair.decode({0: 6}, torch.randn(1, 32), padding=1, normed=normed)
    assert_same(pair.fused.logits(hidden.to(DEVICE)), pair.model.text.logits(hidden))
    assert_same(
        pair.fused.logits(hidden.to(DEVICE), normed=normed[:1]), pair.model.text.logits(hidden)
    )
    many = torch.randn(70, 32)
    assert_same(pair.fused.logits(many.to(DEVICE)), pair.model.text.logits(many))


@pytest.mark.slow_with("moondream2")
@pytest.mark.parametrize("family", FAMILIES)
def test_more_rows_than_the_streaming_kernels_take(family, monkeypatch):
    for limit in ("MAX_ROWS", "MAX_TOKENS"):
        monkeypatch.setattr(text_decode, limit, 2)
    pair = small_pair(family)
    for sequence in range(3):
        pair.prefill(sequence, torch.randn(4, 32), 1)
    assert_same(*pair.decode({0: 4, 1: 4, 2: 4}, torch.randn(3, 32)))


def test_a_step_larger_than_its_buffers_is_refused():
    pair = small_pair("moondream2", max_rows=2)
    with pytest.raises(AssertionError, match="3 rows"):
        pair.decode({0: 0, 1: 0, 2: 0}, torch.randn(3, 32))


def test_experts_may_stay_in_fp8():
    config = small_config("moondream3")
    pair = Pair.of(config, with_fp8_experts(config, random_tensors(config)))
    actual, expected = pair.prefill(0, torch.randn(6, 32), 3)
    # Products with FP8 weights round to float16.
    torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)
    actual, expected = pair.decode({0: 6}, torch.randn(1, 32))
    torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.slow_with("md3")
@pytest.mark.golden
@pytest.mark.parametrize("model", ["md2", "md3"])
def test_golden_weights(golden_folder, model):
    loaded = load_checkpoint(golden_folder(model))
    # Interpreted, each layer takes seconds: one of each kind says enough.
    moe = loaded.config.text.moe
    text = replace(loaded.config.text, n_layers=2 if moe is None else moe.start_layer + 1)
    pair = Pair.of(replace(loaded.config, text=text), loaded.tensors)
    torch.manual_seed(2)
    embedded = pair.model.text.embed(torch.randint(0, 1000, (8,)))
    assert_same(*pair.prefill(1, embedded, prefix=6))
    x = pair.model.text.embed(torch.randint(0, 1000, (1,)))
    assert_same(*pair.decode({1: 8}, x, padding=1))
    pair.check_pools()
