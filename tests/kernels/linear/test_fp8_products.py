"""Products with an epilogue: their error, the scales of what is rounded, sizes that no tile divides."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from kestrel_engine.kernels.layer_norm import FP8_MAX
from kestrel_engine.kernels.linear.fp8_products import (
    ADD_SHORT_TILE,
    ADD_TILE,
    GELU_TILE,
    ProductTile,
    bounds,
    fp8_add,
    fp8_gelu,
)
from kestrel_engine.kernels.linear.fp8_rows import FP8, Fp8Rows, layer_norm_fp8, quantise_rows
from kestrel_engine.kernels.spared import hopper_multiprocessors

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
SMALL = ProductTile(16, 32, 32, 4, 1)

pytestmark = pytest.mark.skipif(
    DEVICE.type == "cuda" and not hopper_multiprocessors(DEVICE),
    reason="needs Hopper, or no GPU at all",
)


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def widened(rows: Fp8Rows) -> torch.Tensor:
    return rows.values.double() * rows.scales.double()


class Case:
    """A LayerNorm's rows in FP8 with their norms, a weight in FP8, and what float64 makes of both."""

    def __init__(self, rows: int, inputs: int, outputs: int) -> None:
        torch.manual_seed(0)
        x = torch.randn(rows, inputs, device=DEVICE).to(DTYPE)
        # Inputs and outputs of very different sizes: what bounds suffer from.
        gain = torch.ones(inputs, device=DEVICE).to(DTYPE)
        gain[3] = 20
        shift = torch.randn(inputs, device=DEVICE).to(DTYPE) * 0.1
        weight = torch.randn(outputs, inputs, device=DEVICE) * inputs**-0.5
        weight[5] *= 4
        self.weight, self.bias = weight.to(DTYPE), torch.randn(outputs, device=DEVICE).to(DTYPE)
        self.norms = torch.empty(rows, device=DEVICE)
        self.rows = layer_norm_fp8(x, gain, shift, pending=None, norms=self.norms)
        columns = quantise_rows(self.weight)
        self.weight8, self.scales = columns.values, columns.scales.T.contiguous()
        hidden = widened(self.rows) @ widened(columns).T + self.bias.double()
        self.of_rounded = F.gelu(hidden, approximate="tanh")

    def __call__(self) -> Fp8Rows:
        spread, least = bounds(self.weight, self.bias)
        found = fp8_gelu(
            self.rows,
            self.norms,
            self.weight8,
            self.scales,
            self.bias,
            spread=spread,
            least=least,
            tile=SMALL if DEVICE.type == "cpu" else GELU_TILE,
        )
        assert found.values.dtype == FP8 and found.scales.dtype == torch.float32
        return found


@pytest.mark.parametrize("shape", [(1, 16, 16), (37, 64, 48), (16, 96, 32), (5, 80, 112)])
def test_it_is_off_by_one_rounding(shape):
    case = Case(*shape)
    found = case()
    assert found.values.shape == (shape[0], shape[2]) and found.scales.shape == (shape[0], 1)
    # One rounding of 2.6 % in the mean; few numbers may be off by more.
    assert off(widened(found), case.of_rounded) < (0.04 if shape[0] > 1 else 0.07)


def test_scales_bound_every_row_and_not_by_far():
    case = Case(40, 64, 48)
    found = case()
    room = found.scales[:, 0].double() * FP8_MAX / case.of_rounded.abs().amax(1)
    assert bool((room >= 1).all()) and room.max() < 64, (room.min(), room.max())


def test_a_row_has_the_same_bits_in_every_batch():
    case = Case(20, 64, 48)
    together = case()
    case.rows, case.norms = Fp8Rows(*(part[17:18] for part in case.rows)), case.norms[17:18].clone()
    alone = case()
    assert torch.equal(alone.values.float(), together.values[17:18].float())
    assert torch.equal(alone.scales, together.scales[17:18])


def test_rows_of_zeros_and_none():
    case = Case(3, 32, 16)
    case.bias.zero_()
    case.norms[1] = 0
    case.rows.values.view(torch.uint8)[1] = 0
    found = case()
    assert not found.values[1].float().any() and bool((found.scales > 0).all())
    case.rows, case.norms = Fp8Rows(*(part[:0] for part in case.rows)), case.norms[:0]
    assert case().values.shape == (0, 16)


@pytest.mark.parametrize("shape", [(1, 16, 16), (37, 64, 48), (40, 96, 112), (0, 32, 16)])
@pytest.mark.parametrize("tile", [ADD_TILE, ADD_SHORT_TILE])
def test_a_product_is_added_to_its_rows_only(shape, tile):
    rows, inputs, outputs = shape
    torch.manual_seed(0)
    x = quantise_rows(torch.randn(rows, inputs, device=DEVICE).to(DTYPE))
    w = quantise_rows((torch.randn(outputs, inputs, device=DEVICE) * inputs**-0.5).to(DTYPE))
    room = torch.randn(rows + 2, outputs, device=DEVICE).to(DTYPE)
    wanted = room.double()
    wanted[:rows] += widened(x) @ widened(w).T
    if DEVICE.type == "cpu":
        tile = replace(SMALL, parts=tile.parts)
    fp8_add(x, w.values, w.scales.T.contiguous(), room[:rows], tile=tile)
    assert off(room, wanted) < 6e-3
    assert torch.equal(room[rows:].double(), wanted[rows:])
