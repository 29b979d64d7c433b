import math

import pytest
import torch

from kestrel_engine.models.rope import RotaryTable


def test_pairs_are_half_the_rotary_width_apart_and_the_rest_stays():
    table = RotaryTable(10_000.0, 8, 50, torch.device("cpu"))
    x = torch.arange(1, 25, dtype=torch.float32).view(1, 2, 12)
    turned = table.at(torch.tensor([7]))(x)
    for head in range(2):
        for j in range(4):
            angle = 7 * 10_000.0 ** (-2 * j / 8)
            a, b = float(x[0, head, j]), float(x[0, head, j + 4])
            first = a * math.cos(angle) - b * math.sin(angle)
            second = a * math.sin(angle) + b * math.cos(angle)
            assert float(turned[0, head, j]) == pytest.approx(first, abs=1e-5)
            assert float(turned[0, head, j + 4]) == pytest.approx(second, abs=1e-5)
    assert torch.equal(turned[..., 8:], x[..., 8:])
    with torch.no_grad():
        assert torch.equal(table.at(torch.tensor([7]))(x), turned) and torch.equal(x, turned)


def test_scores_depend_on_the_distance_only():
    table = RotaryTable(1_500_000.0, 16, 2000, torch.device("cpu"))
    q, k = torch.randn(2, 1, 3, 16, generator=torch.Generator().manual_seed(1))
    scores = []
    for shift in (0, 900):
        a, b = (table.at(torch.tensor([p + shift]))(x) for p, x in ((40, q), (11, k)))
        scores.append((a * b).sum(-1))
    torch.testing.assert_close(scores[0], scores[1], atol=1e-4, rtol=1e-4)


def test_half_types_are_turned_in_float32():
    table = RotaryTable(10_000.0, 8, 2000, torch.device("cpu"))
    x = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    positions = torch.tensor([0, 1, 300, 1023, 1999])
    exact, half = (table.at(positions)(each) for each in (x.float(), x))
    assert torch.equal(half, exact.bfloat16())
