"""The benchmark of telemetry runs at a hundredth of its size and stays within its limit; figures are not judged
here."""

import json

import pytest


@pytest.mark.slow
def test_it_reports_every_cost(tmp_path):
    pytest.importorskip("opentelemetry.sdk")
    from benchmarks.service import telemetry_overhead

    path = tmp_path / "report.json"
    telemetry_overhead.main(["--quick", "--json", str(path)])
    report = json.loads(path.read_text())
    calls, steps, metrics = report["tables"].values()
    assert [row["caller"] for row in calls] == list(telemetry_overhead.CALLERS)
    assert calls[2]["us"] > calls[0]["us"] >= 0
    assert len(steps) == 1 and [row["of"] for row in metrics] == ["a call", "a request", "a step"]
    assert [bar["limit"] for bar in report["bars"]] == [10.0]
