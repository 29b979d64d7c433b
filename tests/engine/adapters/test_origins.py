"""Adapters from the hub and from the tuning API: real transfers from local stand-ins, and every way that they fail."""

import asyncio
import copy
import io
import logging
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from kestrel_engine.adapters.library import AdapterLibrary
from kestrel_engine.adapters.origins import origins, tuning
from kestrel_engine.adapters.origins.disk import LIST_NAME
from kestrel_engine.adapters.origins.origins import Origins
from kestrel_engine.config.adapters import AdapterSources
from kestrel_engine.errors import (
    AdapterNotFound,
    AdapterRefused,
    AdaptersFull,
    AdapterUnavailable,
    AdapterUnfit,
    ConfigError,
    EngineClosed,
)
from tests.clock import MovedClock
from tests.engine.adapters.random_adapters import random_tensors
from tests.engine.models.small import small_config
from tests.hub_stand import COMMIT, OLDER, Stand, stand
from tests.tuning_stand import KEY, TuningStand
from tests.tuning_stand import tuning as api
from tests.waiting import until

__all__ = ["api", "stand"]

MODEL = small_config("moondream2")
REPO, FINE_TUNE = "team/scratches", "01J5Z3NDEKTSV4RRFFQ69G5FAV@1000"
Make = Callable[..., AdapterLibrary]


def content(seed: int, rank: int = 4) -> bytes:
    return save(random_tensors(MODEL, seed, rank, only=".mlp."))


@pytest.fixture
async def make(stand: Stand, api: TuningStand, tmp_path: Path) -> AsyncIterator[Make]:
    """Makes a library whose callers may name what the stand-ins have."""
    made = []

    def library(**options: Any) -> AdapterLibrary:
        sources = AdapterSources(
            **{"hub": ("team/*",), "api": api.url, "api_key": KEY} | options.pop("sources", {})
        )
        options = {"folder": None, "downloads": tmp_path / "disk", "endpoint": stand.url} | options
        folder = options.pop("folder")
        library = AdapterLibrary(
            Origins(folder, sources, **options), MODEL, dtype=torch.float32, max_bytes=1 << 24
        )
        made.append(library)
        return library

    yield library
    for each in made:
        await each.close()


def entries(tmp_path: Path) -> list[Path]:
    return [each for each in (tmp_path / "disk").iterdir() if len(each.name) == 40]


async def test_a_repository(make: Make, stand: Stand, tmp_path: Path) -> None:
    stand.add("adapter_model.safetensors", content(1), repo=REPO)
    stand.add("adapter_config.json", b'{"lora_alpha": 8, "r": 4}', repo=REPO)
    stand.add("README.md", b"unneeded", repo=REPO)
    stand.add("old.safetensors", content(2), repo=REPO, commit=OLDER)
    library = make()
    first = await library.acquire(REPO)
    plain = random_tensors(MODEL, 1, only=".mlp.")["text.blocks.0.mlp.fc1.B"]
    torch.testing.assert_close(first.adapter.weights["text.blocks.0.mlp.fc1"].b, 2 * plain)
    assert (await library.acquire(REPO)).adapter is first.adapter
    assert (await library.acquire(f"{REPO}@v1")).adapter.key != first.adapter.key
    # A commit needs no look-up, and what is on the disk no transfer.
    again = await make().acquire(f"{REPO}@{COMMIT}")
    assert again.adapter.key == first.adapter.key
    assert len(stand.asked("GET", "adapter_model.safetensors")) == 1
    assert not stand.asked("GET", "README.md") and len(entries(tmp_path)) == 2


async def test_a_fine_tune(make: Make, api: TuningStand, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    tensors = {f"text_lora.dense.0.up_{side}": torch.ones(shape) for side, shape in (
        ("a", (2, MODEL.text.dim)), ("b", (MODEL.text.ff_dim, 2)))}  # fmt: skip
    file = io.BytesIO()
    torch.save({"lora_state_dict": tensors}, file)
    api.files[FINE_TUNE] = file.getvalue()
    api.statuses["/files/"] = [403]  # The address has expired: another one is asked for.
    lease = await make().acquire(FINE_TUNE)
    assert list(lease.adapter.weights) == ["text.blocks.0.mlp.fc1"]
    (first, second), files = api.asked("/v1/"), api.asked("/files/")
    assert first["X-Moondream-Auth"] == second["X-Moondream-Auth"] == KEY
    assert len(files) == 2 and not any("X-Moondream-Auth" in headers for headers in files)
    assert KEY not in caplog.text and "signature" not in caplog.text
    assert KEY not in repr(AdapterSources(api=api.url, api_key=KEY))


async def test_the_operators_folder_comes_first(
    make: Make, api: TuningStand, tmp_path: Path
) -> None:
    save_file(random_tensors(MODEL, 1, only=".proj"), tmp_path / f"{FINE_TUNE}.safetensors")
    assert (await make(folder=tmp_path).acquire(FINE_TUNE)).adapter.weights
    with pytest.raises(AdapterNotFound, match="the tuning API has no adapter 'other@1'"):
        await make(folder=tmp_path).acquire("other@1")
    assert len(api.requests) == 1


async def test_callers_choose_only_what_the_settings_allow(
    make: Make, stand: Stand, api: TuningStand, tmp_path: Path
) -> None:
    stand.add("adapter.safetensors", content(1), repo="other/model")
    library = make(sources={"hub": ("team/scr*", "other/one"), "api": None})
    for name in ("other/model", "team/dents", "team/Scratches"):
        with pytest.raises(AdapterRefused, match=r"takes no adapters from .* \(--adapter-hub\)"):
            await library.acquire(name)
    for name in (FINE_TUNE, "scratches"):
        with pytest.raises(AdapterNotFound, match=r"there is no adapter .* \(--adapters-dir\)"):
            await library.acquire(name)
    local = AdapterLibrary(Origins(tmp_path), MODEL, dtype=torch.float32, max_bytes=1)
    with pytest.raises(AdapterRefused):
        await local.acquire(REPO)
    await local.close()
    assert not stand.requests and not api.requests


async def test_many_requests_share_one_transfer(make: Make, api: TuningStand) -> None:
    """Also those of several processes, which libraries of one folder stand for: the locks belong to open files."""
    api.files[FINE_TUNE] = content(1)
    api.go.clear()
    libraries = [make() for _ in range(3)]
    tasks = [asyncio.create_task(each.acquire(FINE_TUNE)) for each in libraries for _ in range(4)]
    await until(lambda: api.asked("/files/"))
    tasks.pop().cancel()
    api.go.set()
    keys = {lease.adapter.key for lease in await asyncio.gather(*tasks)}
    assert len(keys) == 1 and len(api.asked("/files/")) == 1


async def test_damage_on_the_disk_is_repaired(
    make: Make, api: TuningStand, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    api.files[FINE_TUNE] = content(1)
    key = (await make().acquire(FINE_TUNE)).adapter.key

    def flip(entry: Path) -> None:
        data = bytearray((entry / "adapter.safetensors").read_bytes())
        data[-1] ^= 1
        (entry / "adapter.safetensors").write_bytes(data)

    damages: list[Callable[[Path], object]] = [
        flip,
        lambda entry: (entry / "adapter.safetensors").unlink(),
        lambda entry: (entry / LIST_NAME).write_text("{"),
        lambda entry: (entry / LIST_NAME).write_text('{"files": {"../../x": "0"}}'),
        lambda entry: (entry / "another.safetensors").touch(),
        lambda entry: (entry / LIST_NAME).unlink(),
        lambda entry: shutil.rmtree(entry.parent),
    ]
    library = make()  # Also of a server that runs while the folder is emptied.
    for number, damage in enumerate(damages):
        damage(*entries(tmp_path))
        for entry in list(library._entries.values()):
            library._drop(entry)
        assert (await library.acquire(FINE_TUNE)).adapter.key == key
        assert len(api.asked("/files/")) == 2 + number
    assert caplog.text.count("is damaged") == 6


async def test_the_disk_is_bounded(make: Make, api: TuningStand, tmp_path: Path) -> None:
    names = [f"A{number}@1" for number in range(4)]
    for seed, name in enumerate(names):
        api.files[name] = content(seed)
    size = len(api.files[names[0]])
    sources = {"disk_bytes": 5 * size // 2}
    for name in (*names[:2], names[0], names[2]):  # The third deletes the second.
        await make(sources=sources).acquire(name)
    transfers = len(api.asked("/files/"))
    await make(sources=sources).acquire(names[0])
    assert len(entries(tmp_path)) == 2 and len(api.asked("/files/")) == transfers
    # What is being read stays.
    disk = make(sources=sources).origins.disk
    assert disk is not None
    keys = [f"tuning {api.url} {name}" for name in names]
    with disk.open(keys[0], "a", None), disk.open(keys[2], "c", None):
        with pytest.raises(AdaptersFull, match="of the disk"):
            await make(sources=sources).acquire(names[3])
    await make(sources=sources).acquire(names[3])
    assert len(entries(tmp_path)) == 2
    api.files["Large@1"] = bytes(3 * size)
    with pytest.raises(AdapterUnfit, match=f"has {3 * size} bytes; this server downloads"):
        await make(sources=sources).acquire("Large@1")
    assert not list((tmp_path / "disk").glob("*.*"))


async def test_what_a_killed_process_left_is_deleted(make: Make, tmp_path: Path) -> None:
    left = tmp_path / "disk" / f"{'0' * 40}.partial"
    left.mkdir(parents=True)
    (left / "adapter").write_bytes(b"half")
    make()
    assert not left.exists()


HUB_FAILURES = [
    ((404, "RepoNotFound"), AdapterNotFound, "the hub has no adapter"),
    ((401, "RepoNotFound"), AdapterNotFound, "the hub has no adapter"),
    ((403, "GatedRepo"), AdapterRefused, "is gated"),
    ((403, ""), AdapterRefused, "refuses"),
    ((503, ""), AdapterUnavailable, "answers 503"),
]


@pytest.mark.parametrize(("refusal", "kind", "words"), HUB_FAILURES)
async def test_what_the_hub_refuses(
    make: Make, stand: Stand, refusal: tuple[int, str], kind: type[Exception], words: str
) -> None:
    stand.refuse[REPO] = refusal
    library = make()
    for _ in range(3):
        with pytest.raises(kind, match=words):
            await library.acquire(REPO)
    assert len(stand.requests) <= (1 if refusal[0] != 503 else 6)  # A failure is remembered.


async def test_repositories_that_hold_no_adapter(make: Make, stand: Stand) -> None:
    stand.add("README.md", b"nothing", repo="team/empty")
    for name in ("one.safetensors", "two.safetensors"):
        stand.add(name, content(1), repo="team/two")
    stand.add("model.safetensors", save(random_tensors(small_config("moondream3"), 1)), repo="team/md3")  # fmt: skip
    stand.add("sub/adapter_model.safetensors", content(1), repo="team/sub")
    library = make()
    cases = {
        "team/empty": "holds no file of tensors",
        "team/two": "holds several files of tensors and no adapter_model.safetensors",
        "team/md3": "expected",
        "team/sub": "holds no file of tensors",
    }
    for name, words in cases.items():
        with pytest.raises(AdapterUnfit, match=words) as told:
            await library.acquire(name)
        assert "/disk/" not in str(told.value)
    for name in ("team/a..b", "team/none", f"{REPO}@v9"):
        with pytest.raises(AdapterNotFound):
            await library.acquire(name)


async def test_a_wrong_checksum_of_the_hub(make: Make, stand: Stand, tmp_path: Path) -> None:
    stand.add("adapter_model.safetensors", content(1), repo=REPO)
    stand.told["adapter_model.safetensors"] = "0" * 64
    with pytest.raises(AdapterUnavailable, match="arrived damaged"):
        await make().acquire(REPO)
    assert not entries(tmp_path)


async def test_a_failure_is_remembered_for_some_seconds(
    moved_clock: MovedClock, make: Make, stand: Stand
) -> None:
    library = make()
    with pytest.raises(AdapterNotFound):
        await library.acquire(REPO)
    asked = len(stand.requests)
    stand.add("adapter_model.safetensors", content(1), repo=REPO)
    moved_clock.advance(0.5 * origins.FAILURE_S)
    with pytest.raises(AdapterNotFound):
        await library.acquire(REPO)
    assert len(stand.requests) == asked
    moved_clock.advance(0.5 * origins.FAILURE_S)
    assert (await library.acquire(REPO)).adapter.name == REPO


async def test_without_the_hub_the_disk_serves(
    moved_clock: MovedClock, make: Make, stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand.add("adapter_model.safetensors", content(1), repo=REPO)
    library = make()
    key = (await library.acquire(REPO)).adapter.key
    stand.add("adapter_model.safetensors", content(2), repo=REPO, commit=OLDER)
    stand.revisions["main"] = OLDER
    offline = make(offline=True)
    assert (await offline.acquire(REPO)).adapter.key == key
    with pytest.raises(AdapterUnavailable, match="it is offline"):
        await offline.acquire("team/other")
    with pytest.raises(AdapterUnavailable, match="it is offline"):
        await offline.acquire(FINE_TUNE)
    # A branch is looked up again, beside the request that finds it old.
    monkeypatch.setattr(origins, "REFRESH_S", -1.0)
    assert (await make().acquire(REPO)).adapter.key != key
    moved_clock.advance(3600)
    assert (await library.acquire(REPO)).adapter.key == key
    await asyncio.gather(*library.origins.looking.values())
    assert (await library.acquire(REPO)).adapter.key != key
    moved_clock.advance(3600)
    stand.refuse[REPO] = (503, "")
    await library.acquire(REPO)
    await asyncio.gather(*library.origins.looking.values())
    assert (await library.acquire(REPO)).adapter.key != key


API_FAILURES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"statuses": {"/v1/": [401]}}, AdapterRefused, "refuses .* to this server's key"),
    ({"statuses": {"/v1/": [404]}}, AdapterNotFound, "has no adapter"),
    ({"statuses": {"/v1/": [500]}}, AdapterUnavailable, "answers 500"),
    ({"statuses": {"/v1/": [302]}}, AdapterUnavailable, "answers 302"),
    ({"statuses": {"/files/": [302]}}, AdapterUnavailable, "answers 302"),
    ({"statuses": {"/files/": [403, 403]}}, AdapterUnavailable, "answers 403"),
    ({"address": "http://169.254.169.254/latest"}, AdapterUnavailable, "no valid address"),
    ({"address": "file:///etc/passwd"}, AdapterUnavailable, "no valid address"),
    ({"address": "https://user@host/x"}, AdapterUnavailable, "no valid address"),
    ({"answer": b"[" * 5000}, AdapterUnavailable, "no valid address"),
    ({"answer": b'{"url": 7}'}, AdapterUnavailable, "no valid address"),
    ({"answer": b" " * 70000}, AdapterUnavailable, "no valid address"),
    ({"is_cut": True}, AdapterUnavailable, "broke off"),
    ({"files": {FINE_TUNE: b"no tensors"}}, AdapterUnfit, "can't be loaded"),
]


@pytest.mark.parametrize(("state", "kind", "words"), API_FAILURES)
async def test_what_the_tuning_api_does_wrong(
    make: Make, api: TuningStand, state: dict[str, Any], kind: type[Exception], words: str
) -> None:
    api.files[FINE_TUNE] = content(1)
    for name, value in state.items():
        setattr(api, name, copy.deepcopy(value))  # The stand-in takes from its lists.
    library = make()
    with pytest.raises(kind, match=words) as told:
        await library.acquire(FINE_TUNE)
    assert KEY not in str(told.value) and "signature" not in str(told.value)
    asked = len(api.requests)
    with pytest.raises(kind, match=words):
        await library.acquire(FINE_TUNE)
    assert len(api.requests) == asked  # A failure is remembered.


async def test_a_file_of_unknown_length_is_bounded(make: Make, api: TuningStand) -> None:
    api.files[FINE_TUNE] = content(1)
    api.has_length = False
    with pytest.raises(AdapterUnavailable, match="more bytes than it announced"):
        await make(most_bytes=len(api.files[FINE_TUNE]) - 1).acquire(FINE_TUNE)
    assert (await make(most_bytes=len(api.files[FINE_TUNE])).acquire(FINE_TUNE)).adapter.weights


async def test_nobody_answers(make: Make) -> None:
    sources = {"api": "http://127.0.0.1:9"}
    library = make(sources=sources, endpoint="http://127.0.0.1:9")
    for name in (FINE_TUNE, REPO):
        with pytest.raises(AdapterUnavailable, match=r"can't be .*try again later"):
            await library.acquire(name)


async def test_the_number_of_look_ups_is_bounded(
    make: Make, stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origins, "MAX_WAITING", 2)
    library = make()
    tasks = [asyncio.create_task(library.acquire(f"team/{number}")) for number in range(5)]
    kinds = [type(each) for each in await asyncio.gather(*tasks, return_exceptions=True)]
    assert kinds.count(AdaptersFull) == 3 and kinds.count(AdapterNotFound) == 2


async def test_close_ends_a_transfer(make: Make, api: TuningStand) -> None:
    api.files[FINE_TUNE] = content(1)
    api.go.clear()
    first, second = make(), make()
    tasks = [asyncio.create_task(each.acquire(FINE_TUNE)) for each in (first, second)]
    await until(lambda: api.asked("/files/"))
    closing = [asyncio.create_task(each.close()) for each in (first, second)]
    for task in tasks:
        with pytest.raises(EngineClosed):
            await task
    api.go.set()
    await asyncio.gather(*closing)


async def test_close_ends_a_look_up(make: Make, stand: Stand) -> None:
    library = make()
    task = asyncio.create_task(library.acquire(REPO))
    while not library.origins.looking:
        await asyncio.sleep(0)
    await library.close()
    with pytest.raises(EngineClosed):
        await task


async def test_the_key_may_be_in_a_file(make: Make, api: TuningStand, tmp_path: Path) -> None:
    api.files[FINE_TUNE] = content(1)
    key = tmp_path / "key"
    library = make(sources={"api_key": None, "api_key_file": key})
    with pytest.raises(AdapterRefused, match="can't be read"):
        await library.acquire(FINE_TUNE)
    key.write_text(f"{KEY}\n")
    library.origins._known.clear()
    await library.acquire(FINE_TUNE)
    key.write_text("one\r\nX-Other: two")
    with pytest.raises(AdapterRefused, match="is not a line"):
        await library.acquire("other@1")


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ({"hub": ("team",)}, "must be ORG/REPO"),
        ({"hub": ("*/*",)}, "must be ORG/REPO"),
        ({"api": "http://api.example"}, "must begin with https://"),
        ({"api": "https://user:secret@api.example"}, "must be like https://HOST"),
        ({"api": "https://api.example/?x=1"}, "must be like https://HOST"),
        ({"disk_bytes": 0}, "must be a whole number of bytes"),
    ],
)
def test_settings_that_are_wrong(sources: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as told:
        AdapterSources(**sources)
    assert "secret" not in str(told.value)


def test_settings_that_are_wrong_on_this_machine(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a key: set MOONDREAM_API_KEY"):
        Origins(None, AdapterSources(api="https://api.example"), downloads=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can't be written"):
        Origins(None, AdapterSources(hub=("team/*",)), downloads=tmp_path / "file")


def test_the_stand_in_speaks_the_route_of_the_reference() -> None:
    sources = AdapterSources(api="https://api.moondream.ai", api_key=KEY)
    wanted = tuning.FineTune("01J5", "7")
    assert tuning.TuningApi(sources).key(wanted) == "tuning https://api.moondream.ai 01J5@7"
