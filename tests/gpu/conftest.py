"""All tests of this folder need a CUDA device, except those that compile without one."""

import pytest
import torch


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.path.stem != "test_compiles_without_gpu":
        item.add_marker("gpu")
        missing = not torch.cuda.is_available()
        item.add_marker(pytest.mark.skipif(missing, reason="needs a CUDA device"))
