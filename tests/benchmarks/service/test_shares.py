"""The benchmark of shares runs at a hundredth of its size; figures are not judged here."""

import json

import pytest

from benchmarks.service import shares


@pytest.mark.slow
def test_it_reports_all_callers_beside_the_flood(tmp_path):
    path = tmp_path / "report.json"
    shares.main(["--quick", "--in-flight", "20", "--json", str(path)])
    report = json.loads(path.read_text())
    callers, phases, ended = report["tables"].values()
    assert [row["caller"] for row in callers] == [
        "idle server",
        "other",
        "urgent",
        "flood itself, urgent",
    ]
    assert all(0 < row["p50"] <= row["p95"] for row in callers)
    assert all(row["prefill p50"] > 0 for row in phases)
    assert ended[0]["OK"] > 0
    assert [bar["limit"] for bar in report["bars"]] == [3.0, 2.0, 2.0]
