"""A run's results: a JSON object with the settings, both machines, a list of stages, and the figures to compare.

Times are in seconds unless a name ends in ``_ms``. ``null`` stands for what was not measured.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

from ...version import __version__
from ..files import write_whole
from ..parser import CommandError
from .client_health import ClientHealth
from .comparison import Figures
from .histogram import Histogram
from .sender import Stage
from .tally import TIMES, Tally

Plain: TypeAlias = dict[str, Any]

PERCENTILES = (1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9)
_MOST_BYTES = 64 * 1024 * 1024


def stage_result(stage: Stage, tally: Tally, health: ClientHealth) -> Plain:
    is_open, window_s = stage.loop == "open", stage.window_s
    tokens = tally.input_tokens
    times = tally.ttft if tally.ttft.count else tally.latency
    typical_s = times.percentile(50) if times.count else 0.0
    return {
        "target_rps": stage.level if is_open else None,
        "concurrency_limit": stage.most_in_flight if is_open else round(stage.level),
        "duration_s": window_s,
        "requests_total": tally.total,
        "requests_success": tally.succeeded,
        "requests_good": tally.good,
        "error_rate": tally.failed / tally.total if tally.total else 0.0,
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
        "client": {
            "cpu_share": round(health.cpu_share, 4),
            "loop_lag": _spread(health.lag),
            "lateness": _spread(tally.lateness),
            "limits": health.limits(tally.lateness, typical_s),
        },
        "overloaded": tally.is_overloaded,
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
        "libraries": {"grpcio": metadata.version("grpcio"), "kestrel-client": __version__},
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


def level_text(stage: Plain) -> str:
    """Requests in flight of a closed loop, requests per second of an open one."""
    if stage["target_rps"] is None:
        return f"{stage['concurrency_limit']:g} in flight"
    return f"{stage['target_rps']:g} requests/s"


def write_results(path: str, content: Plain) -> None:
    """Replaces the file at once, so that a run that is interrupted leaves a whole one. Raises CommandError."""
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    write_whole(Path(path), lambda file: file.write_text(text))


def read_figures(path: str) -> Figures:
    """The figures of a file that ``write_results`` wrote. Raises CommandError."""
    try:
        if os.path.getsize(path) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        found = {str(f["name"]): (float(f["value"]), f["at_least"]) for f in content["figures"]}
        for name, (value, at_least) in found.items():
            if not math.isfinite(value) or not isinstance(at_least, bool):
                raise ValueError(f"figure {name!r} has a wrong value")
    except OSError as error:
        raise CommandError(f"cannot read {path!r}: {error.strerror}") from None
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise CommandError(f"{path!r} has no results of bench: {error}") from None
    return found
