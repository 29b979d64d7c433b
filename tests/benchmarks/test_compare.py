"""compare.py: what counts as slower, and its exit status."""

from pathlib import Path

import pytest

from benchmarks.compare import compare, main, read_run
from benchmarks.reports.bars import Limits
from benchmarks.reports.report import Figure, Report, line


def write(path: Path, name: str, rate: float, time_ms: float) -> None:
    report = Report(name, {}, command=f"python -m benchmarks.{name}")
    report.figure("rate", rate, "1/s")
    report.figure("time", time_ms, "ms", Limits(1.0), at_least=False, floor=time_ms / 2)
    report.finish(str(path))


def test_equal_runs_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write(tmp_path / "a.json", "x", 10, 2)
    assert main([str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 0
    assert "2 compared, 0 worse" in capsys.readouterr().out


@pytest.mark.parametrize(("rate", "time_ms"), [(9.4, 2), (10, 2.2)])
def test_either_direction_of_worse_fails(tmp_path: Path, rate: float, time_ms: float):
    write(tmp_path / "a.json", "x", 10, 2)
    write(tmp_path / "b.json", "x", rate, time_ms)
    assert main([str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 1
    assert main([str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--tolerance", "12"]) == 0
    assert main([str(tmp_path / "b.json"), str(tmp_path / "a.json")]) == 0


def test_folders_are_matched_by_benchmark_and_name(tmp_path: Path, capsys):
    for folder, names in (("old", "xy"), ("new", "yz")):
        for name in names:
            write(tmp_path / folder / f"{name}.json", name, 10, 2)
    (tmp_path / "new" / "other.json").write_text("[1]")
    assert main([str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    out = capsys.readouterr().out
    assert "new: z: rate" in out and "missing: x: time" in out and "2 compared" in out


def test_nothing_in_common_is_no_pass(tmp_path: Path):
    write(tmp_path / "a.json", "x", 10, 2)
    write(tmp_path / "b.json", "y", 10, 2)
    assert main([str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2


def test_bars_of_the_cpu_benchmarks_are_compared_too(tmp_path: Path):
    report = Report("cpu", {})
    report.bar("us", 100.0, 300.0)
    report.finish(str(tmp_path / "a.json"))
    run = read_run(tmp_path / "a.json")
    assert run.figures == {("cpu", "us"): (100.0, False)}
    (one,) = compare(run, run)
    assert one.worse == 0


def test_a_figure_that_became_nothing_is_worse_without_bound(tmp_path: Path):
    write(tmp_path / "a.json", "x", 10, 2)
    write(tmp_path / "b.json", "x", 0, 2)
    found = compare(read_run(tmp_path / "a.json"), read_run(tmp_path / "b.json"))
    assert found[0].worse == float("inf")


def test_share_and_verdict_of_a_figure():
    rate = Figure(name="r", value=500, unit="TFLOP/s", at_least=True, floor=780, bar=490, goal=560)
    assert rate.share == pytest.approx(500 / 780)
    assert rate.verdict == "met"
    step = Figure(name="s", value=2, unit="ms", at_least=False, floor=1, bar=1.8, goal=1.2)
    assert (step.share, step.verdict) == (0.5, "MISSED")
    assert line(step) == "s: 2 ms, 50.0 % of 1, bar 1.8, goal 1.2, MISSED"
    quick = Figure(name="q", value=1, unit="ms", at_least=False, goal=1.2)
    assert quick.verdict == "goal met"
