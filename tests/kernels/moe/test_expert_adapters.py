"""Experts with adapters against models.text.Moe: the paths of few and of many tokens, weights in FP8, ranks of several
slabs."""

import pytest
import torch

pytest.importorskip("triton")

from kestrel_engine.kernels.adapters.experts import EXPERT_RANKS, ExpertChanges
from kestrel_engine.kernels.adapters.slabs import RowSlabs, distance
from kestrel_engine.kernels.moe.decode import moe_decode
from kestrel_engine.kernels.moe.prefill import moe_prefill
from kestrel_engine.kernels.moe.route import route
from kestrel_engine.models.low_rank import LowRank, token_adapters
from kestrel_engine.models.text import Moe
from tests.kernels.moe.moe_layer import Layer, relative_error
from tests.kernels.tensors import DEVICE

pytestmark = pytest.mark.usefixtures("checked_addresses")

EXPERTS, DIM, INNER = 5, 72, 40
CPU = torch.device("cpu")


def slabs_of(change, dtype):
    """fc1's A and B, then fc2's, of each slab, and the offsets of these four."""
    count = -(-change["fc1"].a.shape[1] // EXPERT_RANKS)
    parts, at, size = [], [], 0
    for name in ("fc1", "fc2"):
        a, b = change[name].a, change[name].b.transpose(1, 2)
        for side in (a, b):
            each = [side[:, i * EXPERT_RANKS : (i + 1) * EXPERT_RANKS] for i in range(count)]
            parts.append([part.reshape(-1) for part in each])
            at.append(size)
            size += parts[-1][0].numel()
    return [torch.cat(slab).to(DEVICE, dtype) for slab in zip(*parts, strict=True)], at


@pytest.mark.parametrize("way", ["few", "many"])
@pytest.mark.parametrize(
    ("dtype", "fp8", "within"),
    [
        (torch.float32, False, 1e-5),
        pytest.param(torch.float16, False, 3e-3, marks=pytest.mark.slow),
        pytest.param(torch.float16, True, 3e-3, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("users", [(0, -1, 1), pytest.param((1,), marks=pytest.mark.slow)])
def test_experts_of_mixed_tokens(way, dtype, fp8, within, users):
    layer = Layer(num_experts=EXPERTS, k=2, dim=DIM, inner=INNER, dtype=dtype, fp8=fp8)
    tokens = [user for user in users for _ in range(6 if len(users) > 1 else 1)]
    changes, slabs, firsts, counts = [], [], [], []
    for ranks in (2, 6):
        sizes = {"fc1": (2 * INNER, DIM), "fc2": (DIM, INNER)}
        change = {
            name: LowRank(
                torch.randn(EXPERTS, ranks, columns) * columns**-0.5,
                torch.randn(EXPERTS, rows, ranks) * 0.3,
            )
            for name, (rows, columns) in sizes.items()
        }
        changes.append({f"x.{name}": each for name, each in change.items()})
        made, at = slabs_of(change, dtype)
        firsts.append(len(slabs))
        counts.append(len(made))
        slabs += made
    anchor = torch.zeros(1, dtype=dtype, device=DEVICE)

    def put(values, kind=torch.int32):
        return torch.tensor(values, dtype=kind, device=DEVICE)

    rows = RowSlabs(
        anchor,
        put([distance(slab, anchor) for slab in slabs], torch.int64),
        put([max(0, firsts[user]) if user >= 0 else 0 for user in tokens]),
        put([counts[user] if user >= 0 else 0 for user in tokens]),
    )
    u = torch.randn(len(tokens), DIM, device=DEVICE, dtype=dtype)
    routed = route(layer.logits(u), layer.k)
    own = ExpertChanges(rows, *at)
    if way == "few":
        got = moe_decode(u, *routed, *layer.tensors(), adapters=own).sum(0)
        plain = moe_decode(u, *routed, *layer.tensors()).sum(0)
    else:
        got = moe_prefill(u, *routed, *layer.tensors(), adapters=own)
        plain = moe_prefill(u, *routed, *layer.tensors())
    fc1, fc2 = (
        w.float().cpu() if s is None else w.float().cpu() * s.cpu()[..., None]
        for w, s in ((layer.fc1, layer.fc1_scale), (layer.fc2, layer.fc2_scale))
    )
    router = type(layer.router)(layer.router.weight.cpu(), layer.bias.cpu())
    moe = Moe(router, fc1, fc2, layer.k, name="x")
    given = token_adapters([(1, changes[user] if user >= 0 else None) for user in tokens], CPU)
    wanted = moe(u.float().cpu(), given)
    assert relative_error(got.cpu(), wanted) < within
    others = [place for place, user in enumerate(tokens) if user < 0]
    assert torch.equal(got[others], plain[others])
    assert not torch.allclose(got.cpu().float(), moe(u.float().cpu()), atol=0.1)
