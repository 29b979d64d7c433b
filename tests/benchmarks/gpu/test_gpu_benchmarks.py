"""The GPU's benchmarks run on a CPU at a hundredth of their size, with the bundled model; figures are not judged."""

import json
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks import compare, decode, gpu_suite, trace, trace_grpc
from benchmarks.gpu import floors, prefill, quality, vision
from benchmarks.reports.report import Report

MODEL = ("--threads", "1", "--max-batch-size", "16")


def run(benchmark: ModuleType, folder: Path, *arguments: str) -> dict:
    path = folder / "out" / "report.json"
    benchmark.main(["--quick", "--json", str(path), *arguments])
    report = json.loads(path.read_text())
    assert report["machine"]["torch"] == torch.__version__
    assert report["command"].startswith("python -m benchmarks.")
    assert report["figures"]
    for figure in report["figures"]:
        assert figure["value"] > 0 and math.isfinite(figure["value"]), figure
    for rows in report["tables"].values():
        for row in rows:
            numbers = [value for value in row.values() if isinstance(value, (int, float))]
            assert all(value >= 0 and not math.isinf(value) for value in numbers), row
    return report


@pytest.mark.parametrize(("in_flights", "tokens"), [((1,), (3,)), ((4, 1), (3, 5))])
@pytest.mark.slow
def test_trace(tmp_path: Path, in_flights: tuple[int, ...], tokens: tuple[int, ...]) -> None:
    flags = ["--in-flight", *map(str, in_flights), "--tokens", *map(str, tokens)]
    report = run(trace, tmp_path, *MODEL, *flags)
    whole, halves, phases = report["tables"].values()
    runs = [(in_flight, count) for in_flight in in_flights for count in tokens]
    assert [(row["in flight"], row["tokens"]) for row in whole] == runs
    assert all(row["requests"] == 6 and 0.2 < row["hit rate"] < 0.5 for row in whole)
    assert [row["of"] for row in halves] == ["uncached", "repeats"] * len(runs)
    uncached, repeats = halves[-2:]
    assert uncached["p50"] > repeats["p50"], "one at a time, a repeat is quicker"
    assert all(0 < row["busy"] < 1.05 and row["crops/s"] > 0 for row in phases)


@pytest.mark.slow
def test_trace_cut_short(tmp_path: Path) -> None:
    report = run(trace, tmp_path, *MODEL, "--in-flight", "1", "--limit", "0.001")
    assert report["tables"]["Trace through the engine (times in ms)"][0]["requests"] == 1


@pytest.mark.slow
def test_trace_saturated(tmp_path: Path) -> None:
    report = run(trace, tmp_path, *MODEL, "--saturate", "--in-flight", "3")
    ((row,),) = report["tables"].values()
    assert row["streams"] == 3 and row["tokens/s"] > 0 and row["mean batch"] == 3


@pytest.mark.slow
def test_decode(tmp_path: Path) -> None:
    report = run(decode, tmp_path, *MODEL)
    (rows,) = report["tables"].values()
    assert [row["batch"] for row in rows] == [1, 4]
    assert all(0 < row["share"] < 1.5 for row in rows)
    assert rows[0]["experts"] == 2 <= rows[1]["experts"] <= 8
    assert all(figure["floor"] and not figure["bar"] for figure in report["figures"])


@pytest.mark.slow
def test_floors(tmp_path: Path) -> None:
    report = run(floors, tmp_path, "--device", "cpu")
    names = {figure["name"] for figure in report["figures"]}
    assert {"cpu: copy rate", "float32 GEMM, large", "preprocessing, 1 thread"} <= names


@pytest.mark.slow
def test_vision(tmp_path: Path) -> None:
    report = run(vision, tmp_path, *MODEL)
    tower, step = report["tables"].values()
    assert [row["crops"] for row in tower] == [2, 1]
    assert step[0]["images"] == 6 and step[0]["crops/s"] > 0


@pytest.mark.slow
def test_prefill(tmp_path: Path) -> None:
    report = run(prefill, tmp_path, *MODEL)
    prefixes, questions, moe = report["tables"].values()
    assert [row["positions"] for row in prefixes] == [325, 650]
    assert [row["questions"] for row in questions] == [1, 2]
    assert (moe[0]["tokens"], moe[0]["experts"]) == (650, "float32")


@pytest.mark.slow
def test_quality_of_float32_is_perfect(tmp_path: Path) -> None:
    report = run(quality, tmp_path, *MODEL, "--drift-only")
    assert [bar["value"] for bar in report["bars"]] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bfloat16", "int8", "int4"])
def test_quality_of_narrow_types_is_near(precision: str, tmp_path: Path) -> None:
    report = run(quality, tmp_path, *MODEL, "--drift-only", "--precision", precision)
    assert all(bar["is_met"] and bar["value"] > 1e-4 for bar in report["bars"])


def test_quality_fails_when_a_limit_is_passed() -> None:
    report = Report("x")
    report.bar("relative error", 0.01, 0.03)
    assert quality.passed(report)
    report.bar("score", 0.9, quality.LEAST_SCORE, at_least=True)
    assert not quality.passed(report)


@pytest.mark.slow
def test_score(tmp_path: Path) -> None:
    path = tmp_path / "score.json"
    report = quality.main(["--quick", "--score-only", "--threads", "1", "--json", str(path)])
    (bar,) = report.bars
    assert bar.value >= 0.5, "one scene"
    assert quality.passed(report) == (bar.value >= quality.LEAST_SCORE)


@pytest.mark.slow
def test_trace_through_a_server(tmp_path: Path) -> None:
    flags = ["--saturate", "--engine-tokens-per-s", "100", "--in-flight", "3", "--tokens", "3"]
    report = run(trace_grpc, tmp_path, *MODEL, "--clients", "2", *flags)
    saturated, whole, halves = report["tables"].values()
    assert saturated[0]["streams"] == 3 and saturated[0]["ratio"] > 0
    assert (whole[0]["requests"], whole[0]["tokens"]) == (6, 3)
    assert [row["of"] for row in halves] == ["uncached", "repeats"]


@pytest.mark.slow
def test_suite_goes_on_after_a_part_that_fails(tmp_path: Path, capfd) -> None:
    parts = ["--parts", "saturate", "floors"]
    assert gpu_suite.main(["--quick", "--out", str(tmp_path), *parts]) == 0
    reports = json.loads((tmp_path / "bench.json").read_text())
    assert {r["benchmark"] for r in reports} == {"saturate", "floors"}
    assert compare.main([str(tmp_path / "bench.json"), str(tmp_path)]) == 0
    # A model that there isn't fails; the ceilings are measured all the same.
    flags = ["--out", str(tmp_path), "--device", "cpu", "--models", "nosuch"]
    (tmp_path / "floors.json").unlink()
    failed = gpu_suite.Job("x", ["benchmarks.gpu_suite", "--one", "nosuch", *flags], 60)
    assert not gpu_suite.run_job(failed, 60)
    assert not gpu_suite.run_job(gpu_suite.Job("y", ["http.server", "0"], 60), 1)
    assert "y exceeded its time limit" in capfd.readouterr().out


BENCHMARKS = [compare, decode, floors, gpu_suite, prefill, quality, trace, trace_grpc, vision]


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_help(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        benchmark.main(["--help"])
    assert ended.value.code == 0
    assert "usage: benchmarks." in capsys.readouterr().out
