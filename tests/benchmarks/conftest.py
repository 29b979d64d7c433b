"""Benchmarks of these tests start their processes as forks."""

from __future__ import annotations

import pytest

from tests.forking.spawned import fork_what_is_spawned


@pytest.fixture(autouse=True)
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_what_is_spawned(monkeypatch)
