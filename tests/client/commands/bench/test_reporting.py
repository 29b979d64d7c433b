"""Files of results and their comparison."""

import json

import pytest

from kestrel_client.commands.bench.client_health import ClientHealth
from kestrel_client.commands.bench.results import (
    describe_machine,
    figures,
    read_figures,
    stage_result,
    write_results,
)
from kestrel_client.commands.bench.sender import Stage
from kestrel_client.commands.bench.tally import Tally
from kestrel_client.commands.bench.text import stage_table
from kestrel_client.commands.parser import CommandError
from kestrel_grpc.cli.program import main


def stage(level, latency_s, *, loop="closed", good=9):
    tally = Tally(total=10, succeeded=9, good=good, ended=9, ended_good=8, output_tokens=90)
    for _ in range(9):
        tally.latency.record(latency_s)
        tally.ttft.record(latency_s / 4)
        tally.itl.record(latency_s / 40)
        tally.by_skill["query"].record(latency_s)
    tally.errors["QUEUE_FULL"] = 1
    return stage_result(Stage(loop, level, 3.0, most_in_flight=64), tally, ClientHealth())


def test_a_table_says_what_is_missing_or_wrong():
    short = {**stage(8, 1.5), "throughput_rps": 0.0}
    assert "no request ended within this time" in stage_table(short)
    table = stage_table(stage(8, 1.5))
    assert "no request ended" not in table and "1 failed: QUEUE_FULL" in table
    assert "overloaded: 1 of 10 requests failed or missed a limit of --slo" in table


def test_fields_of_a_stage():
    """Those that the snippet of the HTTP ramp read."""
    found = stage(4.0, 0.2, loop="open")
    assert found["target_rps"] == 4.0 and found["concurrency_limit"] == 64
    assert found["throughput_rps"] == found["requests_success"] / 3.0
    for name in ("latency", "ttft", "decode_latency", "processing_latency"):
        assert isinstance(found[name], dict)
    assert found["latency"]["p50"] == pytest.approx(0.2, rel=0.01)
    assert found["tokens"]["output_per_s"] == 30 and found["tokens"]["input_per_s"] == 0
    assert found["error_rate"] == pytest.approx(0.1) and found["requests_total"] == 10


def written(tmp_path, name, *stages):
    path = str(tmp_path / name)
    content = {"machine": describe_machine(), "results": list(stages), "figures": figures(stages)}
    write_results(path, content)
    assert [each.name for each in tmp_path.iterdir() if each.suffix != ".json"] == []
    return path


def test_two_runs_are_compared(tmp_path, capsys):
    old = written(tmp_path, "old.json", stage(1, 0.1), stage(2, 0.2))
    new = written(tmp_path, "new.json", stage(1, 0.13), stage(2, 0.2), stage(4, 0.4))
    assert main(["bench", "--compare", old, old]) == 0
    capsys.readouterr()
    assert main(["bench", "--compare", old, new]) == 1
    told = capsys.readouterr().out
    assert "WORSE    +30.0 %  1 in flight: latency p95: 0.1 -> 0.13" in told
    assert "14 compared, 4 worse by more than 5 %" in told
    assert main(["bench", "--compare", old, new, "--tolerance", "31"]) == 0
    assert main(["bench", "picture.jpg", "--compare", old, new]) == 2
    assert main(["bench", "--compare", old, str(tmp_path / "none.json")]) == 1
    assert main(["bench", "--compare", old, written(tmp_path, "other.json", stage(3, 1))]) == 1
    assert "no stage of both has the same load" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[" * 100_000, "null", '{"figures": 1}', '{"figures": [{"name": "a"}]}'),
        '{"figures": [{"name": "a", "value": "NaN", "at_least": true}]}',
        '{"figures": [{"name": "a", "value": 1, "at_least": "no"}]}',
        json.dumps({"figures": [{"name": "a", "value": 10**400, "at_least": True}]}),
    ],
)
def test_a_file_that_holds_no_results_is_refused(tmp_path, text):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(CommandError, match=r"r.json' has no results of bench"):
        read_figures(str(path))
