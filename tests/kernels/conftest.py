"""Each test has the same random numbers, whichever tests ran before it."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
