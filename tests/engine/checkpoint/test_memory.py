"""The host's memory as the engine reads it, and what loading really takes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kestrel_engine.checkpoint.weights.memory import host_available, host_total

GIB = 2**30


def proc(folder: Path, available: int, cgroup: str) -> Path:
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available // 1024} kB\n")
    (folder / "self/cgroup").write_text(cgroup)
    return folder


def group(folder: Path, limit: str, usage: int, inactive: int, *, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = {
        2: ("memory.max", "memory.current", ""),
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    }
    limit_name, usage_name, prefix = names[version]
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / usage_name).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{prefix}inactive_file {inactive}\n")


def test_without_limits_the_host_decides(tmp_path):
    root = proc(tmp_path / "proc", 8 * GIB, "0::/\n")
    assert host_available(proc=root, cgroups=tmp_path / "none") == 8 * GIB


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_control_group_counts_and_file_cache_is_available(tmp_path, version):
    line = "0::/a/b\n" if version == 2 else "5:cpu,memory:/a/b\n1:cpu:/x\n"
    root = proc(tmp_path / "proc", 8 * GIB, line)
    base = tmp_path / "cg" if version == 2 else tmp_path / "cg/memory"
    unlimited = "max" if version == 2 else str(2**63 - 4096)
    group(base / "a/b", unlimited, 2 * GIB, 0, version=version)
    group(base / "a", str(4 * GIB), 3 * GIB, GIB // 2, version=version)
    assert host_available(proc=root, cgroups=tmp_path / "cg") == GIB + GIB // 2
    (root / "meminfo").write_text(f"MemTotal: {16 * GIB // 1024} kB\n")
    assert host_total(proc=root, cgroups=tmp_path / "cg") == 4 * GIB


def test_a_platform_without_proc_still_answers(tmp_path):
    answer = host_available(proc=tmp_path, cgroups=tmp_path)
    assert answer is not None and answer > 0


PEAK = """
import json, re, sys, threading, time
import torch
from safetensors.torch import save_file
from kestrel_engine.checkpoint.weights.expected import expected_tensors
from tests.checkpoint_loading import load_checkpoint
from kestrel_engine.types.model_config import parse_model_config

torch.set_num_threads(1)
folder, dtype, narrow = sys.argv[1], getattr(torch, sys.argv[2]), sys.argv[3]
raw = {"config": {
    "text": {"dim": 512, "ff_dim": 512, "n_layers": 2, "n_heads": 8, "n_kv_heads": 8, "vocab_size": 16384,
             "tau_attn": True, "moe": {"num_experts": 16, "start_layer": 1, "expert_inner_dim": 1024}},
    "vision": {"enc_dim": 64, "enc_n_layers": 1, "enc_ff_dim": 64, "enc_n_heads": 2, "proj_inner_dim": 64,
               "proj_out_dim": 512},
    "region": {"dim": 512}}}
config = parse_model_config(raw)

def anonymous():
    text = open("/proc/self/status").read()
    kinds = ("RssAnon", "RssFile") if narrow == "int8" else ("RssAnon",)
    return sum(int(re.search(kind + r":\\s+(\\d+)", text)[1]) * 1024 for kind in kinds)

def write():
    tensors = {name: torch.full(shape, 0.5, dtype=torch.bfloat16) for name, shape in expected_tensors(config).items()}
    for leaf, b, scale in (("fc1", "experts", "up"), ("fc2", "output_experts", "down")):
        weight = tensors.pop(f"text.blocks.1.mlp.{leaf}.weight").to(torch.float8_e4m3fn)
        tensors[f"text_model.transformer.h.1.mlp.{b}.weight"] = weight
        tensors[f"text_model.transformer.h.1.moe_quant.{scale}_scale"] = torch.ones(weight.shape[:2])
    save_file(tensors, folder + "/model.safetensors")
    open(folder + "/config.json", "w").write(json.dumps(raw))

if dtype is torch.int8:
    write()
    raise SystemExit
peak, running = 0, True
def sample():
    global peak
    while running:
        peak = max(peak, anonymous())
        time.sleep(0.001)
torch.ones(1000).to(torch.bfloat16).sum()
before = anonymous()
watcher = threading.Thread(target=sample)
watcher.start()
loaded = load_checkpoint(folder, dtype=dtype, narrow=narrow)
running = False
watcher.join()
peak = max(peak, anonymous())
print(json.dumps({"peak": peak - before, "weights": sum(t.nbytes for t in loaded.tensors.values())}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc/self/status")
def test_anonymous_memory_stays_below_the_weights_and_a_fifth(tmp_path):
    def run(dtype: str, narrow: str = "wide") -> str:
        root = Path(__file__).parents[3]
        command = [sys.executable, "-c", PEAK, str(tmp_path), dtype, narrow]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("int8")  # writes the checkpoint, in a process of its own
    wide = json.loads(run("float32"))
    assert wide["weights"] > 150_000_000
    assert wide["peak"] < 1.2 * wide["weights"]
    stored = json.loads(run("bfloat16"))
    # What is stored as bfloat16 stays mapped; only the eight-bit experts become anonymous memory.
    assert stored["peak"] < 0.8 * stored["weights"]
    # Not the whole file beside the result, but copies of one tensor's numbers in float32.
    rounded = json.loads(run("bfloat16", "int8"))
    assert rounded["peak"] < rounded["weights"] + 170_000_000
