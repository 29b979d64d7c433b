"""The soak of benchmarks/soak.py, short: a real server, mixed and rude traffic, callers killed in the middle.

KESTREL_SOAK_SECONDS says how long the slow one takes (1800 is the full one).
"""

from __future__ import annotations

import os
import subprocess

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="counts spans")

from benchmarks import soak
from benchmarks.reports.report import Bar
from tests.forking.process import ForkedProcess

pytestmark = pytest.mark.xdist_group("processes")

SECONDS = float(os.environ.get("KESTREL_SOAK_SECONDS", "120"))
TRENDS = " after warm-up"
"""How the names of bars end that mean something after minutes only: caches must have been filled first."""


def missed(seconds: float, start: type[subprocess.Popen] = subprocess.Popen) -> list[Bar]:
    return [bar for bar in soak.main(["--seconds", str(seconds)], start).bars if not bar.is_met]


def test_nothing_is_lost_in_seconds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(soak, "TIMED_CALLS", 3)  # Their latency is a trend.
    assert [bar for bar in missed(4, ForkedProcess) if not bar.what.endswith(TRENDS)] == []


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS + 300)
def test_nothing_grows_is_lost_or_becomes_slower():
    assert missed(SECONDS) == []
