"""The benchmark of costs runs on small images, where it mostly measures the costs that every image has."""

import json

import pytest

from benchmarks.diagnostics import image_costs


@pytest.mark.slow
def test_no_image_takes_more_memory_than_is_reserved_for_it(tmp_path):
    path = tmp_path / "report.json"
    image_costs.main(["--quick", "--json", str(path)])
    report = json.loads(path.read_text())
    [rows] = report["tables"].values()
    assert len(rows) == 2 * len(image_costs.FORMS)
    assert all(row["bytes/pixel"] <= row["reserved"] for row in rows), rows
