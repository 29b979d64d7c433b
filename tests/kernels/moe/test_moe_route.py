"""Routing against torch.topk, and the grouping of pairs against a stable sort."""

import pytest
import torch

moe_route = pytest.importorskip("kestrel_engine.kernels.moe.route")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def reference_route(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    # A stable descending sort gives ties to the lower index, which topk doesn't promise.
    ordered = logits.float().sort(dim=-1, descending=True, stable=True)
    return ordered.values[:, :k].softmax(dim=-1), ordered.indices[:, :k].to(torch.int32)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "k"),
    [(1, 64, 8), (7, 64, 8), (5, 8, 3), (3, 12, 5), (4, 6, 6), (130, 8, 2)],
)
def test_route_is_topk_then_softmax(num_tokens, num_experts, k):
    torch.manual_seed(num_tokens)
    logits = torch.randn(num_tokens, num_experts, device=DEVICE)
    weights = torch.full((num_tokens, k), float("nan"), device=DEVICE)
    experts = torch.full((num_tokens, k), -7, dtype=torch.int32, device=DEVICE)
    moe_route.route(logits, k, out=(weights, experts))
    expected_weights, expected = reference_route(logits, k)
    assert torch.equal(experts, expected)
    torch.testing.assert_close(weights, expected_weights)


def test_ties_take_the_lower_expert():
    logits = torch.tensor(
        [[1.0, 2.0, 2.0, 2.0, -1.0, 2.0], [0.0, -0.0, 0.0, -0.0, 0.0, -0.0], [-1.5] * 6],
        dtype=torch.float16,
        device=DEVICE,
    )
    weights, experts = moe_route.route(logits, 3)
    assert experts.tolist() == [[1, 2, 3], [0, 1, 2], [0, 1, 2]]
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 3))


def test_extreme_logits_still_choose_distinct_experts():
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor(
        [[-inf, -inf, 0.0, -inf], [nan, 1.0, nan, 2.0], [3e38, -3e38, 3e38, 1.0]], device=DEVICE
    )
    weights, experts = moe_route.route(logits, 3)
    assert experts.tolist() == [[2, 0, 1], [0, 2, 3], [0, 2, 3]]
    assert weights[0].tolist() == [1.0, 0.0, 0.0]
    assert weights[1].isnan().all()
    assert weights[2].tolist() == [0.5, 0.5, 0.0]


def test_rows_of_a_wider_matrix():
    wide = torch.randn(6, 40, device=DEVICE)
    weights, experts = moe_route.route(wide[:, :8], 3)
    expected_weights, expected = reference_route(wide[:, :8], 3)
    assert torch.equal(experts, expected)
    torch.testing.assert_close(weights, expected_weights)


def test_more_choices_than_experts_are_refused():
    with pytest.raises(ValueError, match="9 of 8"):
        moe_route.route(torch.zeros(1, 8, device=DEVICE), 9)


@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize(("num_tokens", "num_experts", "k"), [(1, 8, 3), (33, 64, 8), (70, 12, 3)])
def test_pairs_are_grouped_by_expert_in_their_order(num_tokens, num_experts, k, tile):
    torch.manual_seed(1)
    _, experts = moe_route.route(torch.randn(num_tokens, num_experts, device=DEVICE), k)
    experts[experts == 1] = 0  # nobody chose 1
    check_grouping(experts, num_experts, tile)


@pytest.mark.parametrize("expert", [0, 7])
def test_one_expert_chosen_by_all(expert):
    check_grouping(torch.full((70, 1), expert, dtype=torch.int32, device=DEVICE), 8, 32)


def check_grouping(experts: torch.Tensor, num_experts: int, tile: int) -> None:
    grouping = moe_route.group_by_expert(experts, num_experts, tile)
    flat = experts.flatten().long()
    assert grouping.order.tolist() == flat.argsort(stable=True).tolist()
    places: list[int] = []
    ended = False
    for expert, begin, end in grouping.tiles.T.tolist():
        if expert < 0:
            ended = True
            continue
        assert not ended, "tiles beyond the end come last"
        mine = range(begin, min(end, begin + tile))
        assert len(mine) > 0
        assert all(flat[grouping.order[place]] == expert for place in mine)
        places.extend(mine)
    assert places == list(range(flat.numel()))
    assert int(grouping.used) == (grouping.tiles[0] >= 0).sum()
