"""Downloads through the real huggingface_hub from a local stand-in that speaks the hub's file endpoints."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save

from kestrel_engine.checkpoint.catalog import HubCheckpoint, HubFile
from kestrel_engine.checkpoint.hub import Hub
from kestrel_engine.checkpoint.open import open_model
from kestrel_engine.config.runtime import RuntimeConfig
from kestrel_engine.errors import ConfigError, DownloadError
from tests.hub_stand import OLDER, REPO, Stand, stand

__all__ = ["stand"]

TOKENIZER = json.dumps({"added_tokens": [{"id": 0, "content": "<|endoftext|>"}]}).encode()


@pytest.fixture
def hub(stand: Stand, tmp_path: Path) -> Hub:
    return Hub(endpoint=stand.url, cache_dir=tmp_path / "cache", progress=lambda *_: None)


def test_a_file_comes_once_with_progress(stand: Stand, tmp_path: Path) -> None:
    content = os.urandom(100_000)
    stand.add("weights.safetensors", content)
    seen: list[tuple[int, int, str]] = []
    hub = Hub(endpoint=stand.url, cache_dir=tmp_path, progress=lambda *r: seen.append(r))
    for _ in range(2):
        assert hub.fetch(HubFile(REPO, "main", "weights.safetensors")).read_bytes() == content
    assert len(stand.asked("GET", "weights.safetensors")) == 1
    assert seen[-1] == (100_000, 100_000, "org/model/weights.safetensors")


def test_revisions_are_pinned(stand: Stand, hub: Hub) -> None:
    stand.add("f.txt", b"new")
    stand.add("f.txt", b"old", commit=OLDER)
    assert hub.fetch(HubFile(REPO, "main", "f.txt")).read_bytes() == b"new"
    assert hub.fetch(HubFile(REPO, "v1", "f.txt")).read_bytes() == b"old"
    assert hub.fetch(HubFile(REPO, OLDER, "f.txt")).read_bytes() == b"old"


def test_a_broken_transfer_is_resumed_where_it_stopped(stand: Stand, hub: Hub) -> None:
    content = os.urandom(24 * 2**20)
    stand.add("big.safetensors", content)
    stand.cut.add("big.safetensors")
    assert hub.fetch(HubFile(REPO, "main", "big.safetensors")).read_bytes() == content
    gets = stand.asked("GET", "big.safetensors")
    assert len(gets) == 2
    # The library writes in pieces of 10 MiB: of the 12 that came, one piece was kept.
    kept = int(re.fullmatch(r"bytes=(\d+)-", gets[1]["Range"])[1])  # type: ignore[index]
    assert 0 < kept <= 12 * 2**20


def test_index_and_shards_come_together(stand: Stand, hub: Hub) -> None:
    index = {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "m-1.safetensors"}}
    stand.add("model.safetensors.index.json", json.dumps(index).encode())
    stand.add("m-1.safetensors", b"1")
    stand.add("m-2.safetensors", b"2")
    stand.add("unneeded.bin", b"3")
    path = hub.fetch_checkpoint(HubCheckpoint(REPO))
    assert sorted(p.name for p in path.parent.iterdir()) == [
        "m-1.safetensors",
        "m-2.safetensors",
        "model.safetensors.index.json",
    ]
    assert hub.fetch_optional(HubFile(REPO, "main", "config.json")) is None


def test_shards_in_a_folder_of_the_repository(stand: Stand, hub: Hub) -> None:
    index = {"weight_map": {"a": "m-1.safetensors"}}
    stand.add("sub/w.safetensors.index.json", json.dumps(index).encode())
    stand.add("sub/m-1.safetensors", b"1")
    path = hub.fetch_checkpoint(HubCheckpoint(REPO, "main", "sub/w.safetensors.index.json"))
    assert (path.parent / "m-1.safetensors").read_bytes() == b"1"


def test_the_single_file_is_the_second_choice_and_then_a_name_is_asked_for(
    stand: Stand, hub: Hub
) -> None:
    stand.add("model.safetensors", b"x")
    assert hub.fetch_checkpoint(HubCheckpoint(REPO)).name == "model.safetensors"
    stand.add("other.pt", b"y", repo="org/odd")
    with pytest.raises(DownloadError, match="name the file: org/odd@main:FILE"):
        hub.fetch_checkpoint(HubCheckpoint("org/odd"))
    assert hub.fetch_checkpoint(HubCheckpoint("org/odd", "main", "other.pt")).read_bytes() == b"y"


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ((401, "RepoNotFound"), ["does not exist or is private", "(401)", "HF_TOKEN", "hf auth login"]),
        ((403, "GatedRepo"), ["gated", "request access at https://huggingface.co/org/secret", "HF_TOKEN"]),
        ((401, "GatedRepo"), ["gated", "request access", "HF_TOKEN"]),
        ((403, ""), ["(403)", "HF_TOKEN", "hf auth login"]),
        ((404, "RepoNotFound"), ["not on the hub (404)"]),
    ],
)  # fmt: skip
def test_refusals_say_what_to_do(
    stand: Stand, hub: Hub, refusal: tuple[int, str], words: list[str]
) -> None:
    stand.refuse["org/secret"] = refusal
    for fetch in (hub.fetch, hub.fetch_optional):
        with pytest.raises(DownloadError) as caught:
            fetch(HubFile("org/secret", "main", "config.json"))
        message = str(caught.value)
        assert "org/secret" in message and "\n" not in message and "Traceback" not in message
        for word in words:
            assert word in message
        assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_absent_revisions_and_files_are_named(stand: Stand, hub: Hub) -> None:
    stand.add("f.txt", b"x")
    with pytest.raises(DownloadError, match="org/model has no revision 'v9'"):
        hub.fetch(HubFile(REPO, "v9", "f.txt"))
    with pytest.raises(DownloadError, match=r"org/model@main has no file 'g.txt'"):
        hub.fetch(HubFile(REPO, "main", "g.txt"))
    with pytest.raises(DownloadError, match="not a hub id"):
        hub.fetch(HubFile("org/--bad..id", "main", "f.txt"))


def test_offline_the_cache_serves_and_what_is_not_there_is_explained(
    stand: Stand, hub: Hub, tmp_path: Path
) -> None:
    stand.add("model.safetensors", b"weights")
    hub.fetch_checkpoint(HubCheckpoint(REPO))
    offline = Hub(endpoint="http://127.0.0.1:9", cache_dir=tmp_path / "cache")
    assert offline.fetch_checkpoint(HubCheckpoint(REPO)).read_bytes() == b"weights"
    assert offline.fetch_optional(HubFile(REPO, "main", "config.json")) is None
    for checkpoint in (HubCheckpoint("org/new"), HubCheckpoint("org/new", "v1", "w.safetensors")):
        with pytest.raises(DownloadError) as caught:
            offline.fetch_checkpoint(checkpoint)
        for word in ("can't be reached", "not in the cache", "hf download org/new", "--weights"):
            assert word in str(caught.value)


def test_a_cache_that_can_not_be_written_is_named(stand: Stand, tmp_path: Path) -> None:
    stand.add("f.txt", b"x")
    (tmp_path / "file").touch()
    hub = Hub(endpoint=stand.url, cache_dir=tmp_path / "file")
    with pytest.raises(DownloadError, match=r"f\.txt of org/model@main"):
        hub.fetch(HubFile(REPO, "main", "f.txt"))


@pytest.fixture
def model(stand: Stand, raw_of, config_of, random_of) -> Stand:
    stand.add("config.json", json.dumps(raw_of("moondream2")).encode())
    stand.add("tokenizer.json", TOKENIZER)
    stand.add("model.safetensors", save(random_of(config_of("moondream2"))))
    return stand


def test_a_hub_model_opens(model: Stand, hub: Hub, config_of) -> None:
    opened = open_model(RuntimeConfig(model="org/model@main"), hub=hub)
    assert opened.name == "org/model@main" and opened.config == config_of("moondream2")
    assert opened.tokenizer_path.read_bytes() == TOKENIZER
    assert not opened.plan.faults


def test_a_wrong_setting_costs_no_download(model: Stand, hub: Hub) -> None:
    with pytest.raises(ConfigError, match="max_seq_length"):
        open_model(RuntimeConfig(model=REPO, max_seq_length=100_000), hub=hub)
    assert not model.asked("GET", "model.safetensors")


@pytest.mark.slow
def test_the_librarys_environment_is_honoured(model: Stand, tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_HOME and HF_TOKEN are read when the library is imported: a process of its own."""
    code = (
        "from kestrel_engine.checkpoint.open import open_model; "
        "from kestrel_engine.config.runtime import RuntimeConfig; "
        f"print(open_model(RuntimeConfig(model='{REPO}')).files[0])"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    environment |= {
        "HF_ENDPOINT": model.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": "hf_secret",
    }

    def run(**extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            cwd=Path(__file__).parents[3],
            env=environment | extra,
            capture_output=True,
            text=True,
            timeout=60,
        )

    first = run()
    assert first.returncode == 0, first.stderr
    assert Path(first.stdout.strip()).is_relative_to(tmp_path / "home")
    assert model.asked("GET", "model.safetensors")[0]["authorization"] == "Bearer hf_secret"
    before = len(model.requests)
    assert run(HF_HUB_OFFLINE="1").stdout == first.stdout
    assert len(model.requests) == before
