"""What is said of a machine: of this one, and of ones that are played to be otherwise."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kestrel_engine import RuntimeConfig, maintenance
from kestrel_engine.building import cpu_choice
from kestrel_engine.checkpoint.hub import Hub
from kestrel_engine.checkpoint.weights import memory
from kestrel_engine.maintenance import device, model
from kestrel_engine.maintenance.model import check_model
from kestrel_engine.runtime.gpu import device as card
from tests.engine.checkpoint.conftest import raw_config
from tests.tiny import TINY

GIB = 2**30


def found(findings):
    return {finding.check: finding for finding in findings}


def test_this_machine_can_serve_the_bundled_model(monkeypatch):
    monkeypatch.setattr(cpu_choice, "multiplies_bfloat16", lambda: False)
    told = found(maintenance.diagnose(RuntimeConfig(device="cpu")))
    assert list(told) == ["torch", "cpu", "images", "decoders", "model", "memory"]
    assert {name for name, f in told.items() if f.status != "ok"} <= {"images"}
    assert torch.__version__ in told["torch"].message
    assert "JPEG, PNG, WebP" in told["images"].message
    assert told["model"].message == "kestrel-small: a file of weights, 0.06 GB"
    assert told["memory"].message.startswith("weights take 109.7 MiB as float32")
    monkeypatch.setattr(cpu_choice, "multiplies_bfloat16", lambda: True)
    told = found(check_model(RuntimeConfig(device="cpu")))
    assert told["memory"].message.startswith("weights take 54.9 MiB as bfloat16")
    assert told["choice"].message.endswith("--precision bfloat16")


@pytest.fixture
def no_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "driver_version", lambda: None)


def test_without_a_card_the_processor_is_enough_unless_one_is_asked_for(no_card):
    told = found(device.check_device(RuntimeConfig(device="auto")))
    assert "gpu" not in told and told["cpu"].status == "ok"
    told = found(device.check_device(RuntimeConfig(device="cuda")))
    assert told["gpu"].status == "fail" and "--gpus all" in told["gpu"].remedy
    (memory_told,) = [f for f in check_model(RuntimeConfig(device="cuda")) if f.check == "memory"]
    assert memory_told.status == "warn"


def test_a_driver_that_torch_cannot_use_is_worth_a_warning(no_card, monkeypatch):
    monkeypatch.setattr(device, "driver_version", lambda: "570.124.06")
    monkeypatch.setattr(torch.version, "cuda", None)
    told = found(device.check_device(RuntimeConfig(device="auto")))
    assert told["gpu"].status == "warn"
    assert told["gpu"].message == "driver 570.124.06 is installed, but this torch build has no CUDA"
    assert told["gpu"].remedy.startswith("install torch's CUDA build")


def play_card(monkeypatch, capability, built_for=("sm_80", "sm_90", "compute_90")):
    properties = SimpleNamespace(
        name="Card", major=capability[0], minor=capability[1], multi_processor_count=100,
        shared_memory_per_block=1, shared_memory_per_block_optin=2, total_memory=80 * GIB,
    )  # fmt: skip
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(built_for))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _=None: (79 * GIB, 80 * GIB))
    monkeypatch.setattr(device, "driver_version", lambda: "580.1")
    monkeypatch.setattr(device, "_compile_something", lambda _: None)
    versions = {"triton": "3.7.1", "flashinfer": "0.6.18"}
    monkeypatch.setattr(card, "library_version", versions.get)
    return versions


def test_a_card_that_is_all_right(monkeypatch):
    play_card(monkeypatch, (9, 0))
    told = found(device.check_device(RuntimeConfig()))
    assert [f.status for f in told.values()] == ["ok"] * 5
    assert told["driver"].message == "NVIDIA 580.1"
    assert told["gpu"].message == "cuda:0 is a Card of 80 GiB, compute capability 9.0; FP8"
    assert told["triton"].message == "3.7.1, compiles"
    assert told["flashinfer"].message == "0.6.18"


@pytest.mark.parametrize(
    ("capability", "built_for", "words"),
    [
        ((7, 5), ("sm_70", "sm_75"), "8.0 (Ampere) or newer"),
        ((9, 0), ("sm_80", "sm_100"), "build for this GPU"),
    ],
)
def test_a_card_that_is_not_supported(monkeypatch, capability, built_for, words):
    play_card(monkeypatch, capability, built_for)
    told = found(device.check_device(RuntimeConfig()))
    assert told["gpu"].status == "fail" and words in told["gpu"].remedy
    assert "triton" not in told


def test_a_card_that_is_not_there(monkeypatch):
    play_card(monkeypatch, (9, 0))
    told = found(device.check_device(RuntimeConfig(device="cuda:3")))
    assert told["gpu"].status == "fail"
    assert told["gpu"].message == "--device cuda:3: there are 1 GPUs, cuda:0 to cuda:0"


def test_libraries_of_the_kernels(monkeypatch):
    versions = play_card(monkeypatch, (8, 0))
    versions.pop("flashinfer")
    told = found(device.check_device(RuntimeConfig()))
    assert "flashinfer" not in told
    assert "no FP8" in told["gpu"].message
    told = found(device.check_device(RuntimeConfig(attention="flashinfer")))
    assert told["flashinfer"].status == "fail"

    def broken(_):
        raise RuntimeError("no compiler\nfor you")

    monkeypatch.setattr(device, "_compile_something", broken)
    told = found(device.check_device(RuntimeConfig()))
    assert told["triton"].status == "fail"
    assert told["triton"].message == "3.7.1 can't compile here: RuntimeError: no compiler"
    versions.clear()
    assert found(device.check_device(RuntimeConfig()))["triton"].status == "warn"
    assert found(device.check_device(RuntimeConfig(compile=False)))["triton"].status == "warn"


@pytest.mark.parametrize(
    ("capability", "built_for", "runs"),
    [
        ((9, 0), ["sm_90"], True),
        ((8, 9), ["sm_80", "sm_90"], True),
        ((9, 0), ["sm_80"], False),
        ((10, 0), ["sm_90", "compute_90"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_90a"], True),
        ((12, 0), ["sm_100", "sm_120"], True),
        ((9, 0), [], True),
    ],
)
def test_which_kernels_run_on_a_card(capability, built_for, runs):
    assert device.compiled_for(capability, built_for) is runs


def test_the_kernel_tells_the_drivers_version(tmp_path: Path, monkeypatch):
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26\nGCC version: 12\n"
    )
    monkeypatch.setattr(device, "_DRIVER", file)
    assert device.driver_version() == "570.124.06"


def test_a_model_that_is_not_here(tmp_path: Path):
    empty = Hub(cache_dir=tmp_path, offline=True)
    absent = RuntimeConfig(model="moondream2", device="cpu", precision="float32")
    told = found(check_model(absent, hub=empty))
    assert told["model"].status == "warn" and "downloads it at its start" in told["model"].message
    assert told["memory"].message.startswith("weights take 7.2 GiB as float32")
    told = found(check_model(RuntimeConfig(model="moondream2", offline=True), hub=empty))
    assert told["model"].status == "fail"
    assert told["model"].remedy == "kestrel-grpc download moondream2"
    told = found(check_model(RuntimeConfig(model="org/unknown", device="cpu"), hub=empty))
    assert (told["model"].status, told["memory"].status) == ("warn", "warn")
    assert "can't be checked" in told["memory"].message


def test_files_that_are_no_model(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(raw_config("moondream2")))
    (tmp_path / "model.safetensors").write_bytes(b"short")
    told = found(check_model(RuntimeConfig(model_path=tmp_path)))
    assert told["model"].status == "fail" and "model.safetensors" in told["model"].message
    assert "memory" not in told


def test_a_setting_beyond_the_model_is_told():
    told = found(check_model(RuntimeConfig(max_seq_length=100_000, device="cpu")))
    assert told["model"].status == "fail" and "max_seq_length" in told["model"].message


@pytest.mark.parametrize(("available", "status"), [(1, "fail"), (7.5, "warn"), (64, "ok")])
def test_memory_of_the_processor(available, status, monkeypatch):
    monkeypatch.setattr(memory, "host_available", lambda: int(available * GIB))
    monkeypatch.setattr(model, "_speed", lambda precision: model._Speed(100e9, 2.5e9))
    config = RuntimeConfig(
        model="moondream2", random_weights=True, device="cpu", precision="float32"
    )
    assert found(check_model(config))["memory"].status == status


def test_memory_of_a_card(monkeypatch):
    play_card(monkeypatch, (9, 0))
    config = RuntimeConfig(model="moondream2", random_weights=True, max_batch_size=None)
    told = found(check_model(config))["memory"]
    assert told.status == "ok"
    assert told.message.startswith("79.0 of 80.0 GiB are free: weights 3.6, reserve ")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _=None: (3 * GIB, 80 * GIB))
    told = found(check_model(config))["memory"]
    assert told.status == "fail" and "3.0 of 80.0 GiB are free: " in told.message


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_this_card():
    told = found(maintenance.diagnose(RuntimeConfig(device="cuda")))
    assert told["gpu"].status == told["triton"].status == told["memory"].status == "ok", told


def test_slow_answers_of_a_processor_are_told_before(monkeypatch):
    """The speeds are given, so that the figures are."""
    monkeypatch.setattr(model, "_speed", lambda precision: model._Speed(100e9, 2.5e9))
    large = RuntimeConfig(
        model="moondream2", device="cpu", random_weights=True, precision="bfloat16", max_crops=4
    )
    told = found(check_model(large))["speed"]
    assert told.status == "warn"
    assert "bfloat16: 35 s (a small image) to 70 s (a large one)" in told.message
    assert "0.5 s for each further" in told.message
    assert [f.check for f in maintenance.check_slow_device(large)] == ["memory", "speed"]
    small = RuntimeConfig(device="cpu")
    assert "speed" not in found(check_model(small)) and not [*maintenance.check_slow_device(small)]


def test_the_speed_is_measured():

    from kestrel_engine.checkpoint.open import open_model

    tiny = open_model(RuntimeConfig(model_path=TINY)).config
    time = model.estimate(RuntimeConfig(), tiny, "float32")
    assert time.token_s > 0 and 0 < time.first_small_s < time.first_large_s


def test_products_are_measured_as_answers_compute_them(monkeypatch):
    monkeypatch.setattr(model, "_MEASURED_S", 0)
    grads = []
    found = model._seconds(lambda: grads.append(torch.is_grad_enabled()))
    # One product compiles and one is measured, also if no time is left.
    assert grads == [False, False] and found < math.inf
