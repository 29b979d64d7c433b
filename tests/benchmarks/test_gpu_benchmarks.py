"""The GPU's benchmarks run on a CPU at a hundredth of their size, with the bundled model; figures are not judged."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks import chart_trace, compare, decode, floors, trace

MODEL = ("--threads", "1", "--max-batch-size", "16")


@pytest.fixture(autouse=True)
def process_settings() -> Iterator[None]:
    """Benchmarks set the process's threads and garbage collector: both are put back."""
    threads, thresholds = torch.get_num_threads(), gc.get_threshold()
    yield
    torch.set_num_threads(threads)
    gc.set_threshold(*thresholds)


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


def test_trace(tmp_path: Path) -> None:
    report = run(trace, tmp_path, *MODEL, "--in-flight", "4", "1", "--tokens", "3", "5")
    whole, halves, phases = report["tables"].values()
    runs = [(4, 3), (4, 5), (1, 3), (1, 5)]
    assert [(row["in flight"], row["tokens"]) for row in whole] == runs
    assert all(row["requests"] == 6 and 0.2 < row["hit rate"] < 0.5 for row in whole)
    assert [row["of"] for row in halves] == ["uncached", "repeats"] * 4
    assert halves[4]["p50"] > halves[5]["p50"], "one at a time, a repeat is quicker"
    assert all(0 < row["busy"] < 1.05 and row["crops/s"] > 0 for row in phases)


def test_trace_sampled_and_cut_short(tmp_path: Path) -> None:
    report = run(trace, tmp_path, *MODEL, "--in-flight", "1", "--sampled", "--limit", "0.001")
    assert report["tables"]["Trace through the engine (times in ms)"][0]["requests"] == 1


def test_trace_saturated(tmp_path: Path) -> None:
    report = run(trace, tmp_path, *MODEL, "--saturate", "--in-flight", "3")
    ((row,),) = report["tables"].values()
    assert row["streams"] == 3 and row["tokens/s"] > 0 and row["mean batch"] == 3


def test_decode(tmp_path: Path) -> None:
    report = run(decode, tmp_path, *MODEL)
    (rows,) = report["tables"].values()
    assert [row["batch"] for row in rows] == [1, 4]
    assert all(0 < row["share"] < 1.5 for row in rows)
    assert rows[0]["experts"] == 2 <= rows[1]["experts"] <= 8
    assert all(figure["floor"] and not figure["bar"] for figure in report["figures"])


def test_floors(tmp_path: Path) -> None:
    report = run(floors, tmp_path, "--device", "cpu")
    names = {figure["name"] for figure in report["figures"]}
    assert {"cpu: copy rate", "float32 GEMM, large", "preprocessing, 1 thread"} <= names


@pytest.mark.parametrize("benchmark", [chart_trace, compare, decode, floors, trace])
def test_help(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        benchmark.main(["--help"])
    assert ended.value.code == 0
    assert "usage: benchmarks." in capsys.readouterr().out
