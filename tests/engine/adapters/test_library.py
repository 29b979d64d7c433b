"""Loaded adapters: bounds, the order in which they go, one reading for many requests, files that change."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kestrel_engine.adapters import library
from kestrel_engine.adapters.files import CheckedAdapter, Packer
from kestrel_engine.adapters.library import AdapterLibrary, Lease
from kestrel_engine.adapters.origins.origins import Origins
from kestrel_engine.errors import AdaptersFull, AdapterUnavailable, AdapterUnfit, EngineClosed
from kestrel_engine.runtime.gpu.adapters.layout import PROJECTOR, SlabLayout
from kestrel_engine.types.adapter import Adapter
from tests.engine.adapters.random_adapters import random_tensors
from tests.engine.models.small import small_config
from tests.waiting import until

MODEL, EXPERTS = small_config("moondream2"), small_config("moondream3")


class Reader:
    """Counts what is read, and waits with it while ``go`` is not set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.go = threading.Event()
        self.go.set()
        self._read = library.read
        monkeypatch.setattr(library, "read", self)

    def __call__(
        self, checked: CheckedAdapter, dtype: torch.dtype, packer: Packer | None
    ) -> Adapter:
        self.names.append(checked.found.name)
        assert self.go.wait(60)
        return self._read(checked, dtype, packer)


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Reader:
    return Reader(monkeypatch)


@pytest.fixture
async def adapters(tmp_path: Path) -> AsyncIterator[AdapterLibrary]:
    """Room for two of the adapters a, b and c."""
    for seed, name in enumerate("abc"):
        tensors = random_tensors(MODEL, seed, only=".mlp.")
        save_file(tensors, tmp_path / f"{name}.safetensors")
    size = sum(4 * tensor.numel() for tensor in tensors.values())
    made = AdapterLibrary(Origins(tmp_path), MODEL, dtype=torch.float32, max_bytes=5 * size // 2)
    yield made
    await made.close()


async def test_requests_share_one_reading(adapters: AdapterLibrary, reader: Reader) -> None:
    reader.go.clear()
    tasks = [asyncio.create_task(adapters.acquire("a")) for _ in range(5)]
    await until(lambda: reader.names)
    tasks.pop().cancel()  # One that ends early does not end the reading.
    reader.go.set()
    leases = await asyncio.gather(*tasks)
    assert len({id(lease.adapter) for lease in leases}) == 1
    assert reader.names == ["a"] and leases[0].adapter.name == "a"


async def test_the_least_recently_used_one_without_users_goes(
    adapters: AdapterLibrary, reader: Reader
) -> None:
    a = await adapters.acquire("a")
    (await adapters.acquire("b")).give_back()
    (await adapters.acquire("c")).give_back()  # b goes: a request uses a.
    assert (await adapters.acquire("a")).adapter is a.adapter
    (await adapters.acquire("b")).give_back()  # c goes.
    assert reader.names == ["a", "b", "c", "b"]


async def test_adapters_in_use_are_never_dropped(adapters: AdapterLibrary) -> None:
    a, b = await adapters.acquire("a"), await adapters.acquire("b")
    with pytest.raises(AdaptersFull, match="adapters in use take"):
        await adapters.acquire("c")
    a.give_back()
    c = await adapters.acquire("c")
    assert (b.adapter.name, c.adapter.name) == ("b", "c")


async def test_one_that_never_fits(adapters: AdapterLibrary, tmp_path: Path) -> None:
    save_file(random_tensors(MODEL, 9, rank=128), tmp_path / "large.safetensors")
    with pytest.raises(AdapterUnfit, match="the limit of all loaded adapters"):
        await adapters.acquire("large")
    assert (await adapters.acquire("a")).adapter.name == "a"


async def test_files_that_change_give_another_adapter(
    adapters: AdapterLibrary, tmp_path: Path
) -> None:
    old = await adapters.acquire("a")
    save_file(random_tensors(MODEL, 7, only=".mlp."), tmp_path / "new")
    os.replace(tmp_path / "new", tmp_path / "a.safetensors")
    new = await adapters.acquire("a")
    assert new.adapter.key != old.adapter.key
    with pytest.raises(AdaptersFull):  # The old one still takes its memory.
        await adapters.acquire("b")
    old.give_back()
    assert (await adapters.acquire("b")).adapter.name == "b"


@pytest.mark.parametrize("times", [1, 100])
async def test_files_that_are_replaced_while_they_are_read(
    adapters: AdapterLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    monkeypatch.setattr(library, "_PAUSE_S", 0.0)
    plain, num_reads = library.read, 0

    def replacing(checked: CheckedAdapter, dtype: torch.dtype, packer: Packer | None) -> Adapter:
        nonlocal num_reads
        num_reads += 1
        if num_reads <= times:
            new = random_tensors(MODEL, num_reads, rank=num_reads, only=".mlp.fc1")
            save_file(new, tmp_path / "new")
            os.replace(tmp_path / "new", tmp_path / "a.safetensors")
        return plain(checked, dtype, packer)

    monkeypatch.setattr(library, "read", replacing)
    if times > 1:
        with pytest.raises(AdapterUnavailable, match="'a' change while they are read; try again"):
            await adapters.acquire("a")
        assert adapters.counts.num_bytes == 0
        return
    lease = await adapters.acquire("a")
    assert {change.a.shape[0] for change in lease.adapter.weights.values()} == {1}
    assert adapters.counts.num_bytes == lease.adapter.num_bytes
    assert (await adapters.acquire("a")).adapter is lease.adapter and num_reads == 2


async def test_one_that_finds_no_room_drops_no_other(
    adapters: AdapterLibrary, tmp_path: Path, reader: Reader
) -> None:
    save_file(random_tensors(MODEL, 9, rank=8, only=".mlp."), tmp_path / "twice.safetensors")
    a = await adapters.acquire("a")
    (await adapters.acquire("b")).give_back()
    with pytest.raises(AdaptersFull, match="adapters in use take"):
        await adapters.acquire("twice")
    (await adapters.acquire("b")).give_back()
    assert reader.names == ["a", "b"]
    a.give_back()
    (await adapters.acquire("twice")).give_back()


async def test_a_failure_is_not_kept(adapters: AdapterLibrary, tmp_path: Path) -> None:
    path = tmp_path / "late.safetensors"
    path.write_bytes(b"half of it")
    with pytest.raises(
        AdapterUnfit, match=r"'late' can't be loaded: late\.safetensors: is damaged"
    ):
        await adapters.acquire("late")
    save_file(random_tensors(MODEL, 5, only=".mlp."), path)
    assert (await adapters.acquire("late")).adapter.name == "late"


async def test_the_number_that_waits_is_bounded(
    adapters: AdapterLibrary, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "MAX_LOADING", 1)
    reader.go.clear()
    first = asyncio.create_task(adapters.acquire("a"))
    await until(lambda: reader.names)
    with pytest.raises(AdaptersFull, match="1 adapters wait"):
        await adapters.acquire("b")
    reader.go.set()
    assert isinstance(await first, Lease)


async def test_close_fails_those_that_wait(adapters: AdapterLibrary, reader: Reader) -> None:
    reader.go.clear()
    waiting = asyncio.create_task(adapters.acquire("a"))
    await until(lambda: reader.names)
    closing = asyncio.create_task(adapters.close())
    with pytest.raises(EngineClosed):
        await waiting
    reader.go.set()
    await closing


async def test_the_host_keeps_what_the_device_drops(
    tmp_path: Path, reader: Reader, adapters: AdapterLibrary
) -> None:
    sent = []

    def upload(adapter: Adapter) -> Adapter:
        sent.append(adapter.name)
        return replace(adapter)

    size = (await adapters.acquire("a")).adapter.num_bytes
    reader.names.clear()
    made = AdapterLibrary(
        Origins(tmp_path),
        MODEL,
        dtype=torch.float32,
        max_bytes=size,
        host_bytes=2 * size,
        upload=upload,
    )
    for name in "abab":
        lease = await made.acquire(name)
        assert made.counts.loaded == (name,) and made.counts.num_bytes == size
        assert (made.counts.used, made.counts.most) == (1, 1)
        lease.give_back()
    assert reader.names == ["a", "b"] and sent == ["a", "b", "a", "b"]
    for name in "ca":  # c takes the place of a, which was used less recently than b.
        (await made.acquire(name)).give_back()
    assert reader.names == ["a", "b", "c", "a"]
    counts = made.counts
    assert (counts.loads, counts.failures, counts.host_bytes) == (6, 0, 2 * size)
    assert (counts.loaded, counts.loading, counts.used) == (("a",), (), 0)
    await made.close()


async def test_adapters_for_kernels(tmp_path: Path) -> None:
    """Their memory is that of their slabs, and one that the kernels can't compute fails alone."""
    cpu = torch.device("cpu")
    layout = SlabLayout(MODEL, torch.float32, cpu)
    save_file(random_tensors(MODEL, 1, rank=17, only=".mlp."), tmp_path / "a.safetensors")
    projector = random_tensors(MODEL, 1, rank=17, only="vision.proj_mlp", vision=True)
    save_file(projector, tmp_path / "b.safetensors")
    save_file(random_tensors(EXPERTS, 1, rank=17, only="mlp.fc2"), tmp_path / "c.safetensors")
    limits = {"max_bytes": 2 * layout.sizes["mlp"] * 4, "dtype": torch.float32}
    made = AdapterLibrary(Origins(tmp_path), MODEL, packer=layout, **limits)
    adapter = (await made.acquire("a")).adapter
    (slabs,) = adapter.slabs.values()
    assert slabs.shape == (2, layout.sizes["mlp"])
    assert adapter.num_bytes == limits["max_bytes"] == made.num_bytes and not adapter.weights
    assert not adapter.changes_vision
    with pytest.raises(AdaptersFull):
        await made.acquire("b")
    assert made.num_bytes == adapter.num_bytes
    await made.close()
    experts = SlabLayout(EXPERTS, torch.float32, cpu)
    limits["max_bytes"] = 1 << 30
    made = AdapterLibrary(Origins(tmp_path), EXPERTS, packer=experts, **limits)
    with pytest.raises(
        AdapterUnfit, match=r"'c' can't be applied: it .* rank 17; .* up to rank 16.*--no-compile"
    ):
        await made.acquire("c")
    sight = (await made.acquire("b")).adapter
    assert sight.changes_vision and not sight.changes_tower
    assert sight.slabs[PROJECTOR].shape == (2, experts.sizes[PROJECTOR])
    await made.close()
