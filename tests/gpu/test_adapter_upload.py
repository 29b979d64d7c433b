"""The copy of adapters to a device: in pieces, beside its steps, with the same bits."""

import pytest
import torch

from kestrel_engine.models.low_rank import LowRank
from kestrel_engine.runtime.gpu.adapters.upload import PIECE_BYTES, SlabUpload
from kestrel_engine.types.adapter import Adapter


@pytest.mark.parametrize("num_bytes", [2, PIECE_BYTES - 2, PIECE_BYTES, 5 * PIECE_BYTES // 2])
def test_all_bits_arrive(num_bytes: int) -> None:
    device = torch.device("cuda")
    upload = SlabUpload(device, reserved_bytes=4 * PIECE_BYTES)
    reserved = torch.cuda.memory_reserved(device)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        bits = torch.randint(-(2**15), 2**15, (num_bytes // 2,), generator=generator)
        slabs = bits.to(torch.int16).view(torch.bfloat16).view(1, -1)
        side = torch.randn(3, 5, generator=generator)
        host = Adapter("a", "key", {"m": LowRank(side, side.T.contiguous())}, 0, {"mlp": slabs})
        made = upload(host)
        assert made.slabs["mlp"].is_cuda and made.slabs["mlp"].shape == slabs.shape
        assert torch.equal(made.slabs["mlp"].cpu().view(torch.int16), slabs.view(torch.int16))
        assert torch.equal(made.weights["m"].a.cpu(), side)
        assert host.slabs["mlp"].device.type == "cpu"
        del made
    # Slabs lie in the memory that was taken at the start; small tensors take a block of 2 MiB.
    assert torch.cuda.memory_reserved(device) <= reserved + (4 << 20)
