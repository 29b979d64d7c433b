"""The prefill path of a mixture of experts against models.text.Moe."""

import pytest
import torch

from tests.kernels.moe.moe_layer import Layer, relative_error
from tests.kernels.tensors import DEVICE, poisoned

moe_prefill = pytest.importorskip("kestrel_engine.kernels.moe.prefill")
route = pytest.importorskip("kestrel_engine.kernels.moe.route").route

F32, F16 = torch.float32, torch.float16
BFLOAT16 = [(torch.bfloat16, 1e-2)] * (DEVICE == "cuda")


def prefill(layer: Layer, u: torch.Tensor, **kwargs) -> torch.Tensor:
    out = poisoned(*u.shape, dtype=u.dtype)
    return moe_prefill.moe_prefill(
        u, *route(layer.logits(u), layer.k), *layer.tensors(), out=out, **kwargs
    )


@pytest.mark.parametrize("num_tokens", [1, 131])
def test_float32_is_the_models_layer(num_tokens):
    layer = Layer(num_experts=8, k=3, dim=64, inner=48, seed=num_tokens)
    u = torch.randn(num_tokens, 64, device=DEVICE)
    torch.testing.assert_close(prefill(layer, u), layer.expected(u), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("num_tokens", [20])
@pytest.mark.parametrize(
    ("dtype", "fp8", "within"), [(F16, False, 2e-3), (F16, True, 2e-3), (F32, True, 1e-5)]
)
def test_half_and_fp8_within_their_rounding(num_tokens, dtype, fp8, within):
    layer = Layer(num_experts=4, k=3, dim=72, inner=40, dtype=dtype, fp8=fp8)
    u = torch.randn(num_tokens, 72, device=DEVICE, dtype=dtype)
    assert relative_error(prefill(layer, u), layer.expected(u)) < within


@pytest.mark.parametrize("num_tokens", [20, pytest.param(130, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dtype", "within"), [(F16, 2e-3), (F32, 1e-5), *BFLOAT16])
@pytest.mark.parametrize(("group", "dim", "inner"), [(16, 96, 64), (32, 64, 64)])
def test_four_bits(num_tokens, dtype, within, group, dim, inner):
    layer = Layer(num_experts=4, k=2, dim=dim, inner=inner, group=group)
    u = torch.randn(num_tokens, dim, device=DEVICE).to(dtype)
    assert relative_error(prefill(layer, u), layer.expected(u)) < within


@pytest.mark.parametrize("scales", [F16, F32])
def test_four_bits_in_tiles_that_nothing_divides(scales):
    """A step has half a group. Two experts have no tokens."""
    layer = Layer(num_experts=6, k=2, dim=192, inner=64, group=32)
    layer.in_scales_of(scales)
    layer.bias[[1, 4]] = -100.0
    u = torch.randn(37, 193, device=DEVICE, dtype=F16)[:, 1:]
    tile = moe_prefill.Tile(128, 16, 4, 2, swap=True)
    out = prefill(layer, u, tiles=(16, moe_prefill.TilePair(tile, tile)))
    assert relative_error(out, layer.expected(u)) < 2e-3


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("tma", [False, True])
def test_any_tile_gives_the_same(swap, tma):
    """Inner and dim are multiples of no tile."""
    layer = Layer(num_experts=4, k=2, dim=72, inner=40)
    u = torch.randn(20, 72, device=DEVICE)
    tile = moe_prefill.Tile(32, 32, 4, 2, swap, tma)
    out = prefill(layer, u, tiles=(16, moe_prefill.TilePair(tile, tile)))
    torch.testing.assert_close(out, layer.expected(u), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("favourites", [[5], [0, 6]])
def test_experts_chosen_by_all_and_by_nobody(favourites):
    layer = Layer(num_experts=12, k=len(favourites) + 1, dim=32, inner=16)
    layer.bias[favourites] = 100.0
    layer.bias[[1, 7]] = -100.0
    u = torch.randn(40, 32, device=DEVICE)
    torch.testing.assert_close(prefill(layer, u), layer.expected(u), atol=2e-5, rtol=1e-5)


def test_the_residual_is_added_in_place_or_not():
    layer = Layer(num_experts=4, k=2, dim=32, inner=16)
    u, x = torch.randn(2, 20, 32, device=DEVICE)
    expected = x + layer.expected(u)
    out = prefill(layer, u, add_to=x)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-5)
    chosen = route(layer.logits(u), 2)
    moe_prefill.moe_prefill(u, *chosen, *layer.tensors(), add_to=x, out=x)
    assert torch.equal(x, out)


def test_rows_of_a_wider_matrix():
    layer = Layer(num_experts=4, k=2, dim=32, inner=16)
    u = torch.randn(40, 80, device=DEVICE)[:, :32]
    torch.testing.assert_close(prefill(layer, u), layer.expected(u), atol=2e-5, rtol=1e-5)


def test_no_tokens():
    layer = Layer(num_experts=4, k=2, dim=32, inner=16)
    u = torch.zeros(0, 32, device=DEVICE)
    chosen = torch.zeros(0, 2, dtype=torch.int32, device=DEVICE)
    out = moe_prefill.moe_prefill(u, chosen.float(), chosen, *layer.tensors())
    assert out.shape == (0, 32)
