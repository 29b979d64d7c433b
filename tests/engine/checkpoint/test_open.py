"""Opening a model: what is checked before any weight is read, and which tokenizer is taken."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kestrel_engine.checkpoint.hub import Hub
from kestrel_engine.checkpoint.open import load_weights, open_model
from kestrel_engine.config.runtime import RuntimeConfig
from kestrel_engine.errors import ConfigError, DownloadError

TOKENIZER = {"added_tokens": [{"id": 0, "content": "<|endoftext|>"}]}
STALE = {"added_tokens": [{"id": 50256, "content": "<|endoftext|>"}]}


@pytest.fixture
def folder(tmp_path, config_of, random_of, raw_of) -> Path:
    folder = tmp_path / "small"
    folder.mkdir()
    save_file(random_of(config_of("moondream3")), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw_of("moondream3")))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return folder


@pytest.fixture
def offline(tmp_path) -> Hub:
    return Hub(endpoint="http://127.0.0.1:9", cache_dir=tmp_path / "cache")


def test_a_folder_opens_and_loads(folder, config_of):
    opened = open_model(RuntimeConfig(model_path=folder, max_seq_length=200))
    assert opened.name == "small" and opened.config == config_of("moondream3")
    assert opened.tokenizer_path == folder / "tokenizer.json"
    loaded = load_weights(opened, dtype=torch.float32, device="cpu", progress=lambda *_: None)
    assert loaded.tensors["text.wte"].shape == (80, 32)
    assert len(loaded.fingerprint) == 64


@pytest.mark.parametrize(
    ("setting", "value"), [("max_seq_length", 257), ("max_seq_length", 82), ("page_size", 5)]
)
def test_settings_beyond_the_model_are_refused(folder, setting, value):
    with pytest.raises(ConfigError) as caught:
        open_model(RuntimeConfig(model_path=folder, **{setting: value}))
    assert (caught.value.field, caught.value.value) == (setting, value)


def test_the_name_must_fit_the_weights(folder, offline):
    with pytest.raises(ConfigError, match="moondream3 model"):
        open_model(RuntimeConfig(model="moondream2", model_path=folder), hub=offline)


def test_a_tokenizer_is_found_or_asked_for(folder, tmp_path, offline):
    other = tmp_path / "other.json"
    other.write_text(json.dumps(TOKENIZER))
    given = RuntimeConfig(model_path=folder, tokenizer_path=other)
    assert open_model(given).tokenizer_path == other
    other.write_text(json.dumps(STALE))
    with pytest.raises(ConfigError, match="is 50256, not 0"):
        open_model(given)
    other.write_text("[")
    with pytest.raises(ConfigError, match=r"not a readable tokenizer\.json"):
        open_model(given)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json beside"):
        open_model(RuntimeConfig(model_path=folder), hub=offline)


def test_weights_of_a_released_vocabulary_fall_back_to_the_released_tokenizer(
    tmp_path, offline, raw_of
):
    """vikhyatk/moondream2 ships an older tokenizer beside its weights: it must not be taken."""
    raw = raw_of("moondream2")
    raw["config"]["text"]["vocab_size"] = 51200
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file({"model.text.wte": torch.zeros(1)}, tmp_path / "model.safetensors")
    for beside in (None, STALE):
        if beside:
            (tmp_path / "tokenizer.json").write_text(json.dumps(beside))
        with pytest.raises(DownloadError, match="moondream/starmie-v1"):
            open_model(RuntimeConfig(model_path=tmp_path), hub=offline)
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    assert open_model(RuntimeConfig(model_path=tmp_path), hub=offline).files


def test_without_network_all_that_a_released_model_lacks_is_told_at_once(offline):
    with pytest.raises(DownloadError) as caught:
        open_model(RuntimeConfig(model="moondream2"), hub=offline)
    for word in (
        "hf download moondream/starmie-v1 --revision 35192e10a54e36eabe0a7cc57a2c1aab371cafc5",
        "hf download vikhyatk/moondream2 --revision 9a7d4024050840e001defacec2b00727e89149e6",
        "--weights",
        "--tokenizer",
    ):
        assert word in str(caught.value)


def test_opening_needs_no_torch(folder):
    code = (
        "import sys; from kestrel_engine.config.runtime import RuntimeConfig; "
        "from kestrel_engine.checkpoint.open import open_model; "
        "open_model(RuntimeConfig(model_path=sys.argv[1])); assert 'torch' not in sys.modules"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=root, check=True, timeout=60)
