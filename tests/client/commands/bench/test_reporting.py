"""Files of results, the page made from them, and their comparison."""

import json
import math
from html.parser import HTMLParser

import pytest

from kestrel_client.commands.bench.reporting import charts
from kestrel_client.commands.bench.reporting.comparison import compare_files
from kestrel_client.commands.bench.reporting.html import render, write_report
from kestrel_client.commands.bench.reporting.results import (
    best_stage,
    describe_machine,
    read_results,
    stage_result,
    write_results,
)
from kestrel_client.commands.bench.reporting.text import stage_table
from kestrel_client.commands.bench.sending.sender import Stage
from kestrel_client.commands.bench.tally import Tally
from kestrel_client.commands.parser import CommandError
from kestrel_grpc.cli.program import main


def stage(level, latency_s, *, loop="closed", overload=(), limits=()):
    tally = Tally(total=10, succeeded=9, good=8, ended=9, ended_good=8, output_tokens=90)
    for _ in range(9):
        tally.latency.record(latency_s)
        tally.ttft.record(latency_s / 4)
        tally.itl.record(latency_s / 40)
        tally.by_skill["query"].record(latency_s)
    tally.errors["<b>QUEUE_FULL</b>"] = 1
    client = {"processes": 1, "cpu_share": 0.2, "limits": list(limits)}
    return stage_result(Stage(loop, level, 3.0, most_in_flight=64), tally, list(overload), client)


def test_a_table_without_rates_says_why():
    short = {**stage(8, 1.5), "throughput_rps": 0.0}
    assert "no request ended within this time" in stage_table(short)
    assert "no request ended" not in stage_table(stage(8, 1.5))


def run(label="a run", *, loop="closed", slower=1.0):
    over = ["latency p95 9000 ms > 4000 ms"]
    return {
        "benchmark": "load",
        "format": 1,
        "label": label,
        "loop": loop,
        "stage_duration_s": 3.0,
        "start_rps": None,
        "rps_step": None,
        "max_rps": None,
        "latency_threshold_ms": 4000.0,
        "ttft_threshold_ms": 2500.0,
        "itl_threshold_ms": None,
        "error_threshold": 0.1,
        "settings": {},
        "machine": describe_machine(),
        "server": {"default_model": "tiny", "device": "cpu", "server_version": "1"},
        "results": [
            stage(1, 0.1 * slower, loop=loop),
            stage(2, 0.2 * slower, loop=loop),
            stage(4, 9.0 * slower, loop=loop, overload=over),
        ],
    }


def written(tmp_path, content, name="r.json"):
    path = str(tmp_path / name)
    write_results(path, content)
    return path


def test_results_are_read_as_they_were_written(tmp_path):
    path = written(tmp_path, run())
    assert read_results(path) == run()
    assert [each.name for each in tmp_path.iterdir()] == ["r.json"]
    assert best_stage(run()["results"])["concurrency_limit"] in (1, 2)
    assert best_stage([stage(1, 9.0, overload=["slow"])]) is None


def test_fields_of_the_earlier_reports_are_there():
    """Those that the snippet of the HTTP ramp read."""
    found = stage(4.0, 0.2, loop="open")
    assert found["target_rps"] == 4.0 and found["concurrency_limit"] == 64
    assert found["throughput_rps"] == found["requests_success"] / 3.0
    for name in ("latency", "ttft", "decode_latency", "processing_latency"):
        assert isinstance(found[name], dict)
    assert found["latency"]["p50"] == pytest.approx(0.2, rel=0.01)
    assert found["tokens"]["output_per_s"] == 30 and found["tokens"]["input_per_s"] == 0
    assert found["overloaded"] is False and found["overload_reasons"] == []
    assert found["error_rate"] == pytest.approx(0.1) and found["requests_total"] == 10


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(benchmark="other"), "its 'benchmark' is not 'load'"),
        (lambda c: c.update(format=2), "its 'format' is 2, not 1"),
        (lambda c: c.update(server=None), "'server' is not an object"),
        (lambda c: c.update(results={}), "'results' is not a list"),
        (lambda c: c["results"].append(1), "results[3] is not an object"),
        (lambda c: c["results"][0].pop("ttft"), "results[0].ttft is missing or of another type"),
        (lambda c: c["results"][1].update(error_rate="x"), "results[1].error_rate is missing"),
        (lambda c: c["results"][1].update(throughput_rps=True), "results[1].throughput_rps is"),
        (lambda c: c["results"][0]["latency"].update(p50="<b>"), "results[0].latency.p50 is"),
        (lambda c: c["results"][0]["client"].update(limits=3), "results[0].client.limits is"),
    ],
)
def test_a_file_of_another_form_is_refused_by_field(tmp_path, change, words):
    content = run()
    change(content)
    with pytest.raises(CommandError, match=r"r.json' has no results of bench") as error:
        read_results(written(tmp_path, content))
    assert words in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "null", '{"benchmark": "load"}'])
def test_a_file_that_holds_no_results_is_refused(tmp_path, text):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(CommandError, match="has no results of bench"):
        read_results(str(path))
    content = json.dumps(run()).replace('"throughput_rps": 3.0', '"throughput_rps": NaN')
    path.write_text(content)
    with pytest.raises(CommandError, match="throughput_rps is not finite"):
        read_results(str(path))


class _Page(HTMLParser):
    """Checks that tags close in order. Collects tags, attributes and text."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.loads, self.text = [], [], [], ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        policy = dict(attributes).get("http-equiv", "Content-Security-Policy")
        assert tag != "meta" or policy == "Content-Security-Policy"
        self.loads += [name for name, _ in attributes if name in ("src", "href", "srcset")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_stands_alone_and_shows_every_run(tmp_path):
    attack = "<script>alert(1)</script>"
    limited = run(attack, loop="open")
    limited["results"][0]["client"]["limits"] = [f"slow {attack}"]
    limited["server"]["default_model"] = attack
    path = tmp_path / "deep" / "report.html"
    write_report(str(path), [run("first"), run("second", slower=1.3), limited])
    text = path.read_text()
    page = _Page(text)
    assert "script" not in page.tags and page.loads == []
    assert "http://" not in text and "https://" not in text and "url(" not in text
    assert page.tags.count("svg") == 16  # eight plots of each loop
    for words in ("first p95", "second p95", "the client may have limited", "<b>QUEUE_FULL</b>"):
        assert words in page.text
    assert "latency p95 9000 ms > 4000 ms" in page.text


def test_a_page_of_a_run_without_stages_and_of_empty_ones():
    empty = run() | {"results": []}
    client = {"cpu_share": 0.0, "limits": []}
    nothing = stage_result(Stage("closed", 1, 1.0), Tally(), [], client)
    assert "no" in _Page(render([empty, run() | {"results": [nothing]}])).text


def test_a_chart_places_points_between_its_axes():
    line = charts.Series("a & b", "#000", [(1, 10.0), (64, 5000.0)])
    drawn = charts.line_chart("t", "x", "y", [line], limit=100.0)
    assert drawn.count("<circle") == 2 and "a &amp; b" in drawn and 'class="limit"' in drawn
    places = [float(part.split('"')[1]) for part in drawn.split("cy=")[1:]]
    assert 0 < places[1] < places[0] < 300
    assert charts.line_chart("t", "x", "y", [charts.Series("none", "#000", [])]) == ""
    zeros = charts.line_chart("t", "x", "y", [charts.Series("z", "#000", [(0, 0.0), (1, 0.0)])])
    assert "nan" not in zeros


def test_a_run_is_compared_with_the_first(tmp_path, capsys):
    old = written(tmp_path, run("old"), "old.json")
    new = written(tmp_path, run("new", slower=1.3) | {"server": {"device": "cuda"}}, "new.json")
    assert main(["bench", "--compare", old, old]) == 0
    capsys.readouterr()
    page = tmp_path / "r.html"
    assert main(["bench", "--compare", old, new, "--report", str(page)]) == 1
    told = capsys.readouterr().out
    assert "WORSE    +30.0 %  1 in flight: latency p95: 0.1 -> 0.13" in told
    assert "the server differs: server_version 1 -> None, device cpu -> cuda" in told
    assert "new p95" in page.read_text()
    assert main(["bench", "--compare", old, new, "--tolerance", "31"]) == 0
    assert compare_files([run(), run() | {"results": []}], 5) == 0
    assert main(["bench", "picture.jpg", "--compare", old]) == 2
    assert main(["bench", "--compare", str(tmp_path / "none.json")]) == 1
    assert math.isfinite(run()["results"][0]["latency"]["mean"])
