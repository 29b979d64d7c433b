"""The Hopper kernel for unmasked attention against plain attention in float32."""

import math

import pytest
import torch

from tests.kernels.moe.moe_layer import relative_error
from tests.kernels.tensors import DEVICE, poisoned

unmasked = pytest.importorskip("kestrel_engine.kernels.attention.unmasked")

ON_HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")


def plain(qkv):
    q, k, v = qkv.float().permute(2, 0, 3, 1, 4)
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
    return (weights @ v).transpose(1, 2)


def attended(qkv):
    n, length, _, heads, head_dim = qkv.shape
    # Rows with a gap between them, as where the output stands beside something else.
    out = poisoned(n, length, heads + 1, head_dim, dtype=qkv.dtype)
    unmasked.attend(*qkv.unbind(2), out[:, :, :heads])
    assert out[:, :, heads].isnan().all(), "nothing else is written to"
    return out[:, :, :heads]


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("blocks", "length", "heads", "head_dim"),
    [
        (1, 729, 16, 72),
        (10, 729, 16, 72),
        (3, 129, 1, 80),
        (2, 192, 3, 72),
        (40, 257, 2, 72),
        (1, 730, 32, 64),
        (5, 200, 2, 64),
    ],
)
def test_attention_is_that_of_plain_torch(blocks, length, heads, head_dim, dtype):
    assert unmasked.takes(length, head_dim, dtype, torch.device(DEVICE, 0))
    torch.manual_seed(blocks)
    qkv = torch.randn(blocks, length, 3, heads, head_dim, device=DEVICE).to(dtype)
    # Large scores, whose maximum moves from tile to tile, and values of different sizes.
    qkv[:, :, 0] *= 4
    qkv[:, :, 2] *= torch.logspace(-2, 2, length, device=DEVICE)[:, None, None]
    bound = 4e-3 if dtype == torch.bfloat16 else 6e-4
    assert relative_error(attended(qkv), plain(qkv)) < bound


@on_hopper
@pytest.mark.gpu
def test_numbers_that_are_not_finite_stay_in_their_block_and_head():
    torch.manual_seed(0)
    qkv = torch.randn(3, 729, 3, 4, 72, device=DEVICE).to(torch.bfloat16)
    expected = plain(qkv)
    qkv[1, 5, 1, 2, 3] = math.nan
    qkv[2, 728, 2, 0, 71] = math.inf
    found = attended(qkv)
    broken = ~torch.isfinite(found)
    assert broken[1, :, 2].all() and broken[2, :, 0, 71].all()
    broken[1, :, 2] = broken[2, :, 0, 71] = False
    assert not broken.any()
    assert relative_error(found[0], expected[0]) < 4e-3


def test_other_devices_and_shapes_take_torchs_attention():
    cpu, bf16 = torch.device("cpu"), torch.bfloat16
    assert not unmasked.takes(729, 72, bf16, cpu)
    if ON_HOPPER:
        here = torch.device("cuda", 0)
        assert unmasked.takes(729, 72, bf16, here)
        for length, head_dim, dtype in (
            (128, 72, bf16),
            (729, 56, bf16),
            (729, 76, bf16),
            (729, 96, bf16),
        ):
            assert not unmasked.takes(length, head_dim, dtype, here)
        assert not unmasked.takes(729, 72, torch.float32, here)
