"""The comparison of HTTP with gRPC runs at a hundredth of its size; figures are not judged here."""

import json

import pytest

from benchmarks.overhead import through_http


@pytest.mark.slow
def test_every_way_reads_all_tokens(tmp_path):
    path = tmp_path / "report.json"
    through_http.main(["--quick", "--json", str(path)])
    report = json.loads(path.read_text())
    (rows,) = report["tables"].values()
    assert [row["way"] for row in rows] == [
        "gRPC",
        "gRPC, no HTTP port",
        "Moondream's REST",
        "OpenAI's chat",
    ]
    assert all(row["tokens/s"] > 0 and row["us of CPU a token"] > 0 for row in rows)
    assert [bar["limit"] for bar in report["bars"]] == [0.85, 0.85, 0.97]
