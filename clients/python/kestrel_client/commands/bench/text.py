"""What ``bench`` prints: a table of each stage, and the summary of --json."""

from __future__ import annotations

from collections.abc import Sequence

from .results import Plain, level_text
from .tally import OVERLOAD_SHARE

_COLUMNS = ("mean", "p50", "p90", "p95", "p99")


def stage_table(stage: Plain) -> str:
    """Several lines about one stage."""
    lines = [
        f"{level_text(stage)} for {stage['duration_s']:g} s: {_rate(stage['throughput_rps'])} requests/s, "
        f"{_rate(stage['goodput_rps'])} of them good, {_rate(stage['tokens']['output_per_s'])} tokens/s; "
        f"{stage['requests_success']} of {stage['requests_total']} requests succeeded",
        f"{'ms':24}" + "".join(f"{name:>10}" for name in _COLUMNS),
    ]
    for name, title in (
        ("ttft", "first token (TTFT)"),
        ("itl", "between tokens (ITL)"),
        ("latency", "whole answer"),
    ):
        if spread := stage[name]:
            lines.append(f"{title:24}" + "".join(f"{1e3 * spread[c]:10.1f}" for c in _COLUMNS))
    if stage["requests_success"] and not stage["throughput_rps"]:
        lines.append(
            "no request ended within this time, so there are no rates: give more --seconds"
        )
    lines += [f"{count} failed: {words}" for words, count in stage["errors"].items()]
    lines += [f"the client may have limited this: {why}" for why in stage["client"]["limits"]]
    if stage["overloaded"]:
        missed = stage["requests_total"] - stage["requests_good"]
        lines.append(
            f"overloaded: {missed} of {stage['requests_total']} requests failed or missed a limit of --slo "
            f"(more than {OVERLOAD_SHARE:.0%})"
        )
    return "\n".join(lines)


def _rate(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def summary(results: Sequence[Plain]) -> Plain:
    """What --json prints: the last stage with times in milliseconds, and all stages if there are several."""
    stage = results[-1]
    is_open = stage["target_rps"] is not None
    return {
        "seconds": stage["duration_s"],
        "concurrency": None if is_open else stage["concurrency_limit"],
        "rate": stage["target_rps"],
        "requests": stage["requests_success"],
        "errors": stage["errors"],
        "requests_per_second": round(stage["throughput_rps"], 3),
        "good_requests_per_second": round(stage["goodput_rps"], 3),
        "output_tokens_per_second": round(stage["tokens"]["output_per_s"], 3),
        "ttft_ms": _milliseconds(stage["ttft"]),
        "itl_ms": _milliseconds(stage["itl"]),
        "total_ms": _milliseconds(stage["latency"]),
        "client_limits": stage["client"]["limits"],
        **({"stages": list(results)} if len(results) > 1 else {}),
    }


def _milliseconds(spread: Plain) -> Plain | None:
    return {name: round(1e3 * spread[name], 3) for name in _COLUMNS} if spread else None
