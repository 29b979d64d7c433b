"""The soak of benchmarks/soak.py, short: a real server, mixed and rude traffic, callers killed in the middle.

Three minutes of it by default; KESTREL_SOAK_SECONDS says otherwise (1800 is the full one).
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="counts spans")

from benchmarks import soak

SECONDS = float(os.environ.get("KESTREL_SOAK_SECONDS", "180"))


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS + 300)
def test_nothing_grows_is_lost_or_becomes_slower():
    report = soak.main(["--seconds", str(SECONDS)])
    assert [bar for bar in report.bars if not bar.is_met] == []
