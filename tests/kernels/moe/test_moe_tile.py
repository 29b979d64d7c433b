"""Experts, and that decode's kernels and prefill's make the same of them."""

import pytest
import torch

from tests.kernels.moe.moe_layer import Layer, relative_error
from tests.kernels.tensors import DEVICE

tile = pytest.importorskip("kestrel_engine.kernels.moe.tile")
moe_decode = pytest.importorskip("kestrel_engine.kernels.moe.decode").moe_decode
moe_prefill = pytest.importorskip("kestrel_engine.kernels.moe.prefill").moe_prefill
route = pytest.importorskip("kestrel_engine.kernels.moe.route").route
random_experts = pytest.importorskip("tests.kernels.moe.random_experts").random_experts


@pytest.mark.parametrize("fp8", [False, True])
def test_decode_and_prefill_are_the_models_layer(fp8):
    layer = Layer(num_experts=8, k=3, dim=256, inner=128, fp8=fp8)
    u = torch.randn(40, 256, device=DEVICE)
    routed, expected = route(layer.logits(u), layer.k), layer.expected(u)
    of_decode = moe_decode(u, *routed, *layer.tensors()).sum(0)
    of_prefill = moe_prefill(u, *routed, *layer.tensors())
    torch.testing.assert_close(of_decode, expected, atol=5e-5, rtol=1e-5)
    torch.testing.assert_close(of_prefill, expected, atol=5e-5, rtol=1e-5)


def test_a_row_depends_on_no_other_row():
    layer = Layer(num_experts=8, k=3, dim=64, inner=32)
    u = torch.randn(20, 64, device=DEVICE)
    weights, chosen = route(layer.logits(u), layer.k)
    for path, rows_at in (moe_decode, 1), (moe_prefill, 0):
        together = path(u, weights, chosen, *layer.tensors()).narrow(rows_at, 0, 3)
        alone = path(u[:3], weights[:3], chosen[:3], *layer.tensors())
        torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-6)


def test_scaled_rows_of_another_format():
    layer = Layer(num_experts=4, k=2, dim=32, inner=16, fp8=True)
    u = torch.randn(70, 32, device=DEVICE)
    expected = layer.expected(u)
    layer.fc1, layer.fc2 = layer.fc1.float(), layer.fc2.float()
    out = moe_prefill(u, *route(layer.logits(u), layer.k), *layer.tensors())
    assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {"fc2": t["fc2"][:, :, :8]}, "with fc2"),
        (lambda t: {"fc2": t["fc2"].half()}, "with fc2"),
        (lambda t: {"fc1_scale": None}, "both"),
        (lambda t: {"fc1_scale": None, "fc2_scale": None}, "need row scales"),
        (lambda t: {"fc1": t["fc1"].transpose(1, 2)}, "contiguous"),
    ],
)
def test_experts_that_do_not_fit_together_are_refused(change, message):
    layer = Layer(num_experts=2, k=1, dim=32, inner=16, fp8=True)
    tensors = dict(zip(["fc1", "fc2", "fc1_scale", "fc2_scale"], layer.tensors(), strict=True))
    with pytest.raises(ValueError, match=message):
        tile.Experts(**{**tensors, **change(tensors)})


@pytest.mark.parametrize("fp8", [False, True])
def test_random_experts_keep_the_size_of_their_inputs(fp8):
    torch.manual_seed(0)
    e = random_experts(4, 64, 32, dtype=torch.float32, device=DEVICE, fp8=fp8)
    u = torch.randn(66, 64, device=DEVICE)
    routed = route(torch.randn(66, 4, device=DEVICE), 2)
    out = moe_prefill(u, *routed, e.fc1, e.fc2, e.fc1_scale, e.fc2_scale)
    assert 0.2 < out.std() < 5
