"""`kestrel-grpc compile`: every kernel that the GPU runtime launches compiles for GPUs, on a machine without one.

Interpreted kernels compute the right numbers even where Triton's compiler refuses them. test_carried_kernels.py shows
that a GPU looks for the kernels that this command compiles.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engine.runtime.gpu.small_models import MOE, RAW
from tests.tiny import TINY

pytest.importorskip("triton")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled there anyway"),
]

KERNELS = {
    "_adapted_layer_norm_kernel", "_decode", "_decode_experts", "dot_kernel", "_feed_kernel", "_flag_kernel",
    "_keep_kernel", "_layer_norm_kernel", "_likeliest_kernel", "_patchify", "_pool_tiles", "_resample", "_router",
    "_shrink_kernel", "_text_kernel", "draw_kernel", "refine_kernel",
}  # fmt: skip
"""Some of those of all kinds of passes: images, prompts, decode, experts, adapters, greedy and drawn rows."""
SHARED_BYTES = 227 << 10
"""The most shared memory of a program on an H100."""
REGISTERS = 65536
"""Those of a multiprocessor. A warp takes them in units of 256."""


def compiled(model: Path, folder: Path) -> str:
    """Runs the command and returns what it printed."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kestrel_grpc", "compile", "--arch", "sm_90", "--adapters"]
    command += ["--random-weights", "--max-batch-size", "1", "--step-crops", "1"]
    command += ["--tokenizer", str(TINY / "tokenizer.json")]
    done = subprocess.run(
        [*command, "--model", str(model), "--out", str(folder)],
        capture_output=True,
        text=True,
        env={
            **environ,
            "TRITON_CACHE_DIR": str(folder / "unused"),
            "CC": str(strict_linker(folder)),
        },
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def strict_linker(folder: Path) -> Path:
    """Returns a C compiler whose linker leaves out libraries that define nothing, as Ubuntu's does."""
    path = folder.parent / "cc"
    path.write_text('#!/bin/sh\nexec gcc -Wl,--as-needed "$@"\n')
    path.chmod(0o755)
    return path


def test_all_kernels_compile_once(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "kernels"
    model.mkdir()
    text = {
        **RAW["text"],
        "vocab_size": 800,
        "tau_attn": True,
        "moe": MOE,
    }  # It has all kernels of Moondream 2.
    (model / "config.json").write_text(json.dumps({"config": {**RAW, "text": text}}))
    first = compiled(model, folder)
    files = {path for path in folder.rglob("*") if path.is_file()}
    names = {path.stem for path in files if path.suffix == ".cubin"}
    assert names >= KERNELS
    modules = [path for path in files if path.suffix == ".so"]
    # They launch the kernels, and load the driver of the machine on which they run.
    assert modules and all(b"libcuda.so.1" in path.read_bytes() for path in modules)
    assert " 0 found " in first and not (folder / "unused").exists()
    assert " 0 kernels compiled " in compiled(model, folder)
    assert {path for path in folder.rglob("*") if path.is_file()} == files


@pytest.mark.parametrize("family", ["moondream2", "moondream3"])
def test_decode_steps_in_fp8_fit_an_h100(tmp_path: Path, family: str) -> None:
    """At the released shapes, where the interpreter would take hours."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.gpu.compiled_decode_steps", str(tmp_path), family]
    done = subprocess.run([*command, "1", "16", "64"], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout)
    products = [kernel for kernel in found if kernel[0] == "dot_kernel"]
    # Two for qkv with and without fc1, one for what follows, for two widths of a tile. For one row, qkv with fc1 has
    # another tile.
    assert len(products) == (5 if family == "moondream2" else 7)
    assert {"_decode", "_add_layer_norm_kernel"} < {name for name, *_ in found}
    for name, shared, registers, spilled, warps in found:
        assert shared <= SHARED_BYTES and registers <= 255 and not spilled, (name, shared, spilled)
        if name == "_decode_experts":
            # While one program waits for memory, another one multiplies.
            assert 2 * warps * 256 * -(-registers // 8) <= REGISTERS, (registers, warps)
