"""Loading onto a CUDA device: the same bits as on the CPU, whatever reads them."""

import pytest
import torch
from safetensors.torch import save_file

from kestrel_engine.checkpoint.files import read_headers
from kestrel_engine.checkpoint.weights.device_reader import DeviceReader
from kestrel_engine.checkpoint.weights.random_weights import random_checkpoint
from kestrel_engine.types.model_config import parse_model_config
from tests.tiny import TINY


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt"])
def test_many_pieces_arrive_while_memory_is_used_again(tmp_path, name):
    """Each tensor is changed on the device and dropped at once, so that the next lies where it lay."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"t{index:03}": torch.randint(
            -128, 127, (3_000_000 + 999_983 * (index % 7),), dtype=torch.int8, generator=generator
        ).view(torch.float8_e4m3fn)
        for index in range(60)
    }
    if name.endswith(".pt"):
        torch.save(tensors, tmp_path / name)
    else:
        save_file(tensors, tmp_path / name)
    wanted = list(read_headers((tmp_path / name,)).values())
    sums, expected = [], []
    with DeviceReader(wanted, torch.device("cuda")) as read:
        for one in wanted:
            got = read(one).view(torch.int8)
            for _ in range(3):
                sums.append(got.to(torch.int64).sum())
            got.zero_()
            del got
            expected += 3 * [tensors[one.name].view(torch.int8).to(torch.int64).sum()]
    assert torch.equal(torch.stack(sums).cpu(), torch.stack(expected))


def test_kept_experts_and_fingerprint(tmp_path):
    from benchmarks.gpu.startup import write_checkpoint
    from tests.checkpoint_loading import load_checkpoint

    write_checkpoint(str(TINY), tmp_path, device="cpu", keep_fp8=True)
    on_cpu, on_cuda = (
        load_checkpoint(tmp_path, dtype=torch.bfloat16, device=device, keep_fp8=True)
        for device in ("cpu", "cuda")
    )
    assert on_cuda.fingerprint == on_cpu.fingerprint
    assert on_cuda.tensors.keys() == on_cpu.tensors.keys()
    for name, tensor in on_cpu.tensors.items():
        there = on_cuda.tensors[name]
        assert there.is_cuda and there.dtype == tensor.dtype
        assert torch.equal(there.cpu().view(torch.uint8), tensor.view(torch.uint8)), name


def test_random_weights_of_the_true_shape_come_within_seconds_and_repeat():
    config = parse_model_config({}, family="moondream3")
    sums = []
    for _ in range(2):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        made = random_checkpoint(
            config, 1, torch.bfloat16, "cuda", keep_fp8=True, progress=lambda *_: None
        )
        end.record()
        end.synchronize()
        assert begin.elapsed_time(end) < 10_000
        sums.append(
            [t.view(torch.uint8).sum(dtype=torch.int64).item() for t in made.tensors.values()]
        )
        assert made.tensors["text.blocks.4.mlp.fc1.weight"].dtype == torch.float8_e4m3fn
        assert all(bool(t.float().std() > 0) for t in made.tensors.values())
        del made
        torch.cuda.empty_cache()
    assert sums[0] == sums[1]
