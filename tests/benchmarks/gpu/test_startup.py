"""The start-up benchmark writes checkpoints that really load, and times a real server."""

import json

import pytest
import torch

from benchmarks.gpu import startup
from tests.checkpoint_loading import load_checkpoint
from tests.tiny import TINY


def test_a_written_checkpoint_is_complete_and_keeps_its_eight_bits(tmp_path):
    size = startup.write_checkpoint(str(TINY), tmp_path, device="cpu", keep_fp8=True)
    loaded = load_checkpoint(tmp_path, dtype=torch.bfloat16, keep_fp8=True)
    assert loaded.tensors["text.blocks.1.mlp.fc2.weight"].dtype == torch.float8_e4m3fn
    assert loaded.tensors["text.blocks.1.mlp.fc2.scale"].dtype == torch.float32
    stamp = (tmp_path / "model.safetensors").stat().st_mtime_ns
    assert startup.write_checkpoint(str(TINY), tmp_path, device="cpu", keep_fp8=True) == size
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns == stamp, "the next run reuses it"


@pytest.mark.slow
def test_a_server_starts_on_it(tmp_path):
    path = tmp_path / "report.json"
    flags = ("--folder", str(tmp_path), "--json", str(path), "--fp8", "--max-seq-length", "640")
    startup.main(["--quick", *flags])
    report = json.loads(path.read_text())
    (figure,) = report["figures"]
    assert figure["name"] == "kestrel-tiny: start to ready" and 0.1 < figure["value"] < 200
    assert not figure["at_least"], "less is better"
