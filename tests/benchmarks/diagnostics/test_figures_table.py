"""Figures as Markdown: every one in a table of its benchmark, with its limits."""

from pathlib import Path

from benchmarks.diagnostics import figures_table
from benchmarks.reports.bars import Limits
from benchmarks.reports.report import Report


def test_figures_and_bars_become_rows(tmp_path: Path, capsys):
    report = Report("decode", {}, command="python -m benchmarks.decode")
    report.figure("step", 1.25, "ms", Limits(1.2, 1.1), at_least=False, floor=1.0)
    report.figure("rate", 12345.6, "1/s")
    report.bar("error", 0.01, 0.03)
    report.finish(str(tmp_path / "a.json"))
    capsys.readouterr()
    figures_table.main([str(tmp_path / "a.json")])
    lines = capsys.readouterr().out.splitlines()
    assert "### Decode against its memory floor" in lines
    assert "    python -m benchmarks.decode" in lines
    assert "| step | 1.25 ms | 1 | 80% | 1.2 | 1.1 | MISSED |" in lines
    assert "| rate | 12,346 1/s |  |  |  |  |  |" in lines
    assert "| error | 0.01 |  |  | 0.03 |  | met |" in lines
