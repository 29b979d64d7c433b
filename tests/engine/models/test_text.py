import math

import pytest
import torch

from kestrel_engine.models.compiled.full_attention import attend
from kestrel_engine.models.layers import Linear, Mlp
from kestrel_engine.models.text import Moe, Tau, TextModel
from tests.engine.models.small import random_tensors, small_config


def experts(count: int = 6, dim: int = 10, inner: int = 4, chosen: int = 2) -> Moe:
    g = torch.Generator().manual_seed(4)
    return Moe(
        Linear(torch.randn(count, dim, generator=g), torch.randn(count, generator=g)),
        torch.randn(count, 2 * inner, dim, generator=g),
        torch.randn(count, dim, inner, generator=g),
        chosen,
    )


def naive(moe: Moe, u: torch.Tensor) -> torch.Tensor:
    """Token by token, expert by expert, from the formula of moondream.md section 6."""
    inner = moe.fc2.shape[-1]
    out = torch.zeros_like(u)
    for t, token in enumerate(u):
        logits = moe.router.weight @ token + moe.router.bias
        best = sorted(range(len(logits)), key=lambda e: -float(logits[e]))
        best = best[: moe.experts_per_token]
        total = sum(math.exp(float(logits[e])) for e in best)
        for e in best:
            both = moe.fc1[e] @ token
            h, g = both[:inner], both[inner:]
            gelu = h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
            out[t] += math.exp(float(logits[e])) / total * (moe.fc2[e] @ (gelu * (g + 1)))
    return out


def test_grouped_experts_equal_the_formula():
    moe = experts()
    u = torch.randn(40, 10, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(moe(u), naive(moe, u), atol=1e-4, rtol=1e-4)


def test_one_token_alone_equals_its_row_in_a_batch():
    moe = experts(chosen=3)
    u = torch.randn(9, 10, generator=torch.Generator().manual_seed(4))
    together = moe(u)
    for i in range(len(u)):
        torch.testing.assert_close(moe(u[i : i + 1])[0], together[i], atol=1e-5, rtol=1e-5)


def test_router_weights_of_half_types_are_float32():
    moe, u = experts(), torch.randn(5, 10, generator=torch.Generator().manual_seed(4))
    half = Moe(
        Linear(moe.router.weight.bfloat16(), moe.router.bias.bfloat16()),
        moe.fc1.bfloat16(),
        moe.fc2.bfloat16(),
        2,
    )
    out = half(u.bfloat16())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), moe(u), atol=0.15, rtol=0.05)


def test_tau_follows_its_formula():
    g = torch.Generator().manual_seed(4)
    heads, width = 3, 18
    wq, wv = torch.randn(2, heads, width, generator=g)
    alpha = torch.randn(heads, generator=g)
    tau = Tau.load({"tau.wq": wq, "tau.wv": wv, "tau.alpha": alpha}, "tau")
    qkv = torch.randn(4, width, generator=g)
    positions = torch.tensor([0, 1, 729, 5000])
    of_q, of_v = tau.factors(qkv, positions.float().log1p().unsqueeze(-1))
    for t, p in enumerate(positions.tolist()):
        gelu = qkv[t] * 0.5 * (1 + torch.erf(qkv[t] / math.sqrt(2)))
        for n in range(heads):
            place = 1 + (torch.sigmoid(alpha[n] * math.log(p + 1)) - 0.5)
            for weights, factor in ((wq, of_q), (wv, of_v)):
                expected = torch.tanh(gelu @ weights[n]) + place
                torch.testing.assert_close(factor[t, n], expected, atol=1e-5, rtol=1e-5)


def attention(_, *qkv):
    return attend(*(each.unsqueeze(0) for each in qkv)).squeeze(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pass_without_gradients_equals_one_with_them(dtype):
    """The former changes queries, keys and values in place, and bfloat16's products may be compiled."""
    torch.manual_seed(4)  # Rounding may change the choice of an expert.
    config = small_config("moondream3")
    tensors = {name: each.to(dtype) for name, each in random_tensors(config).items()}
    model = TextModel(config.text, tensors)
    x, positions = torch.randn(9, config.text.dim).to(dtype), torch.arange(30, 39)
    with torch.no_grad():
        found = model(x, positions, attention)
    most = 0.0 if dtype is torch.float32 else 0.03
    torch.testing.assert_close(found, model(x, positions, attention), atol=most, rtol=0)


@torch.inference_mode()
def test_the_last_block_computes_only_the_tokens_that_are_kept(monkeypatch):
    config = small_config("moondream2")
    model = TextModel(config.text, random_tensors(config))
    x, kept = torch.randn(9, config.text.dim), torch.tensor([8, 3])
    rows, its = [], Mlp.__call__
    monkeypatch.setattr(Mlp, "__call__", lambda mlp, u, *a: rows.append(len(u)) or its(mlp, u, *a))

    whole = model(x, torch.arange(9), attention)
    found = model(x, torch.arange(9), attention, kept=kept)
    torch.testing.assert_close(found, whole[kept])
    assert rows[len(rows) // 2 :] == [9] * (config.text.n_layers - 1) + [2]
