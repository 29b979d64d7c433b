"""The report: one page with plots and tables of one or several runs. The runs are read from files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

from ...files import write_whole
from ...page import PAGE_END, html_table, page_head
from .charts import COLOURS, STYLE, Series, line_chart
from .results import Plain, best_stage, level_of, level_text

_STYLE = """
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 1.2rem }
.note { background: #fc03; padding: .6rem .9rem; border-radius: 6px }
details { margin: .6rem 0 } pre { white-space: pre-wrap; font-size: 12px }
"""
_Value: TypeAlias = Callable[[Plain], float | None]
"""A value of a stage, if it was measured."""


def write_report(path: str, runs: Sequence[Plain]) -> None:
    """Writes the page. Raises CommandError."""
    write_whole(Path(path), lambda file: file.write_text(render(runs), encoding="utf-8"))


def render(runs: Sequence[Plain]) -> str:
    """``runs``: contents of files of results, with labels."""
    body = [page_head("Load of a Kestrel server", (), STYLE + _STYLE), _overview(runs)]
    for loop, title, x_title in (
        ("closed", "Closed loop", "requests in flight"),
        ("open", "Open loop", "requests/s, offered"),
    ):
        of_loop = [run for run in runs if run.get("loop") == loop]
        if any(run["results"] for run in of_loop):
            body.append(f"<h2>{title}</h2>{_charts(of_loop, x_title)}")
    body += [_run_section(run) for run in runs]
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return "\n".join([*body, f"<p>Made by kestrel bench, {made}.</p>{PAGE_END}"])


def _overview(runs: Sequence[Plain]) -> str:
    times = "latency p95 (ms)", "TTFT p95 (ms)"
    rows = [["run", "at", "most good requests/s", *times, "stages", "ended by"]]
    notes = []
    for run in runs:
        label, stages = str(run["label"]), run["results"]
        best = best_stage(stages)
        cells = ["—"] * 4
        if best is not None:
            cells = [level_text(best), f"{best['goodput_rps']:.2f}"]
            cells += [_ms(best[name].get("p95")) for name in ("latency", "ttft")]
        over = [reason for stage in stages[-1:] for reason in stage["overload_reasons"]]
        rows.append([label, *cells, str(len(stages)), _joined(over) or "the last level"])
        if limited := [stage for stage in stages if stage["client"]["limits"]]:
            notes.append(
                f"<p class=note><b>{escape(label)}: the client may have limited what was measured</b> in "
                f"{len(limited)} of {len(stages)} stages, first at {level_text(limited[0])}: "
                f"{escape(_joined(limited[0]['client']['limits']))}. More <code>--processes</code>, or a machine of "
                "its own for the client, may help.</p>"
            )
    return html_table(rows) + "".join(notes)


def _charts(runs: Sequence[Plain], x_title: str) -> str:
    def times(key: str) -> list[Series]:
        series = [
            *_series(runs, _time(key, "p50"), "p50", dashed=True),
            *_series(runs, _time(key, "p95"), "p95"),
        ]
        return [*series, *(_series(runs, _time(key, "p99"), "p99", 3) if len(runs) == 1 else ())]

    def limit(name: str) -> float | None:
        """The limit that all runs have, for numbers."""
        value: Any
        value, *others = (run.get(f"{name}_threshold_ms") for run in runs)
        alike = isinstance(value, (int, float)) and all(other == value for other in others)
        return float(value) if alike else None

    rates = [
        *_series(runs, lambda s: s["throughput_rps"], "all", dashed=True),
        *_series(runs, lambda s: s["goodput_rps"], "good"),
    ]
    by_rate = _series(runs, _time("latency", "p95"), x=lambda s: float(s["throughput_rps"]))
    tokens = _series(runs, lambda s: s["tokens"]["output_per_s"])
    failed = _series(runs, lambda s: 100 * s["error_rate"])
    busy = _series(runs, lambda s: 100 * s["client"]["cpu_share"])
    charts = [
        line_chart("Requests per second: all, and good ones", x_title, "requests/s", rates),
        line_chart("Time of a whole answer", x_title, "ms", times("latency"), limit("latency")),
        line_chart("Time to the first token", x_title, "ms", times("ttft"), limit("ttft")),
        line_chart("Time between tokens", x_title, "ms", times("itl"), limit("itl")),
        line_chart("Output tokens per second", x_title, "tokens/s", tokens),
        line_chart("Latency over throughput (p95)", "requests/s", "ms", by_rate),
        line_chart("Failed requests", x_title, "%", failed),
        line_chart("CPU of the busiest client process", x_title, "% of a core", busy),
    ]
    return (
        f'<div class="charts">{"".join(charts)}</div><p>Hollow points are overloaded stages. Point at a point to see '
        "its values.</p>"
    )


def _time(key: str, part: str) -> _Value:
    """A percentile of a stage, in milliseconds."""
    return lambda stage: 1e3 * stage[key][part] if part in stage[key] else None


def _series(
    runs: Sequence[Plain],
    y: _Value,
    name: str = "",
    colour: int = 0,
    *,
    dashed: bool = False,
    x: Callable[[Plain], float] | None = None,
) -> list[Series]:
    """One line for each run."""
    found = []
    for i, run in enumerate(runs):
        places = [((x or level_of)(s), y(s), bool(s["overloaded"])) for s in run["results"]]
        points = [(at, value) for at, value, _ in places if value is not None]
        hollow = frozenset(at for at, value, over in places if over and value is not None)
        # With one run, its parts alone are named.
        label = name if len(runs) == 1 and name else f"{run['label']} {name}".rstrip()
        shade = COLOURS[(i + colour) % len(COLOURS)]
        found.append(Series(label, shade, points, dashed, hollow))
    return found


def _run_section(run: Plain) -> str:
    rows = [[
        "target requests/s", "observed requests/s", "good requests/s", "in flight at most", "success/total", "errors %",
        "latency p50/p95/p99 (ms)", "TTFT p50/p95/p99 (ms)", "ITL p50/p95/p99 (ms)", "decode p50/p95 (ms)",
        "processing p50/p95 (ms)", "input tok/s", "output tok/s", "client CPU %", "overloaded"
    ]]  # fmt: skip
    failures = [["load", "error", "failed"]]
    for stage in run["results"]:
        rows.append([
            "—" if stage["target_rps"] is None else f"{stage['target_rps']:g}",
            f"{stage['throughput_rps']:.2f}",
            f"{stage['goodput_rps']:.2f}",
            f"{stage['concurrency_limit']:g}",
            f"{stage['requests_success']:g}/{stage['requests_total']:g}",
            f"{100 * stage['error_rate']:.1f}",
            *(_percentiles(stage[k], "p50", "p95", "p99") for k in ("latency", "ttft", "itl")),
            *(_percentiles(stage[k], "p50", "p95") for k in ("decode_latency", "processing_latency")),
            *(f"{stage['tokens'][k]:.1f}" for k in ("input_per_s", "output_per_s")),
            f"{100 * stage['client']['cpu_share']:.0f}",
            _joined(stage["overload_reasons"]) or "no",
        ])  # fmt: skip
        failures += [[level_text(stage), str(why), str(n)] for why, n in stage["errors"].items()]
    server, machine = run["server"], run["machine"]
    about = (
        f"{server.get('default_model')} on {server.get('device_name') or server.get('device')}, server "
        f"{server.get('server_version')}; client with {machine.get('cores')} cores, {machine.get('date')}; stages of "
        f"{run.get('stage_duration_s')} s."
    )
    names = ("settings", "slo", "machine", "client_version", "server")
    known = {name: run[name] for name in names if name in run}
    facts = escape(json.dumps(known, indent=1, ensure_ascii=False, default=str))
    return (
        f"<h2>{escape(str(run['label']))}</h2><p>{escape(about)}</p>{html_table(rows)}"
        f"{html_table(failures) if len(failures) > 1 else ''}"
        f"<details><summary>Settings, client and server</summary><pre>{facts}</pre></details>"
    )


def _joined(reasons: Sequence[object]) -> str:
    return "; ".join(map(str, reasons))


def _percentiles(spread: Plain, *names: str) -> str:
    return "/".join(_ms(spread.get(name)) for name in names)


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "—"
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"
