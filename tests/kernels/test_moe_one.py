"""Experts of a single token against models.text.Moe."""

import pytest
import torch

from tests.kernels.moe_layer import DEVICE, Layer, poisoned, relative_error

moe_decode = pytest.importorskip("kestrel_engine.kernels.moe_decode")
moe_one = pytest.importorskip("kestrel_engine.kernels.moe_one")
route = pytest.importorskip("kestrel_engine.kernels.moe_route").route

F32, F16 = torch.float32, torch.float16
TILES = [moe_one.OneTile(), moe_one.OneTile(12, 2, 3, registers=64)]


def one(layer: Layer, u: torch.Tensor, tile: "moe_one.OneTile") -> torch.Tensor:
    parts = poisoned(layer.k, 1, u.shape[1])
    routed = route(layer.logits(u), layer.k)
    return moe_decode.moe_decode(u, *routed, *layer.tensors(), out=parts, tiles=tile)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("dim", "inner"), [(256, 128), (72, 40), (384, 136)])
def test_float32_is_the_models_layer(tile, dim, inner):
    """Sizes that are multiples of a program's rows and a warp's columns, and sizes that are not."""
    layer = Layer(num_experts=8, k=3, dim=dim, inner=inner, seed=dim)
    u = torch.randn(1, dim, device=DEVICE)
    torch.testing.assert_close(one(layer, u, tile).sum(0), layer.expected(u), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "fp8", "within"), [(F16, False, 2e-3), (F16, True, 2e-3), (F32, True, 1e-5)]
)
def test_half_and_fp8_within_their_rounding(dtype, fp8, within):
    layer = Layer(num_experts=8, k=3, dim=1024, inner=96, dtype=dtype, fp8=fp8)
    u = torch.randn(1, 1024, device=DEVICE, dtype=dtype)
    assert relative_error(one(layer, u, TILES[0]).sum(0), layer.expected(u)) < within


def test_the_sum_is_that_of_other_tiles():
    layer = Layer(num_experts=6, k=3, dim=62, inner=32)
    u = torch.randn(1, 62, device=DEVICE)
    total = one(layer, u, TILES[0])
    assert total.shape == (1, 1, 62)
    torch.testing.assert_close(total, one(layer, u, TILES[1]), atol=1e-6, rtol=1e-6)
    routed = route(layer.logits(u), 3)
    tiles = moe_decode.Tiles(moe_decode.Tile(16, 32, 4, 2), moe_decode.Tile(16, 32, 4, 2, dot=True))
    others = moe_decode.moe_decode(u, *routed, *layer.tensors(), tiles=tiles)
    torch.testing.assert_close(total[0], others.sum(0), atol=1e-6, rtol=1e-5)
