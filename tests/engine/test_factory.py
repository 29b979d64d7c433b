"""What build() finds out before it reads a weight, and what it makes of a configuration."""

import shutil

import pytest

from kestrel_engine import ConfigError, InsufficientMemoryError, RuntimeConfig, factory


@pytest.fixture
def weightless(golden_folder, tmp_path):
    """A checkpoint whose header is whole and whose values are cut off: reading a weight fails loudly."""
    folder = tmp_path / "md3"
    shutil.copytree(golden_folder("md3"), folder)
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    header = int.from_bytes(data[:8], "little")
    data[8 + header :] = b"\xff" * (len(data) - 8 - header)  # NaN in bfloat16
    weights.write_bytes(data)
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        {"page_size": 7},
        {"kv_cache_pages": 73},
        {"max_seq_length": 730},
        {"max_seq_length": 736},
        {"max_seq_length": 4096},
        {"device": "cuda:99"},
    ],
)
def test_a_wrong_setting_raises_before_any_weight_is_read(weightless, settings):
    with pytest.raises(ConfigError) as caught:
        factory.build(RuntimeConfig(model_path=weightless, **({"device": "cpu"} | settings)))
    (field,) = settings
    assert caught.value.field == field


def test_the_pool_holds_a_full_sequence_for_every_place_by_default(golden_folder):
    built = factory.build(
        RuntimeConfig(model_path=golden_folder("md2"), device="cpu", max_batch_size=3)
    )
    limits = built.runtime.limits
    assert (limits.page_size, limits.num_pages, limits.max_seq_length) == (10, 3 * 205, 2048)
    assert (built.info.device, built.info.dtype, built.info.max_context) == ("cpu", "float32", 2048)
    assert built.info.num_parameters == 4_421_504
    built.runtime.close()


def test_a_small_pool_shortens_the_longest_sequence(golden_folder):
    config = RuntimeConfig(
        model_path=golden_folder("md2"), device="cpu", kv_cache_pages=80, dtype="bf16"
    )
    built = factory.build(config)
    assert built.runtime.limits.max_seq_length == built.info.max_context == 800
    assert built.info.dtype == "bfloat16"
    built.runtime.close()


def test_too_little_memory_for_one_picture_says_so(golden_folder, monkeypatch):
    from kestrel_engine.checkpoint import memory

    config = RuntimeConfig(model_path=golden_folder("md2"), device="cpu")
    room = iter([10**9, 10**6])
    monkeypatch.setattr(memory, "device_available", lambda device: next(room))
    with pytest.raises(InsufficientMemoryError, match="a picture takes 73 pages"):
        factory.build(config)
