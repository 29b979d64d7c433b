"""Attention of a prefill pass against one softmax a query in float64, over pools whose unused slots hold NaN."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from kestrel_engine.errors import ConfigError
from kestrel_engine.models.kv_format import EIGHT_BITS, gather, store
from kestrel_engine.runtime.gpu.attention import prefill as prefill_attention
from kestrel_engine.runtime.gpu.attention.flashinfer_paged import FlashInfer, page_indices
from kestrel_engine.runtime.gpu.attention.prefill import PrefillAttention, choose_attention
from kestrel_engine.runtime.gpu.prefill.batch import TextPart

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
        choice = choose_attention("torch", CPU, torch.float32)
        return PrefillAttention(choice, self, self.keys, self.values, self.page_size)


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
    choice = choose_attention("torch", CPU, torch.float32, EIGHT_BITS)
    attention = PrefillAttention(choice, made, *stored, made.page_size, scales)
    for layer in range(LAYERS):
        out = torch.full((made.qkv.shape[1], DIM), torch.nan)
        attention(layer, *made.heads(layer), out)
        torch.testing.assert_close(out.double(), made.expected(layer), atol=2e-6, rtol=1e-5)


def test_many_positions_come_in_several_calls(monkeypatch):
    monkeypatch.setattr(prefill_attention, "MAX_GATHERED", 20)
    check(Pass([(0, 4), (5, 1), (30, 3), (11, 7), (0, 1), (9, 2)], 5))


def test_auto_is_torch_where_there_is_no_gpu():
    for name in ("auto", "torch", "triton"):
        assert choose_attention(name, CPU, torch.float32).name == "torch"


def test_flashinfer_by_name_says_what_it_needs():
    with pytest.raises(ConfigError, match="needs CUDA and bfloat16 or float16"):
        choose_attention("flashinfer", CPU, torch.bfloat16)
    with pytest.raises(ConfigError, match="must be auto"):
        choose_attention("fastest", CPU, torch.bfloat16)
    with pytest.raises(ConfigError, match="can't read a KV cache in FP8"):
        choose_attention("flashinfer", CPU, torch.bfloat16, torch.float8_e4m3fn)


def test_flashinfer_missing_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "flashinfer", None)
    with pytest.raises(ConfigError, match="install flashinfer-python"):
        FlashInfer(torch.device("cuda", 0), torch.bfloat16)


def test_page_indices():
    made = page_indices([(7, 3, 9), (4,), (8, 2)], [11, 10, 20], 10)
    assert made.pages.tolist() == [7, 3, 4, 8, 2]  # The first needs no third page yet.
    assert made.bounds.tolist() == [0, 2, 3, 5]
    assert made.last.tolist() == [1, 10, 10]
    assert {x.dtype for x in (made.pages, made.bounds, made.last)} == {np.dtype(np.int32)}
