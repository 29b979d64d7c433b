"""LayerNorm kernels against plain torch: odd widths, strided rows, one to three parts, what is written in place."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from kestrel_engine.kernels.layer_norm import add_layer_norm, layer_norm
from tests.kernels.tensors import DTYPES, poisoned, random

pytestmark = pytest.mark.usefixtures("checked_addresses")

TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x.double(), weight.shape, weight.double(), bias.double(), 1e-5)


def assert_near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    error = (got.double() - wanted).norm() / wanted.norm()
    assert error < TOLERANCES[got.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 63, 256, 1152, 2048])
@pytest.mark.parametrize("owed", [False, True])
def test_layer_norm(dtype, dim, owed):
    # A mean far from zero tells a two-pass variance from the difference of two large sums.
    x = (random(5, dim) * 3 + 20).to(dtype)
    weight, bias = random(dim, dtype=dtype), random(dim, dtype=dtype)
    pending = random(dim) if owed else None
    whole = x.double() + pending.double() if pending is not None else x
    out = poisoned(5, dim, dtype=dtype)
    assert layer_norm(x, weight, bias, pending=pending, out=out) is out
    assert_near(out, reference(whole, weight, bias))


def test_layer_norm_of_strided_rows_into_strided_rows():
    x, weight, bias = random(4, 100), random(70), random(70)
    out = poisoned(4, 90, dtype=torch.float32)
    layer_norm(x[:, 10:80], weight, bias, pending=None, out=out[:, :70])
    assert_near(out[:, :70], reference(x[:, 10:80], weight, bias))
    assert out[:, 70:].isnan().all()


def test_layer_norm_in_place_and_of_nothing():
    x, weight, bias = random(3, 64), random(64), random(64)
    wanted = reference(x, weight, bias)
    layer_norm(x, weight, bias, pending=None, out=x)
    assert_near(x, wanted)
    assert layer_norm(x[:0], weight, bias, pending=None).shape == (0, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [[4], [3, 1], [1, 2, 5]])
@pytest.mark.parametrize("owed", [False, True])
def test_add_layer_norm(dtype, splits, owed):
    rows, dim = 3, 200
    x, weight, shift = (random(*s, dtype=dtype) for s in ((rows, dim), (dim,), (dim,)))
    parts = [random(s, rows, dim) for s in splits]
    bias = random(dim) if owed else None
    whole = x.double() + sum(p.double().sum(0) for p in parts)
    if bias is not None:
        whole += bias.double()
    out = poisoned(rows, dim, dtype=dtype)
    assert add_layer_norm(x, parts, bias, weight, shift, out=out) is out
    torch.testing.assert_close(x.double(), whole, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    assert_near(out, reference(x, weight, shift))


def test_parts_may_be_rows_of_the_models_type_and_lie_apart():
    x, weight, shift = random(4, 96), random(96), random(96)
    plain = random(4, 130).to(torch.float16)[:, 7:103]
    within = random(3, 6, 128)[:, :4, :96]
    wanted = x.double() + plain.double() + within.double().sum(0)
    u = add_layer_norm(x, (plain, within), None, weight, shift)
    torch.testing.assert_close(x.double(), wanted, rtol=1e-5, atol=1e-5)
    assert_near(u, reference(wanted, weight, shift))


def test_a_row_is_the_same_bits_in_any_batch():
    x, weight, shift, part = random(5, 256), random(256), random(256), random(4, 5, 256)
    alone, bias = x[3:4].clone(), random(256)
    u = add_layer_norm(x, [part], bias, weight, shift)
    assert torch.equal(add_layer_norm(alone, [part[:, 3:4]], bias, weight, shift)[0], u[3])
    assert torch.equal(alone[0], x[3])


def test_no_parts_at_all_and_four():
    x, weight, shift = random(2, 48), random(48), random(48)
    before = x.clone()
    assert_near(add_layer_norm(x, [], None, weight, shift), reference(before, weight, shift))
    assert torch.equal(x, before)
    u = add_layer_norm(x, [before] * 4, None, weight, shift)
    assert_near(x, 5 * before)
    assert_near(u, reference(x, weight, shift))


def test_a_row_has_the_same_bits_in_every_batch():
    x, weight, bias, owed = random(7, 70) + 5, random(70), random(70), random(70)
    together = layer_norm(x, weight, bias, pending=owed)
    alone = [layer_norm(x[i : i + 1], weight, bias, pending=owed) for i in range(7)]
    assert torch.equal(together, torch.cat(alone))
