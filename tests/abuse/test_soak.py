"""The soak of benchmarks/soak.py, short: a real server, mixed and rude traffic, callers killed in the middle.

KESTREL_SOAK_SECONDS says how long the slow one takes (1800 is the full one).
"""

from __future__ import annotations

import os
import subprocess

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="counts spans")

from benchmarks import soak

SECONDS = float(os.environ.get("KESTREL_SOAK_SECONDS", "120"))


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS + 300)
def test_nothing_grows_or_is_lost():
    bars = soak.main(["--seconds", str(SECONDS)], subprocess.Popen).bars
    missed = [bar.what for bar in bars if not bar.is_met]
    # Other tests run beside this one. Whether calls become slower is for the benchmark alone to say.
    assert [what for what in missed if not what.startswith("latency")] == []
