"""Scales of the KV cache in a checkpoint: all, some or none of them, and impossible ones."""

import json

import pytest
import torch
from safetensors.torch import save_file

from kestrel_engine.checkpoint.open import open_model
from kestrel_engine.checkpoint.weights import kv_scales
from kestrel_engine.config.runtime import RuntimeConfig
from kestrel_engine.errors import CheckpointError
from kestrel_engine.maintenance.model_verification import verify
from kestrel_engine.types.model_config import parse_model_config
from tests.checkpoint_loading import load_checkpoint
from tests.engine.checkpoint.conftest import random_tensors, raw_config

LAYERS = 3
ALL = {
    (layer, side): 0.01 * (layer + 1) * (2 if side == "v" else 1)
    for layer in range(LAYERS)
    for side in "kv"
}


@pytest.fixture
def opened(tmp_path, schemes):
    """From scales by layer and side, and how they are written, to a checkpoint that has them."""

    def make(values, *, scheme="b", file="model.safetensors", shape=(1,), dtype=torch.float32):
        raw = raw_config("moondream3")
        stored = schemes[scheme](random_tensors(parse_model_config(raw)))
        place = {"a": "model.text.blocks.{}.attn", "b": "text_model.transformer.h.{}"}[scheme]
        for (layer, side), value in values.items():
            name = f"{place.format(layer)}.kv_quantizer.{side}_scale"
            stored[name] = torch.full(shape, value, dtype=dtype)
        folder = tmp_path / scheme / file
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(raw))
        (folder / "tokenizer.json").write_text("{}")
        if file.endswith(".pt"):
            torch.save(stored, folder / file)
        else:
            save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / file)
        return open_model(RuntimeConfig(model_path=folder, tokenizer_path=folder))

    return make


def read(opened):
    return kv_scales.read(opened.plan, opened.files, LAYERS)


@pytest.mark.parametrize(
    ("scheme", "file", "shape", "dtype"),
    [
        ("b", "model.safetensors", (1,), torch.float32),
        ("a", "model.safetensors", (), torch.float32),
        ("b", "model_fp8.pt", (1, 1), torch.bfloat16),
    ],
)
def test_all_of_them(opened, scheme, file, shape, dtype):
    found = opened(ALL, scheme=scheme, file=file, shape=shape, dtype=dtype)
    assert kv_scales.is_complete(found.plan, LAYERS)
    assert not found.plan.faults and not found.plan.ignored
    expected = [[float(torch.tensor(ALL[i, s], dtype=dtype)) for s in "kv"] for i in range(LAYERS)]
    assert [list(pair) for pair in read(found)] == expected


def test_none_of_them(opened, caplog):
    found = opened({})
    assert not kv_scales.is_complete(found.plan, LAYERS)
    assert read(found) == ((1.0, 1.0),) * LAYERS
    assert not caplog.text


def test_some_of_them(opened, caplog):
    values = dict(ALL)
    del values[1, "v"]
    found = opened(values)
    assert not kv_scales.is_complete(found.plan, LAYERS)
    some = "the checkpoint has 5 of 6 scales of an FP8 KV cache, not text.blocks.1.attn.v_scale; "
    assert some + "the KV cache has the model's dtype" in caplog.text
    assert read(found)[1] == (pytest.approx(0.02), 1.0)
    assert some + "missing scales are taken as 1" in caplog.text


def test_such_as_cannot_be_are_all_named(opened):
    found = opened(ALL | {(0, "k"): 0.0, (1, "k"): -1.0, (1, "v"): torch.inf, (2, "v"): torch.nan})
    with pytest.raises(CheckpointError, match="positive finite number each, not") as caught:
        read(found)
    for told in ("h.0.kv_quantizer.k_scale = 0", "h.1.kv_quantizer.k_scale = -1", "v_scale = inf"):
        assert told in str(caught.value)
    assert "h.2.kv_quantizer.v_scale = nan" in str(caught.value)
    assert "--precision bfloat16" in str(caught.value)


def test_one_element_each(opened):
    with pytest.raises(CheckpointError, match=r"h\.0\.kv_quantizer\.k_scale \[2\] of F32"):
        read(opened(ALL, shape=(2,)))


def test_the_weights_load_whatever_the_scales_are(opened):
    plain = opened({}, scheme="a")
    odd = opened(ALL | {(0, "k"): torch.nan})
    left, right = (load_checkpoint(each.files[0]) for each in (plain, odd))
    assert left.fingerprint == right.fingerprint and left.tensors.keys() == right.tensors.keys()


@pytest.mark.parametrize(
    ("values", "status", "told"),
    [
        ({}, None, None),
        (ALL, "ok", "all 3 layers': 0.01 to 0.06"),
        ({(1, "v"): 0.5}, "warn", "1 of 6 scales of an FP8 KV cache"),
        ({(1, "v"): -0.5}, "fail", "h.1.kv_quantizer.v_scale = -0.5"),
    ],
)
def test_verify_tells_what_scales_there_are(opened, values, status, told):
    folder = opened(values).files[0].parent
    config = RuntimeConfig(model_path=folder, tokenizer_path=folder)
    found = [f for f in verify(config, progress=lambda *_: None) if f.check == "KV scales"]
    assert [f.status for f in found] == ([] if status is None else [status])
    assert not found or told in found[0].message
