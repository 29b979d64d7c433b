"""Weights in 4 or 8 bits: every form has the values of the numbers in it, and products agree with widened weights."""

import sys

import pytest
import torch

from kestrel_engine.models import weight_only
from kestrel_engine.models.compiled import few_rows
from kestrel_engine.models.weight_only import (
    FEW_ROWS,
    pack_for_cpu,
    product,
    round_rows,
    round_to_groups,
    to_groups,
    widened,
)


@pytest.fixture(autouse=True)
def torchs_products(monkeypatch):
    """test_few_rows.py has the other ones."""
    monkeypatch.setattr(few_rows, "available", lambda: False)


def numbers(n, k, group, *outer):
    """4-bit numbers [..., n, k] in groups with scales and zero points, which need not be whole, and their values."""
    g = torch.Generator().manual_seed(n + k)
    q = torch.randint(0, 16, (*outer, n * k // group, group), dtype=torch.uint8, generator=g)
    scale = torch.rand(*q.shape[:-1], 1, generator=g) * 0.01 + 0.001
    zero = torch.rand(*q.shape[:-1], 1, generator=g) * 4 + 6
    return q, scale, zero, ((q.float() - zero) * scale).view(*outer, n, k)


@pytest.mark.parametrize("group", [16, 32, 128])
def test_groups_have_exactly_the_values_of_their_numbers(group):
    q, scale, zero, values = numbers(96, 512, group)
    weight, scales = to_groups(q, scale, zero, (96, 512))
    assert weight.shape == (96, 256) and scales.shape == (96, 512 // group, 2)
    assert torch.equal(widened(weight, scales, torch.float32), values)
    assert torch.equal(widened(weight, scales, torch.bfloat16), values.bfloat16())
    # Groups of nibbles follow each other along K, so that joined weights are the weight of joined values.
    wide = widened(torch.cat([weight, weight], 1), torch.cat([scales, scales], 1), torch.float32)
    assert torch.equal(wide, torch.cat([values, values], 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("group", [32, 128])
def test_a_cpus_product_of_groups(group, rows, dtype):
    q, scale, zero, values = numbers(192, 256, group)
    weight, scales = to_groups(q, scale, zero, (192, 256))
    tensors = {"a.weight": weight, "a.scale": scales}
    pack_for_cpu(tensors)
    packed, own = tensors["a.weight"], tensors["a.scale"]
    assert packed.dim() == 3 and packed.nbytes == weight.nbytes, "it is as small as the file's form"
    # Scales and offsets are rounded to bfloat16: 2^-9 of (8 - zero) * scale and of (q - 8) * scale.
    most = 2**-8 * 8 * scale.max()
    torch.testing.assert_close(widened(packed, own, torch.float32), values, rtol=0, atol=most)
    x, bias = torch.randn(2, rows, 256).to(dtype), torch.randn(192).to(dtype)
    found = product(x, packed, own, bias)
    assert found.shape == (2, rows, 192) and found.dtype == dtype
    wanted = x.float() @ values.T + bias.float()
    assert (found.float() - wanted).norm() < 0.01 * wanted.norm()


def test_what_torchs_product_cannot_take_stays_exact():
    for n, group in ((96, 128), (192, 16)):
        q, scale, zero, values = numbers(n, 256, group)
        weight, scales = to_groups(q, scale, zero, (n, 256))
        tensors = {"a.weight": weight, "a.scale": scales}
        pack_for_cpu(tensors)
        assert tensors["a.weight"] is weight
        x = torch.randn(2, 256)
        assert torch.equal(product(x, weight, scales, None), torch.nn.functional.linear(x, values))


def test_experts_are_packed_one_by_one():
    q, scale, zero, values = numbers(64, 64, 32, 3)
    weight, scales = to_groups(q, scale, zero, (3, 64, 64))
    tensors = {"a.weight": weight, "a.scale": scales}
    pack_for_cpu(tensors)
    assert tensors["a.weight"].dim() == 4
    for expert in range(3):
        found = widened(tensors["a.weight"][expert], tensors["a.scale"][expert], torch.float32)
        torch.testing.assert_close(found, values[expert], rtol=0, atol=2**-8 * 8 * 0.011)


@pytest.mark.parametrize("rows", [1, FEW_ROWS + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_eight_bits(rows, dtype):
    torch.manual_seed(0)
    weight = torch.randn(48, 112) * torch.logspace(-3, 1, 48).unsqueeze(1)
    small, scale = round_rows(weight)
    assert small.dtype == torch.int8 and scale.dtype == torch.bfloat16
    error = (widened(small, scale, torch.float32) - weight).abs() / scale.float().unsqueeze(1)
    assert error.max() <= 1, "half a step, and what rounding the scale clips"
    x = torch.randn(rows, 112).to(dtype)
    wanted = x.float() @ weight.T
    found = product(x, small, scale, None)
    assert (found.float() - wanted).norm() < 0.015 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_read_eight_bits_some_at_a_time(dtype, monkeypatch):
    monkeypatch.setattr(weight_only, "WIDENED", 5 * 112)
    small, scale = round_rows(torch.randn(48, 112))
    x, bias = torch.randn(2, FEW_ROWS, 112).to(dtype), torch.randn(48).to(dtype)
    wanted = x.float() @ widened(small, scale, torch.float32).T + bias.float()
    found = product(x, small, scale, bias)
    assert found.dtype == dtype and found.shape == (2, FEW_ROWS, 48)
    torch.testing.assert_close(found.float(), wanted, rtol=2**-7, atol=2**-5)


def test_unscaled_sums_of_many_rows_may_exceed_float16():
    weight, scale = round_rows(torch.full((64, 128), 0.01))
    found = product(torch.full((FEW_ROWS + 1, 128), 10.0).half(), weight, scale, None)
    torch.testing.assert_close(found, torch.full_like(found, 12.8), rtol=0.01, atol=0)


def test_rounding_to_groups_uses_the_whole_range_and_keeps_zero():
    weight = torch.randn(8, 512)
    weight[3] = 0
    small, scales = round_to_groups(weight)
    wide = widened(small, scales, torch.float32)
    assert torch.equal(wide[3], weight[3])
    step = scales[..., 0].float().repeat_interleave(128, dim=1)
    assert ((wide - weight).abs() / step).max() <= 1.1
    assert (wide - weight).norm() < 0.11 * weight.norm()


def test_a_product_in_float32_is_torchs_without_further_questions():
    """A small model's pass has dozens of them, each of a few microseconds."""
    x, weight, calls = torch.randn(1, 8), torch.randn(4, 8), []
    sys.setprofile(lambda frame, event, argument: calls.append(event))
    try:
        product(x, weight, None, None)
    finally:
        sys.setprofile(None)
    assert calls.count("call") == 1 and calls.count("c_call") <= 2
