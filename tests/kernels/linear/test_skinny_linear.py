"""The decode GEMMs against float64: odd sizes, weights inside larger ones, GELU columns, split K, every tiling."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

import triton

from kestrel_engine.kernels.linear.skinny_linear import skinny_linear, skinny_partials
from kestrel_engine.kernels.linear.skinny_tiling import (
    Tiling,
    content_parts,
    default_splits,
    splits_of,
    tiling_of,
)
from kestrel_engine.runtime.gpu.gemm import Fp8Linear
from tests.kernels.tensors import DEVICE, DTYPES, poisoned, random

pytestmark = pytest.mark.usefixtures("checked_addresses")

TOLERANCES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().T


def assert_near(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.shape == wanted.shape
    error = (got.double() - wanted).norm() / wanted.norm()
    assert error < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 16, 33])
@pytest.mark.parametrize(("n", "k"), [(128, 256), (75, 130), (30, 17)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(dtype, rows, n, k, has_bias):
    x, weight = random(rows, k, dtype=dtype), random(n, k, dtype=dtype)
    bias = random(n, dtype=dtype) * 10 if has_bias else None
    wanted = product(x, weight) + (0 if bias is None else bias.double())
    out = poisoned(rows, n, dtype=dtype)
    assert skinny_linear(x, weight, bias, out=out) is out
    assert_near(out, wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize(("n", "k"), [(128, 256), (80, 144)])
def test_a_weight_in_fp8(dtype, rows, n, k):
    x = random(rows, k, dtype=dtype)
    # Rows of very different sizes show that each one has its own scale.
    narrow = Fp8Linear.of(random(n, k) * torch.logspace(-2, 2, n, device=DEVICE)[:, None])
    weight, bias = narrow.weight.float() * narrow.scales.T, random(n, dtype=dtype)
    out = skinny_linear(x, narrow.weight, bias, scales=narrow.scales, gelu_from=n - 8)
    wanted = product(x, weight) + bias.double()
    wanted[:, -8:] = F.gelu(wanted[:, -8:], approximate="tanh")
    assert_near(out, wanted, dtype)
    for tiling in (None, Tiling(32, 32, boxes=True)):
        parts = skinny_partials(x, narrow.weight, splits=2, scales=narrow.scales, tiling=tiling)
        assert_near(parts.sum(0), product(x, weight), dtype)


@pytest.mark.parametrize("one_row", [False, True])
@pytest.mark.parametrize("gelu_from", [0, 50, 96])
def test_gelu_from_a_column_on(gelu_from, one_row):
    x, weight, bias = random(1, 64), random(96, 64), random(96)
    wanted = product(x, weight) + bias.double()
    wanted[:, gelu_from:] = F.gelu(wanted[:, gelu_from:], approximate="tanh")
    tiling = Tiling(32, 32, one_row=one_row)
    out = skinny_linear(x, weight, bias, gelu_from=gelu_from, tiling=tiling)
    assert_near(out, wanted, torch.float32)


def test_gelu_of_large_values_is_finite():
    x = torch.tensor([[100.0], [-100.0]], device=DEVICE)
    out = skinny_linear(x, torch.ones(1, 1, device=DEVICE), None, gelu_from=0)
    assert out.flatten().tolist() == [100.0, 0.0]


@pytest.mark.parametrize("rows", [1, 5])
def test_weights_and_rows_inside_larger_tensors(rows):
    """proj and fc2 are columns of one tensor, qkv and fc1 rows of one; the output may be columns as well."""
    whole, x = random(80, 300), random(rows, 200)
    out = poisoned(rows, 100)
    skinny_linear(x[:, 50:], whole[10:70, 100:250], None, out=out[:, 20:80])
    assert_near(out[:, 20:80], product(x[:, 50:], whole[10:70, 100:250]), torch.float32)
    assert out[:, :20].isnan().all() and out[:, 80:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("splits", [None, 1, 3, 4])
@pytest.mark.parametrize(("n", "k"), [(64, 512), (45, 330)])
def test_partials_add_up(dtype, rows, splits, n, k):
    x, weight = random(rows, k, dtype=dtype), random(n, k, dtype=dtype)
    partials = skinny_partials(x, weight, splits=splits)
    assert partials.dtype == torch.float32
    assert partials.shape == (splits or splits_of(weight), rows, n)
    assert_near(partials.sum(0), product(x, weight), dtype)


@pytest.mark.parametrize("one_row", [False, True])
def test_a_split_is_its_part_of_k_and_an_empty_one_is_zero(one_row):
    x, weight = random(1, 96), random(40, 96)
    out = poisoned(5, 1, 40)
    # Tiles of 32: three splits hold one each, two have nothing left.
    assert skinny_partials(x, weight, out=out, tiling=Tiling(16, 32, one_row=one_row)) is out
    for split in range(3):
        part = slice(split * 32, split * 32 + 32)
        assert_near(out[split], product(x[:, part], weight[:, part]), torch.float32)
    assert out[3:].eq(0).all()


@pytest.mark.parametrize(
    "tiling",
    [
        Tiling(16, 64),
        Tiling(64, 16),
        Tiling(32, 32, one_row=True),
        Tiling(32, 128, one_row=True),
        Tiling(32, 32, boxes=True),
    ],
)
@pytest.mark.parametrize(("n", "k"), [(64, 128), (50, 128), (50, 100)])
def test_every_tiling_computes_the_same(tiling, n, k):
    x, weight, bias = random(1, k), random(n, k), random(n)
    out = skinny_linear(x, weight, bias, tiling=tiling)
    assert_near(out, product(x, weight) + bias.double(), torch.float32)


@pytest.mark.parametrize("column", [0, 16, 3])
def test_boxes_of_a_part_of_a_weight(column):
    """Rows that do not start on 16 bytes are read without boxes."""
    weight, x = random(60, 200)[7:, column : column + 128], random(3, 128)
    partials = skinny_partials(x, weight, splits=2, tiling=Tiling(32, 32, boxes=True))
    assert_near(partials.sum(0), product(x, weight), torch.float32)


def test_rows_do_not_touch_each_other():
    x, weight = random(6, 200), random(90, 200)
    whole = skinny_linear(x, weight, None)
    x[2] = float("nan")
    again = skinny_linear(x, weight, None)
    assert again[2].isnan().all()
    keep = [0, 1, 3, 4, 5]
    assert torch.equal(again[keep], whole[keep])


def test_no_rows_and_too_many():
    weight = random(32, 64)
    assert skinny_linear(random(0, 64), weight, None).shape == (0, 32)
    with pytest.raises(ValueError, match="129 rows"):
        skinny_linear(random(129, 64), weight, None)


def test_splits_fill_the_chip_and_stay_long():
    """The shapes of Moondream, and one too small to split."""
    assert default_splits(2048, 10240) == 4
    assert default_splits(2048, 2048) == 4
    assert default_splits(2048, 6 * 256) == 3
    assert default_splits(2048, 9 * 256) == 3
    assert default_splits(2048, 2050) == 4
    assert default_splits(256, 256) == 1
    assert default_splits(51200, 2048) == 1
    in_bytes = torch.empty(2048, 10240, dtype=torch.uint8, device="meta")
    assert (splits_of(in_bytes), splits_of(in_bytes[:, :2050])) == (8, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("rows", "n", "k", "tau_k", "columns"), [(1, 192, 128, 192, 4), (3, 150, 64, 90, 24)]
)
def test_parts_of_what_tau_needs_of_the_columns(dtype, rows, n, k, tau_k, columns):
    """Tiles of tau's columns, one that is so in part, and others that leave nothing."""
    x, bias = random(rows, k, dtype=dtype), random(n, dtype=dtype)
    weight = (random(n, k) / k**0.5).to(dtype)
    of_tau = (random(columns, tau_k) / tau_k**0.5).to(dtype)
    parts = poisoned(content_parts(rows, weight, tau_k), rows, columns)
    out = skinny_linear(x, weight, bias, gelu_from=tau_k, tau=(of_tau, parts))
    assert torch.equal(out, skinny_linear(x, weight, bias, gelu_from=tau_k))
    activated = F.gelu(out[:, :tau_k].float()).to(dtype)
    assert_near(parts.sum(0), product(activated, of_tau), dtype)


@pytest.mark.parametrize("rows", [1, 33])
def test_what_tau_needs_of_a_weight_in_fp8(rows):
    """Tau's weights keep their dtype beside x in float16: here float32, on a GPU bfloat16."""
    own = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    n, k, columns = 192, 128, 24
    x, narrow = random(rows, k, dtype=torch.float16), Fp8Linear.of(random(n, k) / k**0.5)
    of_tau = (random(columns, n) / n**0.5).to(own)
    parts = poisoned(content_parts(rows, narrow.weight, n), rows, columns)
    out = skinny_linear(x, narrow.weight, None, scales=narrow.scales, tau=(of_tau, parts))
    assert torch.equal(out, skinny_linear(x, narrow.weight, None, scales=narrow.scales))
    activated = F.gelu(out.float()).to(own)
    assert_near(parts.sum(0), product(activated, of_tau), own)


@pytest.mark.parametrize("rows", [1, 16, 17, 32, 33, 64, 65, 128])
@pytest.mark.parametrize("weight_bytes", [1, 2])
@pytest.mark.parametrize(
    ("n", "k"), [(14336, 2048), (2048, 10240), (2048, 2048), (6144, 2048), (51200, 2048)]
)
def test_the_tiles_of_released_shapes_fit_into_shared_memory(rows, weight_bytes, n, k):
    """An H100 gives a program 227 KiB. The compiler keeps as many tiles of the weight and of x as there are stages."""
    splits = default_splits(n, k) if n == 2048 else 1
    t = tiling_of(rows, n, k, splits, weight_bytes)
    width = max(16, triton.next_power_of_2(rows))
    assert t.stages * t.block_k * (t.block_n * weight_bytes + width * 2) <= 226 << 10
