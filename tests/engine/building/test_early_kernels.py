"""EarlyKernels: a first start compiles its kernels in a process of its own, a second one finds the note of it."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kestrel_engine import RuntimeConfig
from kestrel_engine.building import early_kernels
from kestrel_engine.building.early_kernels import EarlyKernels
from kestrel_engine.compiling.cards import CARDS
from kestrel_engine.runtime.gpu.device import Capabilities
from kestrel_engine.types.model_config import parse_model_config
from tests.engine.runtime.gpu.small_models import RAW
from tests.tiny import TINY

pytest.importorskip("triton")

CARD = Capabilities(**asdict(CARDS["sm_90"]))
TEXT = {**RAW["text"], "vocab_size": 800}
SHAPE = {"config": {**RAW, "text": TEXT}}
MODEL = parse_model_config(SHAPE, family="moondream2")


@pytest.fixture
def config(tmp_path: Path) -> RuntimeConfig:
    """Of a small model that needs few kernels."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPE))
    return RuntimeConfig(
        model=str(model),
        tokenizer_path=str(TINY / "tokenizer.json"),
        random_weights=True,
        device="cuda",
        dtype="bfloat16",
        max_batch_size=1,
        step_crops=1,
    )


def kernels(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*/*.cubin")}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_first_start_compiles_and_a_second_one_does_not(
    config: RuntimeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(early_kernels, "PATIENCE_S", 280.0)  # Two busy processors take minutes.
    cache = tmp_path / "cache"
    running = EarlyKernels.begin(config, MODEL, CARD, cache, processors=8)
    assert running is not None
    try:
        running.wait()
        running.errors.seek(0)
        assert list(cache.glob("kestrel-*.compiled")), running.errors.read().decode()
    finally:
        running.close()
    assert {"_decode", "dot_kernel", "_patchify"} <= kernels(cache)
    assert EarlyKernels.begin(config, MODEL, CARD, cache, processors=8) is None
    other = EarlyKernels.begin(replace(config, fp8_gemms="all"), MODEL, CARD, cache, processors=8)
    assert other is not None, "other settings launch other kernels"
    other.close()


def test_few_processors_or_a_read_only_cache_need_no_process(
    config: RuntimeConfig, tmp_path: Path
) -> None:
    assert EarlyKernels.begin(config, MODEL, CARD, tmp_path, processors=2) is None
    (tmp_path / "file").touch()
    assert (
        EarlyKernels.begin(config, MODEL, CARD, tmp_path / "file" / "cache", processors=8) is None
    )


@pytest.mark.parametrize(
    ("program", "patience_s", "why"),
    [
        ("import sys; sys.exit('no luck')", 60.0, "status 1: no luck"),
        ("import time; time.sleep(100)", 0.3, "it took too long"),
    ],
)
def test_a_failure_costs_only_time(
    config: RuntimeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    program: str,
    patience_s: float,
    why: str,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(early_kernels, "_START", program)
    monkeypatch.setattr(early_kernels, "PATIENCE_S", patience_s)
    running = EarlyKernels.begin(config, MODEL, CARD, tmp_path, processors=8)
    assert running is not None
    running.wait()
    process = running.process
    running.close()
    assert process is not None and process.returncode is not None, "it is ended"
    assert why in caplog.text
    assert not list(tmp_path.glob("*.compiled"))


def test_without_room_for_the_note_the_start_goes_on(
    config: RuntimeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(early_kernels, "_START", "")
    monkeypatch.setattr(Path, "touch", full)
    running = EarlyKernels.begin(config, MODEL, CARD, tmp_path, processors=8)
    assert running is not None
    running.wait()
    running.close()


def test_only_one_of_several_processes_compiles(
    config: RuntimeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_kernels, "PATIENCE_S", 5.0)
    other = EarlyKernels.begin(config, MODEL, CARD, tmp_path, processors=8)
    assert other is not None and other.process is not None
    running = EarlyKernels.begin(config, MODEL, CARD, tmp_path, processors=8)
    assert running is not None and running.process is None
    assert not running.has_ended()
    other.close()
    running.wait()
    running.close()
