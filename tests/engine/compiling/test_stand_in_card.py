"""On the stand-in for a card, tensors have the shapes, strides and alignment that they have on a card."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kestrel_engine import ConfigError
from kestrel_engine.compiling.cards import CARDS, card_of
from kestrel_engine.compiling.stand_in_card import stand_in
from kestrel_engine.runtime.gpu.room import can_leave_room

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")

CUDA = torch.device("cuda:0")


@pytest.fixture
def on_card() -> Iterator[None]:
    with stand_in(card_of("sm_90")):
        yield


def test_torch_tells_of_the_card_inside_only() -> None:
    with stand_in(card_of("sm_90", 114)):
        assert torch.cuda.is_available() and torch.cuda.get_device_capability(CUDA) == (9, 0)
        assert torch.cuda.get_device_properties(CUDA).multi_processor_count == 114
    assert not torch.cuda.is_available()


@pytest.mark.usefixtures("on_card")
def test_parts_have_their_places_and_no_memory() -> None:
    whole = torch.zeros(1 << 20, 1 << 10, dtype=torch.bfloat16, device=CUDA)
    other = torch.empty_like(whole)
    base = whole.data_ptr()
    assert whole.is_cuda and base % 512 == 0 and other.data_ptr() != base
    part = whole[3:9, 8:]
    assert (part.shape, part.stride()) == ((6, 1016), (1024, 1))
    assert part.data_ptr() - base == 2 * (3 * 1024 + 8)
    assert whole[2].data_ptr() - base == 4096 and whole[..., None, 5].shape == (1 << 20, 1)
    assert whole[:, torch.tensor([1, 2])].shape == (1 << 20, 2)
    assert whole.view(-1, 2)[1].data_ptr() - base == 4
    whole[3:9] = 0


@pytest.mark.usefixtures("on_card")
def test_what_writes_returns_what_it_writes_to() -> None:
    x = torch.zeros(3, 4, device=CUDA)
    out = torch.empty(3, 3, device=CUDA)
    assert torch.mm(x, x.T, out=out) is out
    assert x.addmm_(out, x) is x and x.normal_() is x
    found = torch.addmm(out, x, x.T)
    assert found.is_cuda and found.shape == (3, 3) and found.data_ptr() != out.data_ptr()


@pytest.mark.usefixtures("on_card")
def test_copies_to_the_host_leave_real_memory() -> None:
    host = torch.full((4,), 7, dtype=torch.int32, pin_memory=True)
    on_device = host.to(CUDA, non_blocking=True)
    assert on_device.is_cuda and on_device.dtype == torch.int32
    back = torch.empty(4, dtype=torch.int32)
    back.zero_().copy_(on_device)
    assert back.tolist() == [0, 0, 0, 0] and host.numpy().tolist() == [7] * 4


@pytest.mark.usefixtures("on_card")
def test_attention_has_the_layout_of_its_queries() -> None:
    q = torch.zeros(2, 5, 3, 4, 8, device=CUDA).permute(2, 0, 3, 1, 4)[0]
    found = F.scaled_dot_product_attention(q, q, q)
    assert found.shape == q.shape and found.transpose(1, 2).is_contiguous()


@pytest.mark.usefixtures("on_card")
def test_streams_and_graphs_do_nothing() -> None:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(CUDA)
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=torch.cuda.graph_pool_handle())
        graph.capture_end()
    graph.replay()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    assert event.query() and event.elapsed_time(event) == 0


@pytest.mark.parametrize(
    ("arch", "multiprocessors", "dtype", "leaves"),
    [
        ("sm_90", 132, torch.bfloat16, True),
        ("sm_90", 114, torch.float16, True),
        ("sm_90", 16, torch.bfloat16, False),  # a seventh of a card
        ("sm_90", 132, torch.float32, False),
        ("sm_80", 108, torch.bfloat16, False),
    ],
)
def test_which_cards_leave_room(
    arch: str, multiprocessors: int, dtype: torch.dtype, leaves: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    with stand_in(card_of(arch, multiprocessors)):
        assert can_leave_room(CUDA, dtype) is leaves
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
        assert not can_leave_room(CUDA, dtype), "there is no cuBLAS"


def test_unknown_cards_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"arch='sm_75'.*sm_80"):
        card_of("sm_75")
    with pytest.raises(ConfigError, match="from 1 to 1024"):
        card_of("sm_90", 0)
    assert {card.compute_capability for card in CARDS.values()} >= {(8, 0), (9, 0)}
