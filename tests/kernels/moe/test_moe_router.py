"""The router in one launch against a linear layer and moe_route."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from kestrel_engine.kernels.layer_norm import add_layer_norm
from kestrel_engine.kernels.moe.route import route
from kestrel_engine.kernels.moe.router import RouterWorkspace, add_norm_route, route_tokens

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "num_experts", "k", "dim", "bias"),
    [(1, 64, 8, 256, True), (5, 6, 2, 72, False), (3, 13, 13, 40, True)],
)
def test_logits_and_their_ranking(dtype, tokens, num_experts, k, dim, bias):
    torch.manual_seed(tokens)
    wide = torch.randn(tokens, dim + 8, device=DEVICE).to(dtype)
    u = wide[:, :dim]
    weight = torch.randn(num_experts, dim, device=DEVICE).to(dtype)
    b = torch.randn(num_experts, device=DEVICE).to(dtype) if bias else None
    workspace = RouterWorkspace(tokens + 1, num_experts, dtype, DEVICE)
    weights = torch.full((tokens, k), torch.nan, device=DEVICE)
    experts = torch.full((tokens, k), -7, dtype=torch.int32, device=DEVICE)
    for _ in range(2):  # The second launch finds the counters as the first left them.
        route_tokens(u, weight, b, k, workspace, out=(weights, experts))
        assert not workspace.arrived.any()
    logits = workspace.logits[:tokens]
    expected = F.linear(u.double(), weight.double(), None if b is None else b.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(logits.double(), expected, atol=tolerance * dim**0.5, rtol=tolerance)
    assert (logits.dtype, experts.dtype) == (dtype, torch.int32)
    by_two_launches = route(logits, k)
    assert torch.equal(weights, by_two_launches[0])
    assert torch.equal(experts, by_two_launches[1])


@pytest.mark.parametrize(
    ("tokens", "num_experts", "k", "dim", "dtype", "narrow"),
    [
        (1, 64, 8, 2048, torch.bfloat16, torch.bfloat16),
        (4, 64, 8, 2048, torch.bfloat16, torch.float16),
        (3, 6, 2, 72, torch.float32, torch.float32),
    ],
)
def test_with_the_norm_in_front(tokens, num_experts, k, dim, dtype, narrow):
    """The same bits as by a LayerNorm and a router. ``narrow``: the dtype of the norm."""
    torch.manual_seed(tokens)

    def random(*shape: int, of: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE).to(of)

    x, parts = random(tokens, dim, of=dtype), [random(3, tokens, dim), random(8, tokens, dim)]
    owed, gain, shift = random(dim), random(dim, of=dtype), random(dim, of=dtype)
    weight, bias = random(num_experts, dim, of=dtype), random(num_experts, of=dtype)
    workspaces = [RouterWorkspace(tokens, num_experts, dtype, DEVICE) for _ in range(2)]
    u, alone = (torch.full((tokens, dim), torch.nan, dtype=narrow, device=DEVICE) for _ in "12")
    out = (
        torch.full((tokens, k), torch.nan, device=DEVICE),
        torch.full((tokens, k), -7, dtype=torch.int32, device=DEVICE),
    )
    before = x.clone()
    for _ in range(2):
        add_norm_route(
            x, parts, owed, gain, shift, weight, bias, k, workspaces[0], u=u, out=out
        )  # fmt: skip
        assert not workspaces[0].arrived.any()
    assert torch.equal(x, before), "the router changed the stream"
    stream = torch.empty_like(x)
    add_layer_norm(x, parts, owed, gain, shift, stream=stream, out=alone)
    assert torch.equal(x, before) and not torch.equal(stream, before)
    routed = route_tokens(alone, weight, bias, k, workspaces[1])
    assert torch.equal(u, alone)
    assert torch.equal(workspaces[0].logits, workspaces[1].logits)
    assert torch.equal(out[0], routed[0]) and torch.equal(out[1], routed[1])


def test_inputs_in_float16_beside_weights_of_the_model():
    """As in a step whose dense weights are in FP8. The logits have the model's dtype, as in prefill."""
    u = torch.randn(3, 72, device=DEVICE).half()
    weight, bias = torch.randn(6, 72, device=DEVICE), torch.randn(6, device=DEVICE)
    workspace = RouterWorkspace(3, 6, torch.float32, DEVICE)
    found = route_tokens(u, weight, bias, 2, workspace)
    torch.testing.assert_close(workspace.logits, F.linear(u.float(), weight, bias))
    for one, other in zip(found, route(workspace.logits, 2), strict=True):
        assert torch.equal(one, other)


def test_what_it_refuses():
    workspace = RouterWorkspace(1, 4, torch.float32, DEVICE)
    weight = torch.zeros(4, 8, device=DEVICE)
    with pytest.raises(ValueError, match="65 tokens"):
        route_tokens(torch.zeros(65, 8, device=DEVICE), weight, None, 2, workspace)
    with pytest.raises(ValueError, match="5 of 4 experts"):
        route_tokens(torch.zeros(1, 8, device=DEVICE), weight, None, 5, workspace)
    weights, experts = route_tokens(torch.zeros(0, 8, device=DEVICE), weight, None, 2, workspace)
    assert weights.shape == experts.shape == (0, 2)
