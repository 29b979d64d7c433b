"""The benchmark of preprocessing runs at a hundredth of its size; figures are not judged here."""

import json

import pytest

from benchmarks import preprocess


@pytest.mark.slow
def test_it_reports_one_image_and_many(tmp_path):
    path = tmp_path / "report.json"
    preprocess.main(["--quick", "--json", str(path)])
    report = json.loads(path.read_text())
    one, many = report["tables"].values()
    assert [row["of"] for row in one][:3] == ["source digest", "decode", "content key"]
    assert all(row["ms"] > 0 for row in one)
    assert many[0]["processes"] == 1
    assert all(row["images/s"] > 0 for row in many)
    assert [bar["limit"] for bar in report["bars"]] == [18.0, 70.0]
