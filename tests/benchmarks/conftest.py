"""Benchmarks of these tests start their processes as forks, and leave this process's settings as they were."""

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.forking.spawned import fork_what_is_spawned


@pytest.fixture(autouse=True)
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_what_is_spawned(monkeypatch)


@pytest.fixture(autouse=True)
def process_settings() -> Iterator[None]:
    """Benchmarks set the process's threads and garbage collector: both are put back."""
    threads, thresholds = torch.get_num_threads(), gc.get_threshold()
    yield
    torch.set_num_threads(threads)
    gc.set_threshold(*thresholds)
