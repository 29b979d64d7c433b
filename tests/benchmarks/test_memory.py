"""The benchmark of memory runs with few calls; figures are not judged here."""

import json

import pytest

from benchmarks import memory


@pytest.mark.slow
def test_the_memory_after_each_round(tmp_path):
    path = tmp_path / "report.json"
    memory.main(["--quick", "--callers", "2", "--json", str(path)])
    report = json.loads(path.read_text())
    rows = report["tables"]["At rest after each round"]
    assert [row["calls"] for row in rows] == [20, 40]
    assert all(row["RSS MiB"] > row["stored MiB"] > 0 for row in rows)
    assert len(report["bars"]) == 4 and report["bars"][-1]["value"] == 0
