"""The kernel by which doctor sees that Triton works."""

import pytest
import torch

from kestrel_engine.kernels.probe import add_one

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("count", [1, 4, 16])
def test_it_adds_one_to_each_number(count):
    numbers = torch.arange(16, dtype=torch.float32, device=DEVICE)
    add_one(numbers[:count])
    expected = torch.arange(16, dtype=torch.float32)
    expected[:count] += 1
    assert numbers.cpu().equal(expected)
