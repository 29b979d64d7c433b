"""Rows in FP8 against plain torch: how far off they are, what is added in place, odd widths, strides, rows of zeros."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from kestrel_engine.kernels.layer_norm import FP8_MAX, layer_norm
from kestrel_engine.kernels.linear.fp8_rows import FP8, Fp8Rows, layer_norm_fp8, quantise_rows
from tests.kernels.tensors import DEVICE, DTYPES, random

HALF_STEP = 2.0**-4
"""Of 3 bits of fraction: the most that rounding changes a number, relatively."""
SMALLEST = 2.0**-10
"""Half the distance of the numbers next to zero, before scaling."""


def widened(rows: Fp8Rows) -> torch.Tensor:
    assert rows.values.dtype == FP8 and rows.scales.dtype == torch.float32
    assert rows.scales.shape == (len(rows.values), 1)
    return rows.values.double() * rows.scales.double()


def assert_rounded(rows: Fp8Rows, wanted: torch.Tensor, slack: float = 1e-5) -> None:
    """Each element is off by half a step of FP8 at most, and by ``slack`` of its row's peak."""
    peak = wanted.abs().amax(1, keepdim=True)
    bound = wanted.abs() * HALF_STEP + peak / FP8_MAX * SMALLEST + slack * peak
    off = (widened(rows) - wanted).abs()
    assert bool((off <= bound).all()), float((off / bound).max())
    torch.testing.assert_close(rows.scales.double(), peak / FP8_MAX, rtol=1e-2, atol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 63, 256, 1152])
@pytest.mark.parametrize("gelu", [False, True])
def test_rows_are_rounded_to_fp8(dtype, dim, gelu):
    # Rows of very different sizes show that each has its own scale.
    sizes = torch.tensor([[1.0], [30.0], [0.01]], device=DEVICE)
    x = (random(3, dim) * sizes).to(dtype)
    if gelu:
        # Below, GELU in float32 has few digits.
        x = x.clamp_min(-3)
    wanted = F.gelu(x.double(), approximate="tanh") if gelu else x.double()
    # A GPU's tanh is approximate.
    assert_rounded(quantise_rows(x, gelu=gelu), wanted, slack=1e-3 if gelu else 1e-5)


def test_the_mean_error_is_a_fortieth():
    x = random(40, 512)
    off = (widened(quantise_rows(x)) - x.double()).norm() / x.norm()
    assert 0.02 < off < 0.03, "3 bits of fraction: 2.6 % of a normal row"


def test_zeros_have_a_scale_and_a_peak_is_the_largest_number():
    x = random(3, 48)
    x[1] = 0
    rows = quantise_rows(x)
    assert not rows.values[1].float().any() and bool((rows.scales > 0).all())
    assert rows.values[0].float().abs().max() == FP8_MAX


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 48, 96])
@pytest.mark.parametrize("larger", [0.01, 100.0])
def test_what_stands_left_shares_the_scale(dtype, width, larger):
    x = random(3, 70, dtype=dtype)
    left = (random(3, width + 8) * larger).to(dtype)[:, 8:]
    rows = quantise_rows(x, gelu=True, left=left)
    assert rows.values.shape == (3, width + 70)
    wanted = torch.cat([left.double(), F.gelu(x.double(), approximate="tanh")], 1)
    assert_rounded(rows, wanted, slack=1e-3)


def test_norms_are_those_of_what_is_rounded():
    x, weight, bias = random(5, 70) + 5, random(70), random(70)
    norms = torch.empty(5, device=DEVICE)
    rows = layer_norm_fp8(x, weight, bias, pending=None, norms=norms)
    wanted = F.layer_norm(x.double(), (70,), weight.double(), bias.double(), 1e-5).norm(dim=1)
    torch.testing.assert_close(norms.double(), wanted, rtol=1e-5, atol=0)
    torch.testing.assert_close(widened(rows).norm(dim=1), wanted, rtol=0.02, atol=0)


def test_strided_rows_and_none():
    x = random(4, 100)
    rows, wanted = quantise_rows(x[:, 10:80]), quantise_rows(x[:, 10:80].contiguous())
    assert torch.equal(rows.values.float(), wanted.values.float())
    assert quantise_rows(x[:0]).values.shape == (0, 100)
    empty = layer_norm_fp8(x[:0], x[0], x[1], pending=None)
    assert empty.values.shape == (0, 100) and empty.scales.shape == (0, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 63, 1152, 2048])
@pytest.mark.parametrize("owed", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_layer_norm(dtype, dim, owed, added):
    x = (random(3, dim) * 3 + 20).to(dtype)
    weight, bias = random(dim, dtype=dtype), random(dim, dtype=dtype)
    pending = random(dim) if owed else None
    # Rows of a wider buffer, as a product's output may be.
    add = random(3, dim + 16, dtype=dtype)[:, 16:] if added else None
    stream = x if add is None else (x.float() + add.float()).to(dtype)
    whole = stream.double() if pending is None else stream.double() + pending.double()
    wanted = F.layer_norm(whole, (dim,), weight.double(), bias.double(), 1e-5)
    out = torch.full_like(x, float("nan"))
    rows = layer_norm_fp8(x, weight, bias, pending=pending, add=add, out=out)
    assert torch.equal(x, stream), "what is added stays in the stream, what is pending does not"
    assert_rounded(rows, wanted, slack=1e-4)
    plain = layer_norm(stream, weight, bias, pending=pending)
    # Compiled apart, sums may be taken in another order.
    torch.testing.assert_close(out, plain, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5)


def test_layer_norm_of_strided_rows():
    x, weight, bias = random(3, 100), random(70), random(70)
    rows = layer_norm_fp8(x[:, 10:80], weight, bias, pending=None)
    wanted = F.layer_norm(x[:, 10:80].double(), (70,), weight.double(), bias.double(), 1e-5)
    assert_rounded(rows, wanted)


def test_a_row_has_the_same_bits_in_every_batch():
    x, weight, bias = random(5, 70) + 5, random(70), random(70)
    together = layer_norm_fp8(x.clone(), weight, bias, pending=None, add=x)
    for i in range(5):
        alone = layer_norm_fp8(x[i : i + 1].clone(), weight, bias, pending=None, add=x[i : i + 1])
        assert torch.equal(alone.values.float(), together.values[i : i + 1].float())
        assert torch.equal(alone.scales, together.scales[i : i + 1])
