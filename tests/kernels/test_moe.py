"""FusedMoe: the path is picked by the batch, and both paths agree."""

import pytest
import torch

from tests.kernels.moe_layer import DEVICE, Layer, poisoned, relative_error

moe = pytest.importorskip("kestrel_engine.kernels.moe")


def fused(layer: Layer) -> "moe.FusedMoe":
    return moe.FusedMoe(moe.Experts(*layer.tensors()), layer.k)


@pytest.mark.parametrize("num_tokens", [1, 64, 65])
@pytest.mark.parametrize("fp8", [False, True])
def test_any_batch_is_the_models_layer(num_tokens, fp8):
    layer = Layer(num_experts=4, k=2, dim=32, inner=16, fp8=fp8)
    u, x = torch.randn(2, num_tokens, 32, device=DEVICE)
    out = fused(layer)(u, layer.logits(u), add_to=x, out=poisoned(num_tokens, 32))
    torch.testing.assert_close(out, x + layer.expected(u), atol=2e-5, rtol=1e-5)
    without = fused(layer)(u, layer.logits(u))
    torch.testing.assert_close(without, layer.expected(u), atol=2e-5, rtol=1e-5)


def test_the_golden_shape():
    layer = Layer(num_experts=8, k=3, dim=256, inner=128)
    u = torch.randn(65, 256, device=DEVICE)
    torch.testing.assert_close(
        fused(layer)(u, layer.logits(u)), layer.expected(u), atol=5e-5, rtol=1e-5
    )


def test_a_row_depends_on_no_other_row():
    layer = Layer(num_experts=8, k=3, dim=64, inner=32)
    u = torch.randn(20, 64, device=DEVICE)
    logits = layer.logits(u)
    together, alone = fused(layer)(u, logits), fused(layer)(u[:3], logits[:3])
    torch.testing.assert_close(together[:3], alone, atol=1e-6, rtol=1e-6)


def test_an_upcast_copy_holds_the_exact_values():
    layer = Layer(num_experts=2, k=1, dim=32, inner=16, fp8=True)
    experts = moe.Experts(*layer.tensors())
    wide = experts.upcast()
    assert wide.fc1.dtype == torch.bfloat16
    assert torch.equal(wide.fc1.float(), layer.fc1.float())
    assert torch.equal(wide.fc2.float(), layer.fc2.float())
    assert wide.fc1_scale is experts.fc1_scale
    wide.fc1.fill_(float("nan"))
    again = experts.upcast(out=wide)
    assert again.fc1.data_ptr() == wide.fc1.data_ptr()
    assert torch.equal(again.fc1.float(), layer.fc1.float())


def test_only_many_tokens_of_fp8_experts_want_the_copy():
    layer = Layer(num_experts=2, k=1, dim=32, inner=16, fp8=True)
    assert not fused(layer).wants_wide(64)
    assert fused(layer).wants_wide(500)
    assert not fused(Layer(num_experts=2, k=1, dim=32, inner=16)).wants_wide(500)


def test_the_copy_must_have_the_type_of_the_tokens():
    layer = Layer(num_experts=2, k=1, dim=32, inner=16, fp8=True)
    u = torch.randn(200, 32, device=DEVICE)
    wide = moe.Experts(*layer.tensors()).upcast()
    with pytest.raises(ValueError, match="bfloat16 copy"):
        fused(layer)(u, layer.logits(u), wide=wide)


def test_scaled_rows_of_another_format():
    """What prefill does with a copy of FP8 experts: unscaled values, scales apart."""
    layer = Layer(num_experts=4, k=2, dim=32, inner=16, fp8=True)
    u = torch.randn(70, 32, device=DEVICE)
    expected = layer.expected(u)
    layer.fc1, layer.fc2 = layer.fc1.float(), layer.fc2.float()
    assert relative_error(fused(layer)(u, layer.logits(u)), expected) < 1e-5


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
        moe.Experts(**{**tensors, **change(tensors)})


def test_random_experts_keep_the_size_of_their_inputs():
    torch.manual_seed(0)
    for fp8 in (False, True):
        experts = moe.random_experts(4, 64, 32, dtype=torch.float32, device=DEVICE, fp8=fp8)
        u = torch.randn(66, 64, device=DEVICE)
        out = moe.FusedMoe(experts, 2)(u, torch.randn(66, 4, device=DEVICE))
        assert 0.2 < out.std() < 5
