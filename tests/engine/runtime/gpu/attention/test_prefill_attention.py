"""Attention of a prefill pass against one softmax a query in float64, over pools whose unused slots hold NaN."""

from dataclasses import dataclass, field

import pytest
import torch
from torch.nn.attention import SDPBackend

from kestrel_engine.models.kv_format import EIGHT_BITS, gather, store
from kestrel_engine.runtime.gpu.attention import blocks as block_attention
from kestrel_engine.runtime.gpu.attention import prefill as prefill_attention
from kestrel_engine.runtime.gpu.attention.blocks import BlockAttention
from kestrel_engine.runtime.gpu.attention.prefill import PrefillAttention
from kestrel_engine.runtime.gpu.prefill import graphs as prefill_graphs
from kestrel_engine.runtime.gpu.prefill.batch import TextPart
from kestrel_engine.types.step import EncodeSlice, StepPlan
from tests.engine.runtime.gpu.small_models import gpu_runtime, picture, small_model, torch_runtime
from tests.engine.runtime.gpu.test_gpu_runtime import SIZES, TEXT, Talk, answers, image

LAYERS, HEADS, SIZE = 2, 3, 8
DIM = HEADS * SIZE
CPU = torch.device("cpu")


@dataclass
class Pass:
    """Rows laid out as the runtime does it: ``cached`` [(start, count)] of rows whose beginning is in the pool, and
    ``pictures``: how many text tokens follow each block of ``length``."""

    cached: list[tuple[int, int]]
    page_size: int
    pictures: list[int] = field(default_factory=list)
    length: int = 5
    spare: int = 0
    images: tuple[int, ...] = ()
    """Indices of the rows that are images later in a prompt."""

    def __post_init__(self):
        g = torch.Generator().manual_seed(len(self.cached) + 7 * self.page_size)
        rows = [(self.length, count) for count in self.pictures] + self.cached
        self.blocks = [f"picture {i}" for i in range(len(self.pictures))]
        self.block_length = self.length
        ends = [start + count for start, count in rows]
        num_pages = sum(-(-end // self.page_size) for end in ends) + 2
        free = torch.randperm(num_pages, generator=g).tolist()
        tables = [tuple(free.pop() for _ in range(-(-end // self.page_size))) for end in ends]
        begin = len(self.pictures) * self.length
        parts = []
        for row, ((start, count), table) in enumerate(zip(rows, tables, strict=True)):
            if count:
                key = "later" if row in self.images else None
                parts.append(TextPart(begin, count, start, table, row, key))
                begin += count
        self.text = tuple(parts)
        width = 3 * DIM + self.spare
        self.qkv = torch.randn(LAYERS, begin, width, generator=g)
        shape = (LAYERS, num_pages * self.page_size, HEADS, SIZE)
        self.keys, self.values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        stored = torch.randn(2, *shape, generator=g)
        for end, table in zip(ends, tables, strict=True):
            slots = self.slots(table, end)
            self.keys[:, slots], self.values[:, slots] = stored[0][:, slots], stored[1][:, slots]

    def slots(self, table, end):
        return [
            table[p // self.page_size] * self.page_size + p % self.page_size for p in range(end)
        ]

    def heads(self, layer):
        return self.qkv[layer, :, : 3 * DIM].unflatten(1, (3 * HEADS, SIZE)).chunk(3, dim=1)

    def expected(self, layer):
        q, k, v = (x.double() for x in self.heads(layer))
        out = torch.full((len(q), HEADS, SIZE), torch.nan, dtype=torch.float64)
        for block in range(len(self.pictures)):
            own = slice(block * self.length, (block + 1) * self.length)
            out[own] = attend(q[own], k[own], v[own])
        for part in self.text:
            for i in range(part.count):
                reach = part.start + (part.count if part.image else i + 1)
                seen = self.slots(part.page_table, reach)
                keys, values = self.keys[layer, seen].double(), self.values[layer, seen].double()
                at = slice(part.begin + i, part.begin + i + 1)
                out[at] = attend(q[at], keys, values)
        return out.flatten(1)

    def attention(self):
        return PrefillAttention(BlockAttention(), self, self.keys, self.values, self.page_size)


def attend(q, k, v):
    scores = torch.einsum("qhd,khd->hqk", q, k) * SIZE**-0.5
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def check(made):
    attention = made.attention()
    for layer in range(LAYERS):
        # The output may lie within a wider buffer, as it does left of the MLP's.
        wide = torch.full((made.qkv.shape[1], DIM + made.spare), torch.nan)
        out = wide[:, :DIM]
        assert attention(layer, *made.heads(layer), out) is out
        torch.testing.assert_close(out.double(), made.expected(layer), atol=2e-6, rtol=1e-5)
        assert wide[:, DIM:].isnan().all()


@pytest.mark.parametrize("page_size", [1, 5, 10])
@pytest.mark.parametrize("spare", [0, 16])
def test_images_and_text_of_many_rows(page_size, spare):
    cached = [(0, 4), (5, 1), (10, 3), (23, 7), (0, 1), (9, 2)]
    check(Pass(cached, page_size, pictures=[3, 0, 6], spare=spare))


@pytest.mark.parametrize("page_size", [1, 5])
def test_later_images_attend_in_both_directions(page_size):
    cached = [(0, 4), (9, 5), (10, 3), (23, 5)]
    check(Pass(cached, page_size, pictures=[3, 0, 6], images=(4, 6)))
    check(Pass(cached, page_size, images=(0, 1, 2, 3)))


def test_images_alone():
    made = Pass([], 5, pictures=[0, 0])
    assert not made.text
    check(made)


def test_text_alone():
    check(Pass([(0, 9)], 10))
    check(Pass([(40, 5), (3, 5)], 10))


def test_text_reads_a_pool_in_eight_bits_and_images_what_was_computed():
    made = Pass([(5, 1), (10, 3), (23, 7)], 5, pictures=[3])
    scales = [(0.01 * (layer + 1), 0.02) for layer in range(LAYERS)]
    stored = [torch.empty_like(pool).to(EIGHT_BITS) for pool in (made.keys, made.values)]
    for layer, pair in enumerate(scales):
        for pool, eight_bits, scale in zip((made.keys, made.values), stored, pair, strict=True):
            store(eight_bits[layer], torch.arange(pool.shape[1]), pool[layer], scale)
            # From here on they hold what is stored: text is expected to see that.
            pool[layer] = gather(eight_bits[layer], slice(None), scale, torch.float32)
    attention = PrefillAttention(BlockAttention(), made, *stored, made.page_size, scales)
    for layer in range(LAYERS):
        out = torch.full((made.qkv.shape[1], DIM), torch.nan)
        attention(layer, *made.heads(layer), out)
        torch.testing.assert_close(out.double(), made.expected(layer), atol=2e-6, rtol=1e-5)


def test_many_positions_come_in_several_calls(monkeypatch):
    monkeypatch.setattr(prefill_attention, "MAX_GATHERED", 20)
    check(Pass([(0, 4), (5, 1), (30, 3), (11, 7), (0, 1), (9, 2)], 5))


def test_images_are_for_cudnn_in_half_types_where_our_kernel_does_not_fit(monkeypatch):
    monkeypatch.setattr(block_attention, "works", lambda backend, probe: True)
    monkeypatch.setattr(block_attention.torch, "zeros", lambda *_, **__: None)
    cuda = torch.device("cuda")
    cudnn = BlockAttention(SDPBackend.CUDNN_ATTENTION)
    assert BlockAttention.choose(cuda, torch.bfloat16) == cudnn
    assert BlockAttention.choose(cuda, torch.float32) == BlockAttention()
    assert BlockAttention.choose(CPU, torch.bfloat16) == BlockAttention()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["moondream2", "moondream3"])
def test_the_runtime_answers_as_the_reference_without_captured_prompts(monkeypatch, family):
    def never(*_, **__):
        raise AssertionError("a captured pass's kernel")

    monkeypatch.setattr(prefill_graphs, "paged_text", never)
    config, tensors = small_model(family)
    single = picture("single", (1, 1), config, seed=2)
    found = []
    for each in (
        torch_runtime(config, tensors, **SIZES),
        gpu_runtime(config, tensors, cuda_graphs=False, **SIZES),
    ):
        each.collect(each.launch(StepPlan(0, encode=(EncodeSlice(single, 0, 2),))))
        talks = [
            Talk(0, [*image(config, "single"), 11, 12], [TEXT] * 5),
            Talk(1, [0, 21, 22, 23, 24], [TEXT] * 3, chunk=3),
            Talk(2, [0, *range(30, 46)], [TEXT] * 3),
        ]
        found.append({n: [t.id for t in tokens] for n, tokens in answers(each, talks).items()})
        each.close()
    assert found[0] == found[1]
