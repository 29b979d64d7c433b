"""What build() checks before it reads a weight, and how it completes a configuration."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kestrel_engine import ConfigError, InferenceEngine, InsufficientMemoryError, RuntimeConfig
from kestrel_engine.building import device as devices
from kestrel_engine.building import factory
from kestrel_engine.checkpoint.weights import kv_scales
from kestrel_engine.runtime.gpu import device as gpu_device
from kestrel_engine.runtime.torch_runtime import TorchRuntime
from tests.tiny import TINY


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
        {"kv_cache_gib": 0.001},
        {"attention": "triton"},
        {"attention": "flashinfer"},
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
    assert isinstance(built.runtime, TorchRuntime)
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


def test_the_pool_is_as_large_as_was_said(golden_folder):
    config = RuntimeConfig(model_path=golden_folder("md2"), device="cpu", kv_cache_gib=0.01)
    built = factory.build(config)
    page_bytes = 10 * 2 * 4 * 256 * 4
    assert built.model.text.n_layers == 4 and built.model.text.dim == 256
    assert built.runtime.limits.num_pages == int(0.01 * 2**30) // page_bytes
    assert built.info.kv_cache_bytes == built.runtime.limits.num_pages * page_bytes
    built.runtime.close()


def test_a_pool_beyond_the_memory_says_what_to_lower(golden_folder):
    config = RuntimeConfig(model_path=golden_folder("md2"), device="cpu", kv_cache_gib=50_000)
    with pytest.raises(InsufficientMemoryError, match=r"lower --kv-cache-gib to at most \d"):
        factory.build(config)


def test_a_device_that_refuses_memory_says_what_to_lower(golden_folder, monkeypatch):
    def refuse(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    monkeypatch.setattr("kestrel_engine.checkpoint.open.load_weights", refuse)
    config = RuntimeConfig(model_path=golden_folder("md2"), device="cpu", max_seq_length=900)
    with pytest.raises(InsufficientMemoryError) as caught:
        factory.build(config)
    for words in (
        "CUDA out of memory",
        "--kv-cache-gib",
        "--max-batch-size (now 16)",
        "--max-seq-length (now 900)",
    ):
        assert words in str(caught.value)


def test_random_weights_serve_the_golden_shape(golden_folder):
    config = RuntimeConfig(
        model_path=golden_folder("md3") / "config.json", device="cpu", random_weights=True, seed=9
    )
    built = factory.build(config)
    assert built.info.model == "md3 (random weights)"
    assert built.info.weights_fingerprint == "random:9:cpu:float32"
    assert built.info.num_parameters == sum(
        tensor.numel() for tensor in _tensors_of(golden_folder("md3")).values()
    )
    built.runtime.close()


async def test_an_engine_of_random_weights_answers(golden_folder):
    """With kestrel-tiny's tokenizer, which doesn't know most of the ids: they decode to nothing."""
    config = RuntimeConfig(
        model_path=golden_folder("md3") / "config.json",
        device="cpu",
        random_weights=True,
        tokenizer_path=TINY,
        fp8_experts="keep",
        max_seq_length=900,
    )
    async with await InferenceEngine.create(config) as engine:
        picture = np.full((200, 300, 3), 90, np.uint8)
        settings = {"max_tokens": 6, "temperature": 0.0}
        first, again = [
            await engine.query(picture, "What is this?", settings=settings) for _ in range(2)
        ]
        assert first.metrics.output_tokens == 6 and first.finish_reason == "length"
        assert isinstance(first.output["answer"], str)
        assert again.output == first.output


def test_kept_experts_are_counted_in_bytes_and_not_as_parameters(golden_folder):
    def build(fp8_experts):
        config = RuntimeConfig(
            model_path=golden_folder("md3"),
            device="cpu",
            dtype="bfloat16",
            random_weights=True,
            fp8_experts=fp8_experts,
        )
        built = factory.build(config)
        built.runtime.close()
        return built

    auto, keep = build("auto"), build("keep")
    assert keep.info.num_parameters == auto.info.num_parameters
    assert keep.info.weights_bytes < auto.info.weights_bytes, "a CPU widens them by default"
    moe = keep.model.text.moe
    layers = keep.model.text.n_layers - moe.start_layer
    rows = moe.num_experts * (2 * moe.expert_inner_dim + 256)
    elements = moe.num_experts * 3 * moe.expert_inner_dim * 256
    saved = auto.info.weights_bytes - keep.info.weights_bytes
    assert saved == layers * (elements - 4 * rows)


def _tensors_of(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


class TestChoiceOfRuntime:
    """On a device that isn't here: what is chosen follows from what it says about itself."""

    CUDA = torch.device("cuda")

    @pytest.fixture(autouse=True)
    def an_h200(self, monkeypatch):
        self.says(monkeypatch, (9, 0))
        monkeypatch.setattr(gpu_device, "library_version", lambda name: "3.6.0")

    def says(self, monkeypatch, capability):
        found = gpu_device.Capabilities(
            name="a card",
            compute_capability=capability,
            num_sms=100,
            shared_memory_per_block=100_000,
            memory=10**10,
        )
        monkeypatch.setattr(gpu_device, "capabilities", lambda device: found)

    def test_kernels_compute_and_experts_stay_in_fp8(self):
        config = RuntimeConfig()
        assert devices.uses_kernels(config, self.CUDA)
        assert devices.keeps_fp8(config, self.CUDA, kernels=True)
        assert not devices.keeps_fp8(config, self.CUDA, kernels=False)

    def test_ampere_widens_its_experts(self, monkeypatch):
        self.says(monkeypatch, (8, 6))
        assert devices.uses_kernels(RuntimeConfig(), self.CUDA)
        assert not devices.keeps_fp8(RuntimeConfig(), self.CUDA, kernels=True)
        with pytest.raises(ConfigError, match=r"capability 8\.9; a card is older"):
            devices.keeps_fp8(RuntimeConfig(fp8_experts="keep"), self.CUDA, kernels=True)
        plain = RuntimeConfig(fp8_experts="keep")
        assert devices.keeps_fp8(plain, self.CUDA, kernels=False), "the reference path can"

    def test_experts_are_widened_where_that_is_asked_for(self):
        config = RuntimeConfig(fp8_experts="dequantise")
        assert not devices.keeps_fp8(config, self.CUDA, kernels=True)

    @pytest.mark.parametrize("which", ["vision", "prefill", "all"])
    def test_gemms_in_fp8_need_a_card_that_has_them(self, monkeypatch, which):
        gemm = pytest.importorskip("kestrel_engine.runtime.gpu.gemm")
        config, cpu = RuntimeConfig(fp8_gemms=which), torch.device("cpu")
        monkeypatch.setattr(gemm, "fp8_refused", lambda device, dtype: None)

        def check(config, device, dtype=torch.bfloat16, kernels=True):
            devices.check_fp8_gemms(config, device, dtype, kernels)

        check(config, self.CUDA)
        check(config, cpu, torch.float32)
        for device in (self.CUDA, cpu):
            with pytest.raises(ConfigError, match="needs CUDA and Triton, without --no-compile"):
                check(config, device, kernels=False)
        with pytest.raises(ConfigError, match=r"fp8_gemms.*dtype bfloat16 or float16"):
            check(config, self.CUDA, torch.float32)
        monkeypatch.setattr(gemm, "fp8_refused", lambda device, dtype: "not supported")
        with pytest.raises(ConfigError, match=r"fp8_gemms.*torch can't on a card: not supported"):
            check(config, self.CUDA)
        self.says(monkeypatch, (8, 6))
        with pytest.raises(ConfigError, match=r"fp8_gemms.*capability 8\.9; a card is older"):
            check(config, self.CUDA)
        check(RuntimeConfig(), cpu, kernels=False)

    def kv_scales(self, config=None, *, scales, dtype=torch.bfloat16, kernels=True, **settings):
        """What becomes of a checkpoint of two layers with ``scales`` by canonical name."""
        stored = dict.fromkeys(scales)
        opened = SimpleNamespace(
            plan=SimpleNamespace(kv_scales=stored),
            files=(),
            config=SimpleNamespace(text=SimpleNamespace(n_layers=2)),
        )
        config = config or RuntimeConfig(**settings)
        return devices.kv_scales_of(config, opened, self.CUDA, dtype, kernels)

    def test_a_cache_is_in_fp8_by_itself_only_where_all_fits(self, monkeypatch):
        every = [f"text.blocks.{i}.attn.{side}_scale" for i in (0, 1) for side in "kv"]
        read = ((0.5, 0.25), (1.0, 1.0))
        monkeypatch.setattr(kv_scales, "read", lambda plan, files, layers: read)
        assert self.kv_scales(scales=every) == read
        assert self.kv_scales(scales=every[1:]) is None and self.kv_scales(scales=()) is None
        assert self.kv_scales(scales=every, dtype=torch.float32) is None, "asked for exactness"
        assert self.kv_scales(scales=every, kernels=False) is None
        assert self.kv_scales(scales=every, attention="flashinfer") is None
        assert self.kv_scales(scales=every, kv_cache_dtype="model") is None
        self.says(monkeypatch, (8, 6))
        assert self.kv_scales(scales=every) is None
        # Who asks for it gets it everywhere, with whatever scales there are.
        for given in (every, every[1:], ()):
            forced = self.kv_scales(
                scales=given, kv_cache_dtype="fp8", dtype=torch.float32, kernels=False
            )
            assert forced == read

    def test_no_compile_is_plain_torch_and_says_so(self, caplog):
        assert not devices.uses_kernels(RuntimeConfig(compile=False), self.CUDA)
        assert "--no-compile: plain torch computes on cuda" in caplog.text

    def test_without_triton_plain_torch_computes(self, monkeypatch, caplog):
        monkeypatch.setattr(gpu_device, "library_version", lambda name: None)
        assert not devices.uses_kernels(RuntimeConfig(), self.CUDA)
        assert "Triton isn't there: plain torch computes" in caplog.text

    def test_flashinfer_must_be_there_if_asked_for(self, monkeypatch):
        there = {"triton": "3.6.0"}
        monkeypatch.setattr(gpu_device, "library_version", there.get)
        assert devices.uses_kernels(RuntimeConfig(attention="triton"), self.CUDA)
        with pytest.raises(ConfigError, match="flashinfer-python"):
            devices.uses_kernels(RuntimeConfig(attention="flashinfer"), self.CUDA)

    def test_an_older_card_is_refused_in_one_line(self, monkeypatch):
        self.says(monkeypatch, (7, 5))
        with pytest.raises(
            ConfigError, match=r"capability 7\.5; use a GPU of at least 8\.0 \(Ampere\)"
        ):
            devices.uses_kernels(RuntimeConfig(), self.CUDA)

    def test_a_cpu_asks_for_no_gpu_library(self, monkeypatch):
        monkeypatch.setattr(gpu_device, "library_version", lambda name: pytest.fail(name))
        assert not devices.uses_kernels(RuntimeConfig(), torch.device("cpu"))


@pytest.mark.parametrize("family", ["md2", "md3"])
def test_the_kernels_runtime_gets_weights_pool_and_settings(golden_folder, monkeypatch, family):
    """Where Triton interprets its kernels the same runtime stands on a CPU; building it runs none of them."""
    pytest.importorskip("triton")
    from kestrel_engine.runtime.gpu.runtime import GpuRuntime

    monkeypatch.setattr(factory, "uses_kernels", lambda config, device: True)
    config = RuntimeConfig(
        model_path=golden_folder(family),
        device="cpu",
        attention="torch",
        fp8_gemms={"md2": "vision", "md3": "prefill"}[family],
        fp8_experts="dequantise",
        max_batch_size=3,
        kv_cache_pages=90,
    )
    built = factory.build(config)
    assert isinstance(built.runtime, GpuRuntime)
    limits = built.runtime.limits
    assert (limits.num_pages, limits.max_batch_size, limits.max_seq_length) == (90, 3, 900)
    assert built.runtime.vision.fp8 == (family == "md2")
    assert bool(built.runtime.text.fp8_products) == (family == "md3")
    assert not built.runtime.parts.attention.captures, "torch computes prompts"
    plain = sum(tensor.numel() for tensor in _tensors_of(golden_folder(family)).values())
    assert built.info.num_parameters == plain, "counted before weights are packed"
    built.runtime.close()


@pytest.mark.parametrize("kernels", [False, True])
def test_a_cache_in_fp8_has_twice_the_pages_of_a_half_type(golden_folder, monkeypatch, kernels):
    if kernels:
        pytest.importorskip("triton")
        monkeypatch.setattr(factory, "uses_kernels", lambda config, device: True)
    wide, half = (
        factory.build(
            RuntimeConfig(
                model_path=golden_folder("md3"),
                device="cpu",
                dtype="bfloat16",
                attention="torch",
                fp8_experts="dequantise",
                kv_cache_gib=0.02,
                kv_cache_dtype=kind,
            )
        )
        for kind in ("model", "fp8")
    )
    assert half.info.num_pages // 2 == wide.info.num_pages
    assert (wide.info.kv_cache_dtype, half.info.kv_cache_dtype) == ("bfloat16", "float8_e4m3fn")
    cache = half.runtime.parts.cache if kernels else half.runtime.cache
    assert cache.scales[0] == (1.0, 1.0) and cache.eight_bits
    for built in (wide, half):
        built.runtime.close()
