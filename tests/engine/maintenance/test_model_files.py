"""A model fetched into the cache or a folder, found there without a hub, and verified: against the local stand-in."""

import hashlib
import json
from pathlib import Path

import pytest
from safetensors.torch import save

from kestrel_engine import RuntimeConfig, maintenance
from kestrel_engine.checkpoint.checksums import checksum, read_sums, recorded_by_hub
from kestrel_engine.checkpoint.hub import Hub
from kestrel_engine.errors import CheckpointError, DownloadError
from kestrel_engine.maintenance.model_download import download
from kestrel_engine.maintenance.model_verification import verify
from kestrel_engine.types.model_config import parse_model_config
from tests.checkpoint_loading import load_checkpoint
from tests.engine.checkpoint.conftest import random_tensors, raw_config
from tests.hub_stand import COMMIT, REPO, Stand, stand
from tests.tiny import TINY

__all__ = ["stand"]

TOKENIZER = json.dumps({"added_tokens": [{"id": 0, "content": "<|endoftext|>"}]}).encode()


def silent(done: int, total: int, what: str) -> None:
    assert 0 <= done <= max(total, done)


@pytest.fixture
def model(stand: Stand) -> Stand:
    raw = raw_config("moondream2")
    stand.add("config.json", json.dumps(raw).encode())
    stand.add("tokenizer.json", TOKENIZER)
    stand.add("model.safetensors", save(random_tensors(parse_model_config(raw))))
    return stand


@pytest.fixture
def hub(model: Stand, tmp_path: Path) -> Hub:
    return Hub(endpoint=model.url, cache_dir=tmp_path / "cache", progress=silent)


@pytest.fixture
def folder(hub: Hub, tmp_path: Path) -> Path:
    """What ``download --to`` makes."""
    download(RuntimeConfig(model=REPO), tmp_path / "model", hub=hub, progress=silent)
    return tmp_path / "model"


def verified(config, hub=None, **options):
    found = list(verify(config, hub=hub, progress=silent, **options))
    return {finding.check: (finding.status, finding.message) for finding in found}


def test_what_was_downloaded_is_found_offline(model: Stand, hub: Hub, tmp_path: Path) -> None:
    done = download(RuntimeConfig(model=REPO), hub=hub, progress=silent)
    assert [file.name for file in done.files] == [
        "model.safetensors",
        "config.json",
        "tokenizer.json",
    ]
    asked = len(model.requests)
    offline = Hub(cache_dir=tmp_path / "cache", offline=True, endpoint=model.url)
    assert not offline.online
    assert download(RuntimeConfig(model=REPO), hub=offline).files == done.files
    assert len(model.requests) == asked
    empty = Hub(cache_dir=tmp_path / "none", offline=True, endpoint=model.url)
    with pytest.raises(DownloadError, match=r"not in the cache .*offline was asked for"):
        download(RuntimeConfig(model=REPO), hub=empty)
    assert len(model.requests) == asked


def test_a_folder_needs_no_hub_and_has_checksums(folder: Path, model: Stand) -> None:
    names = {"model.safetensors", "config.json", "tokenizer.json"}
    assert {file.name for file in folder.iterdir()} == names | {"SHA256SUMS"}
    assert not any(file.is_symlink() for file in folder.iterdir())
    sums = read_sums(folder)
    assert sums == {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in names}
    asked = len(model.requests)
    config = RuntimeConfig(model_path=folder, offline=True)
    assert download(config).name == "model"
    assert [status for status, _ in verified(config).values()] == ["ok"] * 4
    assert len(model.requests) == asked


def test_shards_are_copied_with_their_index(tmp_path: Path) -> None:
    raw, source = raw_config("moondream2"), tmp_path / "source"
    tensors = random_tensors(parse_model_config(raw))
    source.mkdir()
    names = list(tensors)
    parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for part, held in parts.items():
        (source / part).write_bytes(save({name: tensors[name] for name in held}))
    index = {"weight_map": {name: part for part, held in parts.items() for name in held}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    (source / "config.json").write_text(json.dumps(raw))
    (source / "tokenizer.json").write_bytes(TOKENIZER)
    (source / "notes.txt").touch()
    done = download(RuntimeConfig(model_path=source), tmp_path / "copy", progress=silent)
    assert {file.name for file in done.files} == {file.name for file in source.iterdir()} - {
        "notes.txt"
    }
    assert verified(RuntimeConfig(model_path=tmp_path / "copy"))["checksums"][0] == "ok"


def test_a_folder_copied_onto_itself_keeps_its_files(folder: Path) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    download(RuntimeConfig(model_path=folder), folder, progress=silent)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_a_folder_that_cannot_be_written(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DownloadError, match="can't write into"):
        download(RuntimeConfig(model=REPO), tmp_path / "file", hub=hub, progress=silent)


def test_what_is_no_model_is_not_copied(model: Stand, hub: Hub, tmp_path: Path) -> None:
    tensors = random_tensors(parse_model_config(raw_config("moondream2")))
    tensors.pop("text.wte")
    model.add("model.safetensors", save(tensors))
    with pytest.raises(CheckpointError, match=r"1 missing: text\.wte"):
        download(RuntimeConfig(model=REPO), tmp_path / "model", hub=hub, progress=silent)
    assert not (tmp_path / "model").exists()


def test_the_hub_said_what_its_files_are(model: Stand, hub: Hub) -> None:
    config = RuntimeConfig(model=REPO)
    found = verified(config, hub)
    assert [status for status, _ in found.values()] == ["ok"] * 4
    assert found["checksums"][1] == "3 files match the checksums recorded by the hub"
    weights = download(config, hub=hub).files[0]
    fingerprint = load_checkpoint(weights).fingerprint
    assert found["values"][1].endswith(fingerprint)
    target = weights.resolve()
    data = bytearray(target.read_bytes())
    data[-1] ^= 1
    target.write_bytes(data)
    status, told = verified(config, hub)["checksums"]
    assert (status, told) == (
        "fail",
        "model.safetensors: differs from the checksum recorded by the hub",
    )


def test_the_hub_is_asked_for_files_that_came_another_way(
    folder: Path, model: Stand, hub: Hub
) -> None:
    (folder / "SHA256SUMS").unlink()
    config = RuntimeConfig(model=REPO, model_path=folder)
    assert verified(config, hub)["checksums"] == (
        "ok",
        "3 files match the checksums recorded by the hub",
    )
    assert verified(RuntimeConfig(model_path=folder), hub)["checksums"][0] == "warn"
    offline = Hub(endpoint=model.url, offline=True)
    assert verified(config, offline)["checksums"][0] == "warn"
    gone = Hub(endpoint="http://127.0.0.1:9")
    assert verified(config, gone)["checksums"][0] == "warn"
    downloads = [method for method, _, _ in model.requests].count("GET")
    (folder / "tokenizer.json").write_bytes(TOKENIZER + b" ")
    found = verified(config, hub)["checksums"]
    assert found == ("fail", "tokenizer.json: differs from the checksum recorded by the hub")
    assert [method for method, _, _ in model.requests].count("GET") == downloads
    del model.files[REPO, COMMIT, "tokenizer.json"]
    assert verified(config, hub)["checksums"][0] == "warn"


def test_small_files_have_gits_checksums(tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / "ce013625030ba8dba906f756967f9e9ca394464a"
    blob.parent.mkdir()
    blob.write_bytes(b"hello\n")
    link = tmp_path / "config.json"
    link.symlink_to(blob)
    assert recorded_by_hub(link) == blob.name
    assert checksum(link, like=blob.name) == blob.name
    assert recorded_by_hub(blob) is None


def test_a_changed_file_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(TOKENIZER + b" ")
    found = verified(RuntimeConfig(model_path=folder))
    assert found["checksums"] == (
        "fail",
        "tokenizer.json: differs from the checksum recorded by SHA256SUMS",
    )
    assert found["values"][0] == "ok"


def test_without_a_record_one_can_be_made(folder: Path) -> None:
    config = RuntimeConfig(model_path=folder)
    (folder / "SHA256SUMS").unlink()
    status, told = verified(config)["checksums"]
    assert (status, told.partition(" for ")[0]) == ("warn", "no checksum is recorded")
    assert verified(config, record=True)["checksums"][0] == "ok"
    assert verified(config)["checksums"] == (
        "ok",
        "3 files match the checksums recorded by SHA256SUMS",
    )
    (folder / "SHA256SUMS").write_text("abc  ../x\n")
    assert verified(config)["checksums"][0] == "fail"


def test_the_bundled_model_is_as_recorded() -> None:
    found = verified(RuntimeConfig())
    assert [status for status, _ in found.values()] == ["ok"] * 4
    assert found["checksums"][1] == "4 files match the checksums recorded by SHA256SUMS"


def test_the_public_functions_stay_functions_once_they_were_called(tmp_path):
    """Importing a submodule binds its name in the package: it must not be a function's."""
    for _ in range(2):
        maintenance.download(RuntimeConfig(model_path=TINY), tmp_path)
        assert list(maintenance.verify(RuntimeConfig(model_path=tmp_path)))
