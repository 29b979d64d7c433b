"""Values in units in which they fit FP8: none is beyond the bound, and proj undoes the units."""

import torch

from kestrel_engine.kernels.layer_norm import FP8_MAX
from kestrel_engine.models.layers import LayerNorm, Linear
from kestrel_engine.runtime.gpu.vision.fp8_values import in_units, value_units


def test_no_value_exceeds_its_bound_and_the_product_is_the_same():
    torch.manual_seed(0)
    dim = 32
    ln = LayerNorm(torch.randn(dim), torch.randn(dim))
    weight = torch.randn(3 * dim, dim) * torch.logspace(-2, 2, 3 * dim)[:, None]
    qkv, proj = Linear(weight, torch.randn(3 * dim)), torch.randn(dim, dim)
    # Rows of one large number have the largest norm that a LayerNorm gives.
    x = torch.cat([torch.randn(50, dim), 1000 * torch.eye(dim), -1000 * torch.eye(dim)])
    u = torch.nn.functional.layer_norm(x, (dim,), ln.weight, ln.bias)
    values = (u @ weight.T + qkv.bias)[:, -dim:]
    units = value_units(qkv, ln)
    share = (values / units).abs() / FP8_MAX
    assert share.max() <= 1 and bool((share.amax(0) > 0.3).any())
    scaled, reads = in_units(qkv, ln, proj)
    plain = scaled.weight.float() * scaled.scales.T
    torch.testing.assert_close(plain[:-dim], weight[:-dim], rtol=0.07, atol=1e-3)
    torch.testing.assert_close(scaled.bias[-dim:], qkv.bias[-dim:] / units)
    found = (values / units) @ (reads.weight.float() * reads.scales.T).T
    assert (found - values @ proj.T).norm() / (values @ proj.T).norm() < 0.05
