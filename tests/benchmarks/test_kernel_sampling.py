"""The sampling kernel's benchmark: without a GPU it checks and times nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

sampling = pytest.importorskip("benchmarks.kernels.sampling")


@pytest.mark.slow
def test_it_checks_before_it_times(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    sampling.main(["--quick", "--json", str(path)])
    tables = json.loads(path.read_text())["tables"]
    assert all(row["rows"] > 0 for row in tables["checked against the reference sampler"])


def test_a_wrong_row_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling.Rows, "run", lambda rows: None)
    with pytest.raises(SystemExit, match="WRONG"):
        sampling.check(sampling.Report("none"), "cpu", rows=1, vocab=40, batches=1)
