"""Several models on one device: a model that is loaded later leaves the others what they may still take."""

import gc
import mmap
import threading
from pathlib import Path
from weakref import WeakKeyDictionary

import pytest
import torch
from torch._utils import _get_device_index

from kestrel_engine import InsufficientMemoryError, RuntimeConfig
from kestrel_engine.building import factory, room, runtimes
from kestrel_engine.building.claims import CLAIMS, Claims, claim_of
from kestrel_engine.building.kv_pool import GIB
from kestrel_engine.checkpoint.weights import memory
from kestrel_engine.runtime.kv_cache import untouched_bytes
from kestrel_engine.types.model_config import parse_model_config
from kestrel_engine.types.step import RuntimeLimits
from tests.fake_runtime import FakeRuntime

CARD = torch.device("cuda:0")
LIMITS = RuntimeLimits(
    num_pages=200, page_size=2, max_batch_size=3, max_seq_length=300, vocab_size=400
)
MD2 = parse_model_config({}, family="moondream2")
WEIGHTS = 4 * GIB
PAGE_BYTES = 2 * 24 * 10 * 2048 * 2


def fake() -> FakeRuntime:
    return FakeRuntime(LIMITS, lambda fed: 0)


def plan(kernels: bool = True, **settings: object) -> room.Plan:
    config = RuntimeConfig(**settings)  # type: ignore[arg-type]
    return room.Plan(config, MD2, CARD, torch.bfloat16, kernels, None, None, None)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A card with 20 GiB free, and without the claims of other tests' models, which may not be collected yet."""
    monkeypatch.setattr(CLAIMS, "_live", WeakKeyDictionary())
    free = {"bytes": 20 * GIB}
    monkeypatch.setattr(memory, "device_available", lambda device: free["bytes"])
    return free


def test_what_a_running_model_may_take_is_not_planned_again(card: dict[str, int]) -> None:
    alone = room.plan_of_pool(plan(), None).num_pages
    runtime = fake()
    CLAIMS.add(runtime, claim_of("first", CARD, 9 * GIB, lambda: 2 * GIB))
    beside = room.plan_of_pool(plan(), None).num_pages
    assert alone - beside == pytest.approx(0.9 * 2 * GIB / PAGE_BYTES, abs=1)
    assert CLAIMS.available(torch.device("cuda:1")) == 20 * GIB
    del runtime
    gc.collect()
    assert room.plan_of_pool(plan(), None).num_pages == alone


def test_a_running_model_on_a_card_owes_its_passes_and_caches(
    card: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = fake()
    monkeypatch.setattr(runtimes, "_gpu_runtime", lambda plan, tensors, refiner: (runtime, 0.0))
    for settings in ({}, {"crop_cache_bytes": 1 << 30}):
        chosen = plan(**settings)
        found, _ = runtimes.runtime_of(chosen, {"w": torch.empty(1000)}, None, "first")
        staying, passing = room.beside_weights(chosen, None)
        assert staying + passing == settings.get("crop_cache_bytes", 0) + room.reserve_of(
            chosen.config, MD2, torch.bfloat16, chosen.sizes
        )
        assert found is runtime and CLAIMS.available(CARD) == 20 * GIB - passing
        held = 4000 + staying + LIMITS.num_pages * PAGE_BYTES
        assert [claim.holds for claim in CLAIMS.of(CARD)] == [held]


def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_read(
    card: dict[str, int],
) -> None:
    runtime = fake()
    CLAIMS.add(runtime, claim_of("first", CARD, 59 * GIB, lambda: 3 * GIB // 2))
    room.fitted(plan(), None, WEIGHTS)
    card["bytes"] = 5 * GIB
    with pytest.raises(InsufficientMemoryError) as caught:
        room.fitted(plan(), None, WEIGHTS)
    assert "the weights take 4.00 GiB, and 3.50 GiB are available on cuda:0" in str(caught.value)
    held = "; on cuda:0, first holds 59.00 GiB and may take 1.50 GiB more"
    assert str(caught.value).endswith(held)
    card["bytes"] = 6 * GIB
    with pytest.raises(InsufficientMemoryError, match=r"the weights leave 0\.50 GiB and computing"):
        room.fitted(plan(), None, WEIGHTS)
    card["bytes"] = 20 * GIB
    with pytest.raises(InsufficientMemoryError, match=r"lower --kv-cache-gib to at most .*; on cu"):
        room.fitted(plan(kv_cache_gib=15.0), None, WEIGHTS)


def test_a_small_card_gets_smaller_steps(card: dict[str, int]) -> None:
    weights = 1990 << 20  # Moondream 2's in 4 bits.
    assert room.fitted(plan(), None, weights).sizes == RuntimeConfig().sizes(cuda=True)
    card["bytes"] = 3 * GIB
    sizes = room.fitted(plan(), None, weights).sizes
    assert (sizes.max_batch_size, sizes.step_crops) == (2, 1)
    assert room.fitted(plan(max_batch_size=3), None, weights).sizes.max_batch_size == 3
    with pytest.raises(InsufficientMemoryError, match=r"lower --max-batch-size \(now 64\) or --st"):
        room.fitted(plan(max_batch_size=64, step_crops=48), None, weights)
    card["bytes"] = 5 * GIB // 2
    with pytest.raises(InsufficientMemoryError, match="more; use a narrower --precision, or a de"):
        room.fitted(plan(), None, weights)


def test_a_limit_on_the_memory_of_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"mem_get_info": (60 * GIB, 80 * GIB), "memory_reserved": GIB, "is_initialized": True}
    for name, value in (told | {"current_device": 1}).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    shares = {0: 0.25}

    def share_of(device: int) -> float:
        """As torch's, which takes no device without an index."""
        return shares[_get_device_index(device)]

    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", share_of)
    for share, free in ((1.0, 60), (0.5, 39), (0.8, 60), (0.01, 0)):
        shares[1] = share
        assert memory.device_available(torch.device("cuda")) == free * GIB
    assert memory.device_available(torch.device("cuda", 0)) == 19 * GIB


def test_plain_operators_on_a_card_need_more(card: dict[str, int]) -> None:
    assert (
        room.plan_of_pool(plan(kernels=False), None).num_pages
        < room.plan_of_pool(plan(), None).num_pages
    )


def test_no_weight_is_read_without_room(
    golden_folder, monkeypatch: pytest.MonkeyPatch, card: dict[str, int]
) -> None:
    def read(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("kestrel_engine.checkpoint.open.load_weights", read)
    card["bytes"] = 10 << 20
    config = RuntimeConfig(model_path=golden_folder("md2"), device="cpu")
    with pytest.raises(InsufficientMemoryError, match=r"the weights take 16\.9 MiB, and 10\.0 MiB"):
        factory.build(config)


def test_pages_that_the_host_has_not_given_are_left_to_the_first_model(
    golden_folder, card: dict[str, int]
) -> None:
    def build() -> factory.Built:
        path: Path = golden_folder("md2")
        return factory.build(RuntimeConfig(model_path=path, device="cpu", kv_cache_gib=0.5))

    first = build()
    pool = first.info.kv_cache_bytes
    owed = 20 * GIB - CLAIMS.available(torch.device("cpu"))
    assert 0.9 * pool < owed <= pool
    first.runtime.cache.keys.zero_()
    left = 20 * GIB - CLAIMS.available(torch.device("cpu"))
    assert 0.4 * pool < left < 0.6 * pool
    second = build()
    assert 20 * GIB - CLAIMS.available(torch.device("cpu")) > 1.4 * pool
    first.runtime.close()
    second.runtime.close()
    assert CLAIMS.available(torch.device("cpu")) == 20 * GIB


def test_untouched_memory_is_counted() -> None:
    # Memory of torch.empty may be that of an earlier test.
    fresh = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(fresh, dtype=torch.uint8)
    assert untouched_bytes(tensor) > 0.9 * tensor.nbytes
    tensor[: 32 << 20] = 1
    assert 0.4 * tensor.nbytes < untouched_bytes(tensor) < 0.6 * tensor.nbytes
    tensor.fill_(1)
    assert untouched_bytes(tensor) == untouched_bytes(torch.empty(0)) == 0
    assert untouched_bytes(torch.empty(8, device="meta")) == 0


def test_one_model_at_a_time_is_loaded_to_a_device() -> None:
    claims, order = Claims(), list[str]()
    entered, leave = threading.Event(), threading.Event()

    def first() -> None:
        with claims.turn(CARD):
            entered.set()
            assert leave.wait(60)
            order.append("first")

    def second() -> None:
        with claims.turn(CARD):
            order.append("second")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert entered.wait(60)
    threads[1].start()
    with claims.turn(torch.device("cuda:1")):
        order.append("other device")
    leave.set()
    for thread in threads:
        thread.join(60)
    assert order == ["other device", "first", "second"]
