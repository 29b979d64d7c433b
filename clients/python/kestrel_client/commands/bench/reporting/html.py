"""The report: one page with plots and tables of one or several runs. It loads nothing, so it works offline.

The runs are read from files, so every text is escaped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from ...parser import CommandError
from .charts import COLOURS, Series, line_chart
from .results import Plain, best_stage, level_text

_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #222; --faint: #ccc; --note: #fff4d6 }
@media (prefers-color-scheme: dark) { :root { --ground: #16181c; --ink: #ddd; --faint: #444; --note: #4a3b12 } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1200px; padding: 0 1rem;
  background: var(--ground); color: var(--ink) }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2.2rem }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 1.2rem }
figure { margin: 0 } figcaption { font-weight: 600 }
svg { width: 100%; height: auto } svg text { font-size: 11px; fill: var(--ink) }
.grid { stroke: var(--faint); stroke-width: .5 } .axis { stroke: var(--ink); fill: none }
path.limit { stroke: #c00; stroke-dasharray: 2 3 } i.limit { border-top: 2px dotted #c00 }
.legend { font-size: 12px } .legend span { margin-right: 1rem; white-space: nowrap }
.legend i { display: inline-block; width: 1.6em; margin-right: .4em; vertical-align: middle }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: 13px; margin: .8rem 0 }
th, td { border-bottom: 1px solid var(--faint); padding: .25rem .6rem; text-align: right; vertical-align: top }
th:first-child, td:first-child { text-align: left; white-space: nowrap }
.note { background: var(--note); padding: .6rem .9rem; border-radius: 6px }
details { margin: .6rem 0 } pre { white-space: pre-wrap; font-size: 12px }
"""


def write_report(path: str, runs: Sequence[Plain]) -> None:
    """Writes the page. Raises CommandError."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(render(runs), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {path!r}: {error.strerror}") from None


def render(runs: Sequence[Plain]) -> str:
    """``runs``: contents of files of results, with labels."""
    body = [f"<h1>Load of a Kestrel server</h1>{_overview(runs)}"]
    for loop, x_title in (("closed", "requests in flight"), ("open", "requests/s, offered")):
        of_loop = [run for run in runs if run.get("loop") == loop]
        if any(run["results"] for run in of_loop):
            title = "Closed loop" if loop == "closed" else "Open loop"
            body.append(f"<h2>{title}</h2>{_charts(of_loop, x_title)}")
    body += [_run_section(run) for run in runs]
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Load of a Kestrel server</title><style>{_STYLE}</style></head>\n<body>"
        + "\n".join(body)
        + f"<p>Made by kestrel bench, {made}.</p></body></html>\n"
    )


def _overview(runs: Sequence[Plain]) -> str:
    heads = (
        "run",
        "most good requests/s",
        "at",
        "latency p95 (ms)",
        "TTFT p95 (ms)",
        "stages",
        "ended by",
    )
    rows = []
    for run in runs:
        results = run["results"]
        best = best_stage(results)
        cells = [escape(str(run["label"]))]
        if best is None:
            cells += ["—"] * 4
        else:
            cells += [f"{best['goodput_rps']:.2f}", level_text(best)]
            cells += [_ms(best[name].get("p95")) for name in ("latency", "ttft")]
        last = results[-1] if results else None
        over = last is not None and last["overloaded"]
        why = "; ".join(map(str, last["overload_reasons"])) if last and over else "the last level"
        rows.append([*cells, str(len(results)), escape(why)])
    notes = [
        f"<p class=note><b>{escape(str(run['label']))}: the client may have limited what was measured</b> "
        f"in {len(limited)} of {len(run['results'])} stages, first at {level_text(limited[0])}: "
        f"{escape('; '.join(map(str, limited[0]['client']['limits'])))}. More <code>--processes</code>, or a machine "
        "of its own for the client, may help.</p>"
        for run in runs
        if (limited := [s for s in run["results"] if s["client"].get("limits")])
    ]
    return _table(heads, rows) + "".join(notes)


def _charts(runs: Sequence[Plain], x_title: str) -> str:
    def of(key: str, part: str) -> Callable[[Plain], float | None]:
        return lambda stage: _scaled(stage[key].get(part))

    def two(key: str) -> list[Series]:
        several = len(runs) > 1
        found = []
        for part, dashed in (("p50", True), ("p95", False)):
            found += _series(runs, of(key, part), part, dashed=dashed)
        return found if several else [*found, *_series(runs, of(key, "p99"), "p99", colour=3)]

    limits = runs[0]
    alike = all(
        run.get(name) == limits.get(name)
        for run in runs
        for name in ("latency_threshold_ms", "ttft_threshold_ms", "itl_threshold_ms")
    )

    def limit(name: str) -> float | None:
        value = limits.get(name) if alike else None
        return float(value) if isinstance(value, (int, float)) else None

    rates = [
        *_series(runs, lambda s: float(s["throughput_rps"]), "all", dashed=True),
        *_series(runs, lambda s: float(s["goodput_rps"]), "good"),
    ]
    charts = [
        line_chart("Requests per second: all, and good ones", x_title, "requests/s", rates),
        line_chart(
            "Time of a whole answer", x_title, "ms", two("latency"), limit("latency_threshold_ms")
        ),
        line_chart(
            "Time to the first token", x_title, "ms", two("ttft"), limit("ttft_threshold_ms")
        ),
        line_chart("Time between tokens", x_title, "ms", two("itl"), limit("itl_threshold_ms")),
        line_chart(
            "Output tokens per second",
            x_title,
            "tokens/s",
            _series(runs, lambda s: float(s["tokens"]["output_per_s"]), ""),
        ),
        line_chart(
            "Latency over throughput (p95)",
            "requests/s",
            "ms",
            _series(runs, of("latency", "p95"), "", x=lambda s: float(s["throughput_rps"])),
        ),
        line_chart(
            "Failed requests",
            x_title,
            "%",
            _series(runs, lambda s: 100 * float(s["error_rate"]), ""),
        ),
        line_chart(
            "CPU of the busiest client process",
            x_title,
            "% of a core",
            _series(runs, lambda s: _percent(s["client"].get("cpu_share")), ""),
        ),
    ]
    return (
        f'<div class="charts">{"".join(charts)}</div><p>Hollow points are overloaded stages. Point at a point to see '
        "its values.</p>"
    )


def _series(
    runs: Sequence[Plain],
    y: Callable[[Plain], float | None],
    name: str,
    *,
    dashed: bool = False,
    colour: int = 0,
    x: Callable[[Plain], float] | None = None,
) -> list[Series]:
    """One line for each run."""
    found = []
    for i, run in enumerate(runs):
        points, hollow = [], set()
        for stage in run["results"]:
            if (value := y(stage)) is None:
                continue
            at = _level(stage) if x is None else x(stage)
            points.append((at, value))
            if stage["overloaded"]:
                hollow.add(at)
        # With one run, its parts alone are named.
        named = (str(run["label"]), name) if len(runs) > 1 or not name else (name,)
        label = " ".join(part for part in named if part)
        shade = COLOURS[(i + colour) % len(COLOURS)]
        found.append(Series(label, shade, points, dashed, frozenset(hollow)))
    return found


def _run_section(run: Plain) -> str:
    heads = (
        "target requests/s", "observed requests/s", "good requests/s", "in flight at most", "success/total", "errors %",
        "latency p50/p95/p99 (ms)", "TTFT p50/p95/p99 (ms)", "ITL p50/p95/p99 (ms)", "decode p50/p95 (ms)",
        "processing p50/p95 (ms)", "input tok/s", "output tok/s", "client CPU %", "overloaded"
    )  # fmt: skip
    rows = []
    for stage in run["results"]:
        tokens = stage["tokens"]
        rows.append([
            "—" if stage["target_rps"] is None else f"{stage['target_rps']:g}",
            f"{stage['throughput_rps']:.2f}",
            f"{stage['goodput_rps']:.2f}",
            f"{stage['concurrency_limit']:g}",
            f"{stage['requests_success']:g}/{stage['requests_total']:g}",
            f"{100 * stage['error_rate']:.1f}",
            *(_percentiles(stage[k], "p50", "p95", "p99") for k in ("latency", "ttft", "itl")),
            *(_percentiles(stage[k], "p50", "p95") for k in ("decode_latency", "processing_latency")),
            f"{tokens['input_per_s']:.1f}",
            f"{tokens['output_per_s']:.1f}",
            _shown(_percent(stage["client"].get("cpu_share"))),
            escape("; ".join(map(str, stage["overload_reasons"])) or "no"),
        ])  # fmt: skip
    errors = [
        [level_text(stage), escape(str(count)), escape(str(words))]
        for stage in run["results"]
        for words, count in stage["errors"].items()
    ]
    failures = _table(("load", "failed", "error"), errors) if errors else ""
    known = {
        k: run[k] for k in ("settings", "slo", "machine", "client_version", "server") if k in run
    }
    facts = escape(json.dumps(known, indent=1, ensure_ascii=False, default=str))
    return (
        f"<h2>{escape(str(run['label']))}</h2><p>{escape(_words(run))}</p>{_table(heads, rows)}{failures}"
        f"<details><summary>Settings, client and server</summary><pre>{facts}</pre></details>"
    )


def _words(run: Plain) -> str:
    """One sentence about the environment."""
    server, machine = run["server"], run["machine"]
    return (
        f"{server.get('default_model')} on {server.get('device_name') or server.get('device')}, server "
        f"{server.get('server_version')}; client with {machine.get('cores')} cores, {machine.get('date')}; stages of "
        f"{run.get('stage_duration_s')} s."
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """``rows``: of HTML."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _level(stage: Plain) -> float:
    rate = stage["target_rps"]
    return float(stage["concurrency_limit"] if rate is None else rate)


def _percentiles(spread: Plain, *names: str) -> str:
    return "/".join(_ms(spread.get(name)) for name in names)


def _scaled(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _ms(seconds: float | None) -> str:
    return (
        "—"
        if seconds is None
        else f"{1e3 * seconds:.0f}"
        if seconds >= 0.1
        else f"{1e3 * seconds:.1f}"
    )


def _percent(share: object) -> float | None:
    return 100 * share if isinstance(share, (int, float)) else None


def _shown(value: float | None) -> str:
    return "—" if value is None else f"{value:.0f}"
