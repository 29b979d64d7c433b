"""The decode path of a mixture of experts against models.text.Moe."""

import pytest
import torch

from tests.kernels.moe.moe_layer import Layer, relative_error
from tests.kernels.tensors import DEVICE, poisoned

moe_decode = pytest.importorskip("kestrel_engine.kernels.moe.decode")
route = pytest.importorskip("kestrel_engine.kernels.moe.route").route

F32, F16 = torch.float32, torch.float16
BFLOAT16 = [(torch.bfloat16, 1e-2)] * (DEVICE == "cuda")


def decode(layer: Layer, u: torch.Tensor, **kwargs) -> torch.Tensor:
    parts = poisoned(layer.k, len(u), u.shape[1])
    moe_decode.moe_decode(
        u, *route(layer.logits(u), layer.k), *layer.tensors(), out=parts, **kwargs
    )
    return parts.sum(0)


@pytest.mark.parametrize("num_tokens", [1, 3, 17, 64])
def test_float32_is_the_models_layer(num_tokens):
    layer = Layer(num_experts=8, k=3, dim=64, inner=32, seed=num_tokens)
    u = torch.randn(num_tokens, 64, device=DEVICE)
    torch.testing.assert_close(decode(layer, u), layer.expected(u), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize(
    ("dtype", "fp8", "within"), [(F16, False, 2e-3), (F16, True, 2e-3), (F32, True, 1e-5)]
)
def test_half_and_fp8_within_their_rounding(num_tokens, dtype, fp8, within):
    layer = Layer(num_experts=8, k=3, dim=160, inner=48, dtype=dtype, fp8=fp8)
    u = torch.randn(num_tokens, 160, device=DEVICE, dtype=dtype)
    assert relative_error(decode(layer, u), layer.expected(u)) < within


@pytest.mark.parametrize("num_tokens", [1, 5, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dtype", "within"), [(F16, 2e-3), (F32, 1e-5), *BFLOAT16])
@pytest.mark.parametrize(("group", "dim", "inner"), [(16, 96, 64), (32, 64, 64)])
def test_four_bits(num_tokens, dtype, within, group, dim, inner):
    layer = Layer(num_experts=4, k=2, dim=dim, inner=inner, group=group)
    u = torch.randn(num_tokens, dim, device=DEVICE).to(dtype)
    assert relative_error(decode(layer, u), layer.expected(u)) < within


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [5, 40])
def test_four_bits_in_parts_of_a_group(num_tokens):
    layer = Layer(num_experts=4, k=2, dim=512, inner=512, group=256)
    u = torch.randn(num_tokens, 512, device=DEVICE)
    assert relative_error(decode(layer, u), layer.expected(u)) < 1e-5


@pytest.mark.parametrize("sort", [16, 64])
def test_larger_groups_have_no_larger_tiles(sort):
    """A step of a whole group of 512 took 385 KiB of shared memory, which no GPU has."""
    assert moe_decode.tiles_of_groups(sort, 512) == moe_decode.tiles_of_groups(sort, 128)


@pytest.mark.parametrize(("num_tokens", "block_k"), [(1, 64), (17, 16)])
@pytest.mark.parametrize("scales", [F16, F32])
def test_four_bits_in_tiles_that_nothing_divides(num_tokens, block_k, scales):
    """A step has half a group, or two pairs of groups where three and one are. Two experts have no tokens."""
    layer = Layer(num_experts=6, k=2, dim=192, inner=64, group=32)
    layer.in_scales_of(scales)
    layer.bias[[1, 4]] = -100.0
    # No row is aligned to 8 bytes.
    u = torch.randn(num_tokens, 193, device=DEVICE, dtype=F16)[:, 1:]
    tile = moe_decode.Tile(128, block_k, 4, 2, swap=True)
    out = decode(layer, u, tiles=moe_decode.TilePair(tile, tile))
    assert relative_error(out, layer.expected(u)) < 2e-3


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("fp8", [False, True])
def test_inputs_in_float16_beside_other_weights(num_tokens, fp8):
    """As in a step whose dense weights are in FP8. Weights that are not in FP8 are multiplied in their own dtype."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else F32
    layer = Layer(num_experts=8, k=3, dim=64, inner=48, dtype=dtype, fp8=fp8)
    # Inputs that both dtypes have: what they round away is not what is measured.
    u = torch.randn(num_tokens, 64, device=DEVICE).to(dtype).to(F16)
    within = 2e-3 if fp8 else 1e-2 if dtype == torch.bfloat16 else 1e-5
    weights, experts = route(layer.logits(u.to(dtype)), layer.k)
    parts = moe_decode.moe_decode(u, weights, experts, *layer.tensors())
    assert relative_error(parts.sum(0), layer.expected(u.to(dtype))) < within


@pytest.mark.parametrize(
    "tile",
    [
        moe_decode.Tile(16, 32, 4, 2, swap=True),
        moe_decode.Tile(16, 64, 4, 3, swap=False),
        moe_decode.Tile(64, 128, 4, 3, swap=True),
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 17])
def test_any_tile_gives_the_same(num_tokens, tile):
    """Inner and dim are multiples of no tile."""
    layer = Layer(num_experts=4, k=2, dim=72, inner=40)
    u = torch.randn(num_tokens, 72, device=DEVICE)
    out = decode(layer, u, tiles=moe_decode.TilePair(tile, tile))
    torch.testing.assert_close(out, layer.expected(u), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("num_tokens", [2, 17])
@pytest.mark.parametrize("favourites", [[5], [0, 6]])
def test_experts_chosen_by_all_and_by_nobody(num_tokens, favourites):
    layer = Layer(num_experts=12, k=len(favourites) + 1, dim=32, inner=16)
    layer.bias[favourites] = 100.0
    layer.bias[[1, 7]] = -100.0
    u = torch.randn(num_tokens, 32, device=DEVICE)
    torch.testing.assert_close(decode(layer, u), layer.expected(u), atol=2e-5, rtol=1e-5)


def test_every_part_is_written_and_parts_are_in_the_order_of_choice():
    layer = Layer(num_experts=8, k=3, dim=32, inner=16)
    u = torch.randn(20, 32, device=DEVICE)
    weights, experts = route(layer.logits(u), 3)
    parts = moe_decode.moe_decode(u, weights, experts, *layer.tensors(), out=poisoned(3, 20, 32))
    alone = weights.clone()
    alone[:, 0] = alone[:, 2] = 0.0
    only = moe_decode.moe_decode(u, alone, experts, *layer.tensors())
    assert parts.isfinite().all()
    assert torch.equal(parts[1], only[1])
    assert not only[0].any() and not only[2].any()


def test_products_beyond_float16_stay_finite():
    layer = Layer(num_experts=4, k=2, dim=32, inner=16, dtype=F16, fp8=True)
    assert layer.fc1_scale is not None and layer.fc2_scale is not None
    layer.fc1_scale *= 300
    layer.fc2_scale *= 1e-5
    u = torch.randn(5, 32, device=DEVICE, dtype=F16)
    h, g = (layer.fc1.float() * layer.fc1_scale[..., None] @ u.float().T).chunk(2, dim=1)
    assert (torch.nn.functional.gelu(h) * (g + 1)).abs().max() > torch.finfo(F16).max
    assert relative_error(decode(layer, u), layer.expected(u)) < 2e-3


def test_rows_of_a_wider_matrix_and_parts_in_half():
    layer = Layer(num_experts=4, k=2, dim=32, inner=16, dtype=F16)
    u = torch.randn(6, 64, device=DEVICE, dtype=F16)[:, :32]
    parts = poisoned(2, 6, 32, dtype=F16)
    moe_decode.moe_decode(u, *route(layer.logits(u), 2), *layer.tensors(), out=parts)
    assert relative_error(parts.sum(0), layer.expected(u)) < 3e-3


def test_too_many_tokens_are_refused():
    layer = Layer(num_experts=4, k=2, dim=32, inner=16)
    u = torch.zeros(65, 32, device=DEVICE)
    with pytest.raises(ValueError, match="65 tokens"):
        moe_decode.moe_decode(u, *route(layer.logits(u), 2), *layer.tensors())
