"""Rows put into a grouped product's order, and their inputs into its."""

import pytest
import torch

from tests.kernels.tensors import DEVICE, poisoned

moe_sort = pytest.importorskip("kestrel_engine.kernels.moe.route")
moe_hopper = pytest.importorskip("kestrel_engine.kernels.moe.hopper")
Fp8Rows = pytest.importorskip("kestrel_engine.kernels.linear.fp8_rows").Fp8Rows

ORDER = torch.tensor([11, 0, 5, 7, 3], dtype=torch.int32, device=DEVICE)
TOKENS = [5, 0, 2, 3, 1]


def test_gathered_in_another_type():
    x = torch.randn(6, 40, device=DEVICE)[:, :24]
    out = poisoned(5, 24, dtype=torch.float16)
    moe_sort.sorted_rows(x, out, ORDER, 2, kernel_order=False)
    assert torch.equal(out, x[TOKENS].half())


def test_the_kernels_order_is_the_one_documented():
    x = torch.arange(6 * 192.0, device=DEVICE).view(6, 192)
    out = poisoned(5, 192)
    moe_sort.sorted_rows(x, out, ORDER, 2, kernel_order=True)
    assert torch.equal(out, moe_hopper.in_kernel_order(x[TOKENS]))
    assert torch.equal(out.sort().values, x[TOKENS])
    assert out[1, :8].tolist() == [0, 1, 16, 17, 32, 33, 48, 49]
    assert out[1, 8:16].tolist() == [2, 3, 18, 19, 34, 35, 50, 51]
    assert out[1, 16] == 4 and out[1, 64] == 64


def test_fp8_rows_keep_their_bits_and_scales():
    bits = torch.randint(0, 256, (6, 24), dtype=torch.uint8, device=DEVICE)
    rows = Fp8Rows(bits.view(torch.float8_e4m3fn), torch.rand(6, 1, device=DEVICE))
    memory = poisoned(5, 24, dtype=torch.float16)
    out = moe_sort.sorted_fp8_rows(rows, memory, ORDER, 2)
    assert out.values.dtype == torch.float8_e4m3fn
    assert out.values.data_ptr() == memory.data_ptr()
    assert torch.equal(out.values.view(torch.uint8), bits[TOKENS])
    assert torch.equal(out.scales, rows.scales[TOKENS])


def test_no_rows():
    nothing = torch.empty(0, 64, device=DEVICE)
    none = torch.empty(0, dtype=torch.int32, device=DEVICE)
    moe_sort.sorted_rows(torch.ones(3, 64, device=DEVICE), nothing, none, 2, kernel_order=True)
