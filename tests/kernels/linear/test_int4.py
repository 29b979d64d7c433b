"""Weights in 4 bits on a GPU: kernels have exactly the widened values, and products agree with these."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from kestrel_engine.kernels.linear.int4 import widen
from kestrel_engine.kernels.linear.skinny_linear import skinny_linear, skinny_partials
from kestrel_engine.models.weight_only import to_groups, widened
from tests.kernels.tensors import DEVICE, DTYPES

pytestmark = pytest.mark.usefixtures("checked_addresses")

TOLERANCES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def narrow(n, k, group, dtype=torch.float32):
    """A weight in 4 bits whose rows have very different sizes, and whose zero points aren't whole."""
    q = torch.randint(0, 16, (n * k // group, group), dtype=torch.uint8, device=DEVICE)
    scale = torch.rand(len(q), 1, device=DEVICE) * 0.1 + 0.01
    zero = torch.rand(len(q), 1, device=DEVICE) * 15
    return to_groups(q, scale.to(dtype), zero.to(dtype), (n, k))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("n", "k", "group"), [(75, 64, 16), (32, 512, 128)])
def test_widening_gives_the_same_bits_as_the_reference(dtype, scales_dtype, n, k, group):
    weight, scales = narrow(n, k, group, scales_dtype)
    assert torch.equal(widen(weight, scales, dtype), widened(weight, scales, dtype))
    # A part of joined weights, with their row stride.
    right = weight[:, group:], scales[:, 2:]
    assert torch.equal(widen(*right, dtype), widened(weight, scales, dtype)[:, 2 * group :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "scales_dtype"),
    [(1, torch.float32), (1, torch.float16), (8, torch.float16), (33, torch.float32)],
)
@pytest.mark.parametrize(("n", "k", "group"), [(75, 96, 16), (128, 512, 128)])
def test_few_rows(dtype, rows, scales_dtype, n, k, group):
    weight, scales = narrow(n, k, group, scales_dtype)
    x, bias = torch.randn(rows, k, device=DEVICE).to(dtype), torch.randn(n, device=DEVICE).to(dtype)
    wide = widened(weight, scales, dtype).double()
    found = skinny_linear(x, weight, bias, scales=scales, gelu_from=n - 8)
    wanted = x.double() @ wide.T + bias.double()
    wanted[:, -8:] = F.gelu(wanted[:, -8:], approximate="tanh")
    assert (found.double() - wanted).norm() < TOLERANCES[dtype] * wanted.norm()
    for splits in (1, 2, 5):
        parts = skinny_partials(x, weight, splits=splits, scales=scales).double()
        wanted = x.double() @ wide.T
        assert parts.shape == (splits, rows, n)
        assert (parts.sum(0) - wanted).norm() < TOLERANCES[dtype] * wanted.norm()


def test_a_row_has_the_same_bits_in_every_batch():
    weight, scales = narrow(64, 256, 32)
    # On some processors BLAS, which the interpreter uses, adds in another order for more than 16 rows.
    x = torch.randn(20 if DEVICE == "cuda" else 16, 256, device=DEVICE)
    together = skinny_linear(x, weight, None, scales=scales)
    assert torch.equal(together[7:8], skinny_linear(x[7:8], weight, None, scales=scales))
