"""The soak, short: a real server, mixed and rude traffic, callers killed in the middle.

KESTREL_SOAK_SECONDS says how long the slow one takes (1800 is the full one).
"""

import os
import subprocess

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="counts spans")

import tests.abuse.soak.__main__ as soak

SECONDS = float(os.environ.get("KESTREL_SOAK_SECONDS", "120"))


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS + 300)
@pytest.mark.parametrize("traffic", [(), ("--new-images", "4")])
def test_nothing_grows_is_lost_or_becomes_slower(traffic):
    seconds = SECONDS / 4 if traffic else SECONDS
    bars = soak.main(["--seconds", str(seconds), *traffic], subprocess.Popen).bars
    assert [bar for bar in bars if not bar.is_met] == []
