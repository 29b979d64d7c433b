"""A run's results: a JSON object with the plan, both machines, and a list of stages. It is read again for reports.

Times are in seconds unless a name ends in ``_ms``. ``null`` stands for what was not measured.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

from ...files import write_whole
from ...parser import CommandError
from ..histogram import Histogram
from ..sending.sender import Stage
from ..tally import TIMES, Tally

Plain: TypeAlias = dict[str, Any]

KIND = "load"
FORMAT = 1
PERCENTILES = (1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9)
_MOST_BYTES = 64 * 1024 * 1024


def stage_result(stage: Stage, tally: Tally, overload: Sequence[str], client: Plain) -> Plain:
    """``overload``: why the stage was overloaded. ``client``: the health of the client."""
    is_open, window_s = stage.loop == "open", stage.window_s
    tokens = tally.input_tokens
    return {
        "target_rps": stage.level if is_open else None,
        "concurrency_limit": stage.most_in_flight if is_open else round(stage.level),
        "duration_s": window_s,
        "requests_total": tally.total,
        "requests_success": tally.succeeded,
        "requests_good": tally.good,
        "error_rate": tally.error_share,
        "errors": dict(tally.errors.most_common()),
        "throughput_rps": tally.ended / window_s,
        "goodput_rps": tally.ended_good / window_s,
        **{name: _spread(getattr(tally, name)) for name in TIMES},
        "tokens": {
            "input_per_s": tokens / window_s,
            "output_per_s": tally.output_tokens / window_s,
            "cached_share": tally.cached_tokens / tokens if tokens else None,
        },
        "skills": {name: _spread(latency) for name, latency in sorted(tally.by_skill.items())},
        "client": {**client, "lateness": _spread(tally.lateness)},
        "overloaded": bool(overload),
        "overload_reasons": list(overload),
    }


def _spread(times: Histogram) -> Plain:
    """Mean, percentiles, longest and count; empty if nothing was measured."""
    if not times.count:
        return {}
    percentiles = zip(PERCENTILES, times.percentiles(PERCENTILES), strict=True)
    spread = {"mean": times.mean, **{f"p{p:g}": seconds for p, seconds in percentiles}}
    rounded = {name: round(s, 6) for name, s in {**spread, "max": times.longest_s}.items()}
    return {**rounded, "count": times.count}


def describe_machine() -> Plain:
    """The machine of the client."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "system": f"{sys.platform} {platform.machine()}",
        "libraries": {name: metadata.version(name) for name in ("grpcio", "kestrel-client")},
    }


def figures(results: Iterable[Plain]) -> list[Plain]:
    """What comparisons compare: each stage's rates and times. ``at_least``: whether more is better."""
    found = []
    for stage in results:
        for name, value, unit in (
            ("requests/s", stage["throughput_rps"], "1/s"),
            ("good requests/s", stage["goodput_rps"], "1/s"),
            ("output tokens/s", stage["tokens"]["output_per_s"], "1/s"),
            ("latency p50", stage["latency"].get("p50"), "s"),
            ("latency p95", stage["latency"].get("p95"), "s"),
            ("TTFT p95", stage["ttft"].get("p95"), "s"),
            ("ITL p95", stage["itl"].get("p95"), "s"),
        ):
            if value is not None:
                named = {"name": f"{level_text(stage)}: {name}", "value": value}
                found.append({**named, "unit": unit, "at_least": unit == "1/s"})
    return found


def level_of(stage: Plain) -> float:
    """Requests in flight of a closed loop, requests per second of an open one."""
    rate = stage["target_rps"]
    return float(stage["concurrency_limit"] if rate is None else rate)


def level_text(stage: Plain) -> str:
    unit = "in flight" if stage["target_rps"] is None else "requests/s"
    return f"{level_of(stage):g} {unit}"


def best_stage(results: Sequence[Plain]) -> Plain | None:
    """The stage with the highest goodput of those that were not overloaded."""
    sound = [stage for stage in results if not stage["overloaded"] and stage["requests_success"]]
    return max(sound, key=lambda stage: float(stage["goodput_rps"]), default=None)


def write_results(path: str, content: Plain) -> None:
    """Replaces the file at once, so that a run that is interrupted leaves a whole one. Raises CommandError."""
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    write_whole(Path(path), lambda file: file.write_text(text))


def read_results(path: str) -> Plain:
    """Reads a file that ``write_results`` wrote. ``label`` defaults to the file's name. Raises CommandError."""
    try:
        if os.path.getsize(path) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        _check(content)
    except OSError as error:
        raise CommandError(f"cannot read {path!r}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{path!r} has no results of bench: {error}") from None
    content["label"] = content.get("label") or Path(path).stem
    return dict(content)


_NUMBER = int | float
_STAGE = {
    "target_rps": _NUMBER | None,
    "concurrency_limit": _NUMBER,
    "requests_total": _NUMBER,
    "requests_success": _NUMBER,
    "error_rate": _NUMBER,
    "errors": dict,
    "throughput_rps": _NUMBER,
    "goodput_rps": _NUMBER,
    **dict.fromkeys(TIMES, dict),
    "tokens": {"input_per_s": _NUMBER, "output_per_s": _NUMBER},
    "skills": dict,
    "client": {"cpu_share": _NUMBER, "limits": list},
    "overloaded": bool,
    "overload_reasons": list,
}
"""The types of the fields of a stage, or the fields of an object."""


def _check(content: Any) -> None:
    """Raises ValueError that names the field."""
    if not isinstance(content, dict) or content.get("benchmark") != KIND:
        raise ValueError(f"its 'benchmark' is not {KIND!r}")
    if content.get("format") != FORMAT:
        raise ValueError(f"its 'format' is {content.get('format')!r}, not {FORMAT}")
    for name in ("settings", "machine", "server"):
        if not isinstance(content.get(name), dict):
            raise ValueError(f"{name!r} is not an object")
    if not isinstance(content.get("results"), list):
        raise ValueError("'results' is not a list")
    for i, stage in enumerate(content["results"]):
        _check_fields(f"results[{i}]", stage, _STAGE)
        for name in TIMES:
            _check_fields(f"results[{i}].{name}", stage[name], dict.fromkeys(stage[name], _NUMBER))


def _check_fields(where: str, value: Any, wanted: Mapping[str, Any]) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not an object")
    for name, kind in wanted.items():
        found = value.get(name)
        is_object = isinstance(kind, dict)
        is_kind = isinstance(found, dict if is_object else kind)
        if not is_kind or (isinstance(found, bool) and kind is not bool):
            raise ValueError(f"{where}.{name} is missing or of another type")
        if isinstance(found, float) and not math.isfinite(found):
            raise ValueError(f"{where}.{name} is not finite")
        if is_object:
            _check_fields(f"{where}.{name}", found, kind)
