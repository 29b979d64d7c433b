"""Kernels that were compiled with the GPU hidden are those for which a GPU looks: before, or at a first start."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kestrel_engine.compiling.cards import CARDS

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("precision", ["bfloat16", "fp8"])
@pytest.mark.parametrize("model", ["md2", "md3"])
def test_an_engine_finds_all_its_kernels(
    model: str, precision: str, golden_folder: Any, tmp_path: Path
) -> None:
    major, minor = torch.cuda.get_device_capability()
    if (arch := f"sm_{major}{minor}") not in CARDS:
        pytest.skip(f"kernels for {arch} are not compiled ahead")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    kernels, own = tmp_path / "kernels", tmp_path / "own"
    flags = ["--arch", arch, "--multiprocessors", str(sms), "--precision", precision]
    flags += ["--weights", str(golden_folder(model)), "--out", str(kernels)]
    flags += ["--max-batch-size", "16", "--kv-cache-gib", "2"]
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    compiled = subprocess.run(
        [sys.executable, "-m", "kestrel_grpc", "compile", *flags],
        env={**environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    if "are not multiples of" in compiled.stderr:
        pytest.skip("this model has no FP8 products")
    assert compiled.returncode == 0, compiled.stderr
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.gpu.carried_engine",
            golden_folder(model),
            kernels,
            precision,
        ],
        env={**environ, "TRITON_CACHE_DIR": str(own)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["ready"]["compiled"] == 0 and counts["ready"]["cached"] > 20
    assert counts["asked"] == counts["ready"]
    assert not [path for path in own.rglob("*") if path.is_file()]


def test_a_first_start_compiles_its_kernels_in_a_process_of_its_own(
    golden_folder: Any, tmp_path: Path
) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        "-m",
        "tests.gpu.carried_engine",
        golden_folder("md2"),
        "",
        "bfloat16",
    ]

    def start() -> tuple[str, dict[str, int]]:
        done = subprocess.run(
            command,
            env={**environ, "TRITON_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stderr, json.loads(done.stdout.splitlines()[-1])["ready"]

    log, counts = start()
    assert "kernels were compiled in" in log, log
    assert counts["compiled"] == 0 and counts["cached"] > 20
    log, counts = start()
    assert "kernels were compiled in" not in log
    assert counts["compiled"] == 0
