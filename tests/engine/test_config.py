"""What RuntimeConfig leaves to the device."""

from dataclasses import replace

import pytest

from kestrel_engine import ConfigError, RuntimeConfig, engine
from kestrel_engine.building.runtimes import decode_beside_of
from kestrel_engine.checkpoint.open import open_model
from kestrel_engine.config import ModelPaths, sizes
from kestrel_engine.scheduler.budget import IDLE_SCALE
from kestrel_engine.types.step import RuntimeLimits
from tests.engine.fakes import fake_build
from tests.fake_runtime import FakeRuntime


def test_the_device_settles_what_was_left_open(monkeypatch):
    monkeypatch.setattr(sizes, "processors", lambda: 12)
    open_config = RuntimeConfig(max_batch_size=None)
    on_cpu, on_cuda = (open_config.sizes(cuda=cuda) for cuda in (False, True))
    assert (on_cpu.max_batch_size, on_cpu.step_prefill_positions, on_cpu.step_crops) == (16, 768, 3)
    assert (on_cuda.max_batch_size, on_cuda.step_prefill_positions) == (64, 11680)
    assert on_cuda.step_crops == 48
    assert (on_cpu.step_pause, on_cuda.step_pause) == (0, 4)
    assert (on_cpu.steps_out, on_cuda.steps_out) == (2, 3)
    assert (on_cpu.preprocess_threads, on_cuda.preprocess_threads) == (2, 8)
    assert RuntimeConfig().sizes(cuda=True).max_batch_size == 64, "as the command line has it"


@pytest.mark.parametrize(("processors", "threads"), [(1, 2), (4, 2), (9, 7), (128, 8)])
def test_preprocessing_leaves_two_processors_to_the_engine(monkeypatch, processors, threads):
    monkeypatch.setattr(sizes, "processors", lambda: processors)
    assert RuntimeConfig().sizes(cuda=True).preprocess_threads == threads


def test_what_is_given_holds_on_every_device():
    given = {
        "max_batch_size": 5,
        "step_prefill_positions": 6,
        "step_crops": 7,
        "step_pause": 1.5,
        "steps_out": 4,
        "preprocess_threads": 8,
    }
    for cuda in (False, True):
        assert RuntimeConfig(**given).sizes(cuda=cuda) == sizes.Sizes(**given)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention", "fast"),
        ("fp8_experts", "yes"),
        ("fp8_gemms", "on"),
        ("kv_cache_dtype", "e5m2"),
        ("compile", 1),
        ("random_weights", "on"),
        ("kv_cache_gib", 0.0),
        ("kv_cache_gib", float("inf")),
        ("max_batch_size", 0),
        ("step_crops", 0),
        ("step_prefill_positions", 0),
        ("decode_timeout_s", 0.0),
        ("max_text_bytes", 0),
        ("max_images", 65),
        ("max_queued_pixels", 0),
        ("decode_beside", "perhaps"),
        ("step_pause", -1),
        ("steps_out", 0),
        ("steps_out", 5),
        ("step_pause", float("nan")),
        ("preprocess_threads", 1.5),
        ("dtype", "int8"),
        ("device", "tpu"),
        ("default_top_p", 0.0),
        ("default_temperature", float("inf")),
        ("page_size", 0),
        ("seed", -1),
        ("model", ""),
        ("max_queue", True),
    ],
)
def test_a_wrong_value_is_named_with_its_limit(field, value):
    with pytest.raises(ConfigError) as caught:
        RuntimeConfig(**{field: value})
    assert (caught.value.field, caught.value.value) == (field, value)
    assert repr(value) in str(caught.value)


def test_flashinfer_reads_no_cache_in_fp8():
    with pytest.raises(ConfigError, match=r"kv_cache_dtype.*flashinfer can't read an FP8 KV cache"):
        RuntimeConfig(kv_cache_dtype="fp8", attention="flashinfer")
    RuntimeConfig(attention="flashinfer")


def test_the_pool_has_one_size():
    with pytest.raises(ConfigError, match="kv_cache_pages=9 is set too"):
        RuntimeConfig(kv_cache_gib=1.0, kv_cache_pages=9)


@pytest.mark.parametrize(
    ("precision", "found"),
    [
        ("auto", ("auto", "off", "auto")),
        ("float32", ("float32", "off", "model")),
        ("bfloat16", ("bfloat16", "off", "model")),
        ("fp8", ("bfloat16", "all", "fp8")),
    ],
)
def test_a_precision_stands_for_three_settings(precision, found):
    config = RuntimeConfig(precision=precision)
    assert (config.dtype, config.fp8_gemms, config.kv_cache_dtype) == found
    # A setting of one's own goes before.
    own = RuntimeConfig(precision=precision, fp8_gemms="vision", dtype="float16")
    assert (own.dtype, own.fp8_gemms, own.kv_cache_dtype) == ("float16", "vision", found[2])


def test_an_unknown_precision_is_refused():
    with pytest.raises(ConfigError, match="precision"):
        RuntimeConfig(precision="fp4")


def test_on_cuda_steps_hold_less_new_work_for_a_lower_target():
    usual, low = (RuntimeConfig(itl_target_ms=ms).sizes(cuda=True) for ms in (15.0, 7.5))
    assert (usual.step_crops, usual.step_prefill_positions) == (48, 11680)
    assert (low.step_crops, low.step_prefill_positions) == (24, 5840)
    assert RuntimeConfig(itl_target_ms=0.0).sizes(cuda=True).step_crops == 8
    assert RuntimeConfig(itl_target_ms=100.0).sizes(cuda=True) == usual
    assert RuntimeConfig(itl_target_ms=7.5, step_crops=30).sizes(cuda=True).step_crops == 30
    assert RuntimeConfig(itl_target_ms=7.5).sizes(cuda=False) == RuntimeConfig().sizes(cuda=False)


def test_model_paths_name_the_files():
    config = RuntimeConfig(model_paths=ModelPaths("w.pt", "t.json"))
    assert (config.model_path, config.tokenizer_path) == ("w.pt", "t.json")
    assert replace(config, seed=1).model_path == "w.pt"
    with pytest.raises(ConfigError, match=r"model_paths=.*: model_path is set too"):
        RuntimeConfig(model_path="w.pt", model_paths=ModelPaths("w.pt"))


@pytest.mark.parametrize(
    ("model", "given", "cuda", "expected"),
    [
        ("moondream2", "auto", True, "on"),
        ("moondream3-preview", "auto", True, "slices"),
        ("moondream3-preview", "auto", False, "off"),
        ("moondream3-preview", "on", True, "on"),
    ],
)
def test_models_with_experts_decode_between_slices_on_cuda(model, given, cuda, expected):
    config = RuntimeConfig(model=model, random_weights=True, decode_beside=given)
    assert decode_beside_of(config, open_model(config).config, cuda=cuda) == expected


def test_slices_fall_with_the_target_and_with_small_steps():
    usual = RuntimeConfig().sizes(cuda=True)
    assert sizes.slice_sizes(usual, 15.0) == (10, 2560)
    assert sizes.slice_sizes(usual, 13.5) == (9, 2304)
    assert sizes.slice_sizes(usual, 0.0) == (8, 2048)
    assert sizes.slice_sizes(replace(usual, step_crops=3), 15.0) == (3, 768)


@pytest.mark.parametrize(
    "given", [{}, {"itl_target_ms": 5}, {"step_crops": 20}, {"step_prefill_positions": 8000}]
)
def test_no_step_with_slices_is_larger_than_one_without(given):
    """Memory is reserved for the latter."""
    budget, own = slices_of(given)
    assert budget.slices and budget.idle_scale >= IDLE_SCALE
    assert budget.idle_scale * budget.crops <= IDLE_SCALE * own.step_crops
    assert budget.idle_scale * budget.prefill_positions <= IDLE_SCALE * own.step_prefill_positions


def test_slices_pause_only_if_that_is_set():
    assert slices_of({})[0].pause == 0
    assert slices_of({"step_pause": 2.5})[0].pause == 2.5


def slices_of(given):
    config = RuntimeConfig(decode_beside="slices", **given)
    own = config.sizes(cuda=True)
    limits = RuntimeLimits(
        num_pages=9, page_size=1, max_batch_size=1, max_seq_length=9, vocab_size=400
    )
    return engine._budget(config, own, fake_build(config, FakeRuntime(limits))), own
