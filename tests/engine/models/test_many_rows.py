"""Products of many rows on a CPU: exact for the rows, which int8 and int4 weights round, and each row alone."""

import pytest
import torch
import torch.nn.functional as F

from kestrel_engine.models import weight_only
from kestrel_engine.models.compiled import few_rows, host_code, many_rows
from kestrel_engine.models.layers import gelu_tanh
from kestrel_engine.models.weight_only import (
    FEW_ROWS,
    product,
    round_rows,
    round_to_groups,
    widened,
)

compiled = pytest.mark.skipif(
    not (few_rows.available() and host_code.features().get("avx512vnni")),
    reason="needs a processor with VNNI, and llvmlite",
)


def case(rows, n, k):
    torch.manual_seed(rows)
    weight, scales = round_rows(torch.randn(n, k) * torch.logspace(-2, 0, n).unsqueeze(1))
    x = torch.randn(rows, k) * torch.logspace(-3, 2, rows).unsqueeze(1)
    return x.bfloat16(), weight, scales, torch.randn(n).bfloat16()


def packed(weight, scales):
    tensors = {"a.weight": weight, "a.scale": scales}
    weight_only.pack_for_cpu(tensors)
    assert tensors["a.weight"].dim() == 3
    return tensors["a.weight"], tensors["a.scale"]


def rounded(x):
    step = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() / step).round() * step


@compiled
@torch.inference_mode()
@pytest.mark.parametrize(("n", "k"), [(48, 112), (208, 64), (16, 4304)])
def test_products_are_those_of_the_rounded_rows(n, k):
    rows = FEW_ROWS + 5
    x, weight, scales, bias = case(rows, n, k)
    assert many_rows.takes(x, weight)
    values = widened(weight, scales, torch.float32)
    for given in (bias, bias.repeat_interleave(2)[::2], None):
        found = product(x.view(3, -1, k), weight, scales, given)
        assert found.shape == (3, rows // 3, n) and found.dtype == torch.bfloat16
        wanted = F.linear(rounded(x), values, None if given is None else given.float())
        # A number between two whole ones may be rounded to either.
        error = (found.float().view(rows, n) - wanted).norm(dim=-1)
        assert (error < 0.004 * wanted.norm(dim=-1)).all()
    exact = F.linear(x.float(), values, bias.float())
    drift = (product(x, weight, scales, bias).float() - exact).norm() / exact.norm()
    assert drift < 0.02, "a step is a row's range by 127"


@compiled
@torch.inference_mode()
def test_weights_in_4_bits_are_rounded_to_int8(monkeypatch):
    rows, n, k = FEW_ROWS + 5, 80, 2048
    monkeypatch.setattr(few_rows, "SMALL", 0)
    x, _, _, bias = case(rows, n, k)
    wide = torch.randn(n, k) * torch.logspace(-2, 0, n).unsqueeze(1)
    wide[1], wide[2, :128] = 0, 9
    weight, scales = round_to_groups(wide)
    scales[3, 5] = torch.tensor([-0.3, 17.0])
    exact = widened(weight, scales, torch.float32)
    weight, scales = packed(weight, scales)
    # A row with one number other than 0 has the product of a column.
    ones = torch.eye(k).bfloat16()
    found = product(ones, weight, scales, None).float().T
    most = exact.abs().amax(-1, keepdim=True) / 127
    assert ((found - exact).abs() <= 0.61 * most + 2**-8 * exact.abs()).all()
    wanted = F.linear(rounded(x), found, bias.float())
    error = (product(x, weight, scales, bias).float() - wanted).norm(dim=-1)
    assert (error < 0.004 * wanted.norm(dim=-1)).all()
    scales.view(n // 16, -1, 16, 2)[0, 7, 4] = torch.nan
    found = product(x, weight, scales, bias)
    assert found[:, 4].isnan().all() and found[:, 5:].isfinite().all()


@pytest.mark.skipif(
    not (few_rows.available() and host_code.has_tiles("int8")), reason="needs a processor with AMX"
)
@torch.inference_mode()
@pytest.mark.parametrize("rows", [FEW_ROWS + 1, 64])
@pytest.mark.parametrize(
    ("form", "n", "k"),
    [("int8", 48, 112), ("int8", 208, 4304), ("int8 in blocks", 64, 2048), ("int4", 64, 2048)],
)
def test_tiles_have_the_sums_of_vectors(form, n, k, rows, monkeypatch):
    monkeypatch.setattr(few_rows, "SMALL", 0)
    x, weight, scales, bias = case(rows, n, k)
    if form == "int4":
        weight, scales = round_to_groups(torch.randn(n, k))
    if form != "int8":
        weight, scales = packed(weight, scales)
    found = many_rows.product(x, weight, scales, bias)
    monkeypatch.setattr(host_code, "has_tiles", lambda _: False)
    assert torch.equal(found, many_rows.product(x, weight, scales, bias))


@pytest.mark.skipif(
    not (few_rows.available() and host_code.features().get("avx512bf16")),
    reason="needs a processor with products in bfloat16, and llvmlite",
)
@torch.inference_mode()
@pytest.mark.parametrize(("n", "k"), [(48, 112), (208, 70)])
def test_products_in_bfloat16_have_sums_in_float32(n, k, monkeypatch):
    features = dict(host_code.features()) | {"amx-bf16": False}
    monkeypatch.setattr(host_code, "features", lambda: features)
    x, weight, scales, bias = case(FEW_ROWS + 5, n, k)
    weight = widened(weight, scales, torch.bfloat16)
    assert many_rows.takes(x, weight)
    found = product(x.view(3, -1, k), weight, None, bias).view(len(x), n)
    wanted = F.linear(x.float(), weight.float(), bias.float())
    assert ((found.float() - wanted).norm(dim=-1) < 2**-8 * wanted.norm(dim=-1)).all()
    assert torch.equal(product(x[4:], weight, None, bias), found[4:]), "each row alone"


@compiled
@torch.inference_mode()
@pytest.mark.parametrize("here", [True, False])
def test_weights_in_blocks_have_the_product_of_those_in_rows(here, monkeypatch):
    monkeypatch.setattr(few_rows, "SMALL", 0)
    monkeypatch.setattr(weight_only, "WIDENED", 32 * 512)
    x, weight, scales, bias = case(FEW_ROWS + 1, 48, 512)
    blocks = packed(weight, scales)
    if not here:
        monkeypatch.setattr(host_code, "features", dict)
    assert torch.equal(product(x, *blocks, bias), product(x, weight, scales, bias))


@compiled
@torch.inference_mode()
def test_kept_rows_widen_blocks_in_parts_on_a_processor_without_products_in_bfloat16(monkeypatch):
    monkeypatch.setattr(few_rows, "SMALL", 0)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    x, weight, scales, bias = case(FEW_ROWS + 1, 48, 512)
    wanted = F.linear(x.float(), widened(weight, scales, torch.float32), bias.float())
    blocks = packed(weight, scales)
    monkeypatch.setattr(weight_only, "widened", None)
    found = product(x, *blocks, bias, keeps_rows=True)
    assert (found.float() - wanted).norm() < 0.01 * wanted.norm()


@compiled
@torch.inference_mode()
def test_a_row_depends_on_no_other_row_whatever_is_in_it():
    x, weight, scales, bias = case(FEW_ROWS + 4, 64, 96)
    x[1] = 0
    whole = product(x, weight, scales, bias)
    assert torch.equal(whole[1], bias)
    assert torch.equal(product(x[2:], weight, scales, bias), whole[2:])
    x[3, 5], x[4, 6] = torch.nan, torch.inf
    found = product(x, weight, scales, bias)
    assert found[3:5].isnan().all()
    found[3:5] = whole[3:5]
    assert torch.equal(found, whole)


@torch.inference_mode()
def test_other_processors_and_dtypes_keep_the_widened_product(monkeypatch):
    x, weight, scales, bias = case(FEW_ROWS + 1, 48, 112)
    assert not many_rows.takes(x.float(), weight)
    assert not many_rows.takes(x.half(), weight)
    longest = weight.new_full((16, many_rows.MOST_COLUMNS), -128)
    total = torch._int_mm(longest.clamp(min=-127).repeat(2, 1), longest.t())
    assert (total == 127 * 128 * many_rows.MOST_COLUMNS).all()
    wider = longest.new_empty(16, many_rows.MOST_COLUMNS + 16)
    assert not many_rows.takes(wider.bfloat16(), wider)
    features = {"avx512vnni": True, "avx512bf16": True, "amx-bf16": True}
    monkeypatch.setattr(host_code, "features", lambda: features)
    assert not many_rows.takes(x, weight.bfloat16()), "torch's uses AMX"
    monkeypatch.setattr(host_code, "features", dict)
    assert not many_rows.takes(x, weight)
    wanted = F.linear(x.float(), widened(weight, scales, torch.float32), bias.float())
    found = weight_only.product(x, weight, scales, bias)
    torch.testing.assert_close(found.float(), wanted, rtol=2**-7, atol=2**-6)


@torch.inference_mode()
def test_gelu_is_torchs_to_the_last_bit_but_one():
    x = torch.linspace(-12, 12, 96 * 17).view(17, 96).bfloat16()
    x[0, :2] = torch.tensor([torch.inf, torch.nan])
    wanted = F.gelu(x.float(), approximate="tanh")
    torch.testing.assert_close(gelu_tanh(x).float(), wanted, rtol=2**-8, atol=1e-6, equal_nan=True)
    assert torch.equal(gelu_tanh(x[1:].float()), wanted[1:]), "float32 is torch's"
