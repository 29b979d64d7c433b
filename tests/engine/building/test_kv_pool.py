"""The pool's size from numbers alone."""

from dataclasses import replace

import pytest

from kestrel_engine import InsufficientMemoryError, RuntimeConfig
from kestrel_engine.building.kv_pool import GIB, Pool, least_positions, plan_pool
from kestrel_engine.building.room import LEAST_PREFIX_BYTES, prefix_pages
from kestrel_engine.types.model_config import parse_model_config
from tests.engine.fakes import fake_build
from tests.engine.scheduler.simulation import LIMITS
from tests.fake_runtime import FakeRuntime

MD2 = parse_model_config({}, family="moondream2")
MD3 = parse_model_config({}, family="moondream3")
PAGE_BYTES = 2 * 24 * 10 * 2048 * 2
"""Ten positions of the released shapes in bfloat16."""


def plan(
    free_bytes, reserve_bytes=0, model=MD2, max_batch_size=64, page_bytes=PAGE_BYTES, **config
):
    return plan_pool(
        free_bytes,
        reserve_bytes,
        page_bytes,
        RuntimeConfig(**config),
        model,
        page_size=10,
        max_batch_size=max_batch_size,
    )


def test_nine_tenths_of_what_computing_leaves_become_pages():
    pool = plan(100 * GIB, 10 * GIB)
    assert pool == Pool(int(81 * GIB) // PAGE_BYTES, 2048)
    assert plan(100 * GIB, 10 * GIB, MD3).max_seq_length == 32768


def test_a_small_model_takes_what_it_can_use_and_no_more():
    pool = plan(100 * GIB, max_batch_size=2)
    assert pool.num_pages == 8 * 2 * 205
    assert plan(None, max_batch_size=2) == pool, "a device that tells nothing"


def test_a_given_size_holds_exactly():
    assert plan(100 * GIB, kv_cache_gib=3.5).num_pages == int(3.5 * GIB) // PAGE_BYTES
    assert plan(100 * GIB, kv_cache_pages=300) == Pool(300, 2048)
    assert plan(100 * GIB, kv_cache_pages=100).max_seq_length == 1000
    assert plan(5 * GIB, GIB, kv_cache_gib=4.0).num_pages == 4 * GIB // PAGE_BYTES, (
        "all of the room"
    )


def test_what_cannot_be_held_says_what_to_lower():
    with pytest.raises(InsufficientMemoryError) as caught:
        plan(5 * GIB, GIB, kv_cache_gib=4.01)
    assert "takes 4.01 GiB; the weights leave 5.00 GiB and computing needs 1.00 GiB" in str(
        caught.value
    )
    assert "lower --kv-cache-gib to at most 4, or --max-batch-size (now 64)" in str(caught.value)
    with pytest.raises(InsufficientMemoryError, match="lower kv_cache_pages to at most 2184"):
        plan(5 * GIB, GIB, kv_cache_pages=3000)


def test_no_room_for_one_image_says_what_to_lower():
    with pytest.raises(InsufficientMemoryError) as caught:
        plan(1 * GIB, GIB - 2**20)
    for words in (
        "hold 0 pages",
        "an image takes 73 pages",
        "--max-batch-size (now 64)",
        "--step-crops",
    ):
        assert words in str(caught.value)
    with pytest.raises(InsufficientMemoryError, match="0 pages"):
        plan(GIB, 2 * GIB)


def test_the_least_that_a_pool_must_hold_is_what_the_warm_up_takes():
    assert least_positions(MD2) == 730 + 5 + 2
    enough = -(-least_positions(MD2) // 10)
    assert plan(int((enough + 0.5) * PAGE_BYTES / 0.9)).num_pages == enough
    with pytest.raises(InsufficientMemoryError):
        plan(int((enough - 0.5) * PAGE_BYTES / 0.9))


@pytest.mark.parametrize(
    ("weights_bytes", "config", "device", "pages"),
    [
        (6 * GIB, {}, "cpu", 250),
        (GIB, {}, "cpu", 1000 * LEAST_PREFIX_BYTES // (8 * GIB)),
        (6 * GIB, {"kv_cache_gib": 8}, "cpu", None),
        (6 * GIB, {"kv_cache_pages": 1000}, "cpu", None),
        (6 * GIB, {}, "cuda:0", None),
    ],
)
def test_prefixes_are_limited_on_a_cpu_whose_pool_has_no_set_size(
    weights_bytes, config, device, pages
):
    settings = RuntimeConfig(**config)
    info = fake_build(settings, FakeRuntime(LIMITS)).info
    sizes = {"num_pages": 1000, "kv_cache_bytes": 8 * GIB, "weights_bytes": weights_bytes}
    assert prefix_pages(settings, replace(info, device=device, **sizes)) == pages
