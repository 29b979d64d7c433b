from pathlib import Path

import pytest

from kestrel_engine.checkpoint.catalog import BUNDLED, KNOWN, STARMIE, HubCheckpoint, resolve
from kestrel_engine.errors import ConfigError


def test_known_models() -> None:
    assert list(KNOWN) == [
        "kestrel-small",
        "moondream2",
        "moondream3-preview",
        "moondream3.1-9b-a2b",
    ]
    bundled = resolve("kestrel-small")
    assert bundled.hub is None and bundled.family == "moondream3"
    assert bundled.path == BUNDLED / "kestrel_small"
    md2 = resolve("Moondream2")
    assert md2.hub is not None and md2.hub.sha256 is not None
    assert (md2.hub.repo, md2.hub.file) == ("vikhyatk/moondream2", "model.safetensors")
    assert len(md2.hub.revision) == 40, "a tag may move"
    assert md2.tokenizer == STARMIE and md2.family == "moondream2"
    for name in ("moondream3-preview", "moondream3.1-9B-A2B"):
        source = resolve(name)
        assert source.tokenizer == STARMIE and source.family == "moondream3"


@pytest.mark.parametrize(
    ("model", "hub"),
    [
        ("some/thing", HubCheckpoint("some/thing")),
        ("some/thing@v1.2", HubCheckpoint("some/thing", "v1.2")),
        ("some/thing:sub/weights.pt", HubCheckpoint("some/thing", "main", "sub/weights.pt")),
        ("some/thing@refs/pr/3:w.safetensors", HubCheckpoint("some/thing", "refs/pr/3", "w.safetensors")),
        ("moondream3-preview:model_fp8.pt",
         HubCheckpoint("moondream/moondream3-preview", "main", "model_fp8.pt")),
        ("moondream2@2025-04-14", HubCheckpoint("vikhyatk/moondream2", "2025-04-14")),
    ],
)  # fmt: skip
def test_hub_references(model: str, hub: HubCheckpoint) -> None:
    assert resolve(model).hub == hub


def test_a_released_repository_has_the_released_tokenizer_however_it_is_spelled() -> None:
    assert resolve("vikhyatk/moondream2@main").tokenizer == STARMIE
    assert resolve("some/thing").tokenizer is None


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    weights = folder / "model.safetensors"
    weights.touch()
    for given in (folder, weights):
        assert (resolve(str(given)).name, resolve(str(given)).path) == ("my-model", given)
        assert resolve("kestrel-small", given).name == "my-model"
    named = resolve("moondream2", folder)
    assert (named.name, named.path, named.family) == ("moondream2", folder, "moondream2")
    monkeypatch.chdir(tmp_path)
    Path("org/repo").mkdir(parents=True)
    assert resolve("org/repo").path == Path("org/repo")
    assert resolve("./my-model").name == "my-model"


def test_tokenizer_path_may_be_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("moondream2", None, tmp_path)
    assert caught.value.field == "tokenizer_path"
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    assert resolve("moondream2", None, tmp_path).tokenizer == file
    assert resolve("kestrel-small", None, file).tokenizer == file


@pytest.mark.parametrize(
    "model", ["kestrel-smal", "gpt", "a/b/c", "x@y", ":file", "org/repo:", "*"]
)
def test_unknown_names_list_the_known_ones(model: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(model)
    assert caught.value.field == "model"
    assert all(name in str(caught.value) for name in KNOWN)


def test_a_near_miss_is_hinted_at() -> None:
    for old_or_wrong in ("kestrel-tiny", "kestrel_small"):
        with pytest.raises(ConfigError, match="did you mean kestrel-small"):
            resolve(old_or_wrong)
    with pytest.raises(ConfigError, match="did you mean moondream3-preview"):
        resolve("moondream3-previw")


def test_a_file_of_another_kind_is_named_with_its_field(tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    file.touch()
    with pytest.raises(ConfigError, match=r"^model_path='.*README\.md': expected \.safetensors"):
        resolve("moondream2", model_path=str(file))


@pytest.mark.parametrize(
    "path", ["/no/such/folder", "./nothing", "~/nothing", "absent.safetensors"]
)
def test_a_path_that_is_not_there(path: str) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        resolve(path)
    with pytest.raises(ConfigError) as caught:
        resolve("kestrel-small", path)
    assert caught.value.field == "model_path"
