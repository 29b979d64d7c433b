import pytest
import torch
import torch.nn.functional as F

from kestrel_engine.kernels.attention.tau_content import TauWorkspace, tau_content

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "k", "columns"), [(1, 96, 4), (20, 768, 8), (70, 200, 64)])
def test_gelu_then_linear(dtype, tokens, k, columns):
    generator = torch.Generator().manual_seed(tokens)
    qkv = torch.randn(tokens, k + 5, generator=generator).to(DEVICE, dtype)
    weights = (torch.randn(columns, k, generator=generator) / k**0.5).to(DEVICE, dtype)
    workspace = TauWorkspace.allocate(columns, DEVICE)
    out = torch.full((tokens, columns), torch.nan, device=DEVICE)
    assert tau_content(qkv, weights, workspace, out=out) is out
    expected = F.linear(F.gelu(qkv[:, :k].float()).to(dtype).float(), weights.float())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    # The next launch finds the counters as this one found them.
    assert torch.count_nonzero(workspace.arrived) == 0
    assert torch.equal(tau_content(qkv, weights, workspace), out)


def test_many_tokens_are_not_divided():
    workspace = TauWorkspace(
        torch.empty(0, device=DEVICE), torch.empty(0, dtype=torch.int32, device=DEVICE)
    )
    qkv, weights = torch.randn(8500, 16, device=DEVICE), torch.randn(2, 16, device=DEVICE)
    torch.testing.assert_close(
        tau_content(qkv, weights, workspace), F.linear(F.gelu(qkv), weights), atol=1e-5, rtol=1e-5
    )


def test_no_tokens():
    workspace = TauWorkspace.allocate(2, DEVICE)
    assert tau_content(
        torch.empty(0, 16, device=DEVICE), torch.empty(2, 16, device=DEVICE), workspace
    ).shape == (0, 2)
