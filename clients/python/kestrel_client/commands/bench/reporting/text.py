"""What ``bench`` prints: a table of one stage, a line for each stage of a ramp, its end, and the summary of --json."""

from __future__ import annotations

from collections.abc import Sequence

from .results import Plain, best_stage, level_text

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
    lines += [f"overloaded: {reason}" for reason in stage["overload_reasons"]]
    lines += [f"the client may have limited this: {why}" for why in stage["client"]["limits"]]
    return "\n".join(lines)


def _rate(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def stage_line(stage: Plain) -> str:
    """One line about a stage of a ramp."""
    parts = [
        f"{level_text(stage)}: {stage['throughput_rps']:.2f} requests/s",
        f"{stage['goodput_rps']:.2f} good",
        f"{stage['requests_success']} of {stage['requests_total']} succeeded",
    ]
    for name, title in (("latency", "latency"), ("ttft", "TTFT"), ("itl", "ITL")):
        if spread := stage[name]:
            parts.append(f"{title} p50/p95 {1e3 * spread['p50']:.0f}/{1e3 * spread['p95']:.0f} ms")
    line = ", ".join(parts)
    if stage["overloaded"]:
        line += f"; overloaded: {'; '.join(stage['overload_reasons'])}"
    if stage["client"]["limits"]:
        line += f"; the client may limit: {'; '.join(stage['client']['limits'])}"
    return line


def ramp_end(results: Sequence[Plain]) -> str:
    best = best_stage(results)
    lines = [
        "no stage kept within the limits"
        if best is None
        else f"most within the limits: {stage_line(best)}"
    ]
    if limited := sum(bool(stage["client"]["limits"]) for stage in results):
        lines.append(
            f"the client may have limited {limited} of {len(results)} stages; more --processes, or a machine of its "
            "own, may help"
        )
    return "\n".join(lines)


def summary(results: Sequence[Plain]) -> Plain:
    """What --json prints: the last stage with times in milliseconds, and of a ramp all stages."""
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
