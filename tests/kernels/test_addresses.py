"""The check that interpreted kernels access only what their arguments cover finds what would be a fault on a GPU."""

import pytest
import torch
import triton
import triton.language as tl

pytestmark = [
    pytest.mark.usefixtures("checked_addresses"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="for interpreted kernels"),
]


@triton.jit
def _copy_kernel(x, out, count, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at, mask=at < count, other=0.0), mask=at < count)


def copied(x, out, count):
    _copy_kernel[(1,)](x, out, count, SIZE=16)
    return out


def test_what_is_masked_and_what_is_within_strides_is_allowed():
    x = torch.arange(20.0)
    assert torch.equal(copied(x[4:9], torch.empty(5), 5), x[4:9])
    assert torch.equal(copied(x[::2], torch.empty(16), 16), x[:16])


@pytest.mark.parametrize("size", [5, 16])
def test_numbers_beyond_a_tensor_are_a_fault(size):
    x, out = torch.zeros(64), torch.empty(64)
    same = x[:1].expand(size)  # One number, and a tensor of ``size`` by its shape.
    with pytest.raises(Exception, match=rf"_copy_kernel reads {size - 1} of {size} numbers beyond"):
        copied(same, out, size)
    with pytest.raises(Exception, match=rf"_copy_kernel reads {size} of {size} numbers beyond"):
        copied(x[:0], out, size)
    with pytest.raises(Exception, match=rf"_copy_kernel writes 1 of {size} numbers beyond"):
        copied(x, out[: size - 1], size)
