"""A run's results: a JSON object with the plan, both machines, and a list of stages. It is read again for reports.

Times are in seconds unless a name ends in ``_ms``. ``null`` stands for what was not measured.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

from ...parser import CommandError
from ..histogram import Histogram
from ..stages import Loop
from ..tally import Tally

Plain: TypeAlias = dict[str, Any]

KIND = "load"
FORMAT = 1
PERCENTILES = (1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9)
_MOST_BYTES = 64 * 1024 * 1024
_TIMES = ("latency", "ttft", "itl", "decode_latency", "processing_latency", "queue_latency")


def stage_result(
    loop: Loop,
    level: float,
    window_s: float,
    tally: Tally,
    *,
    most_in_flight: int,
    overload: Sequence[str],
    client: Plain,
) -> Plain:
    """``overload``: why the stage was overloaded. ``client``: the health of the client."""
    return {
        "target_rps": level if loop == "open" else None,
        "concurrency_limit": most_in_flight if loop == "open" else round(level),
        "duration_s": window_s,
        "requests_total": tally.total,
        "requests_success": tally.succeeded,
        "requests_good": tally.good,
        "error_rate": tally.error_share,
        "errors": dict(tally.errors.most_common()),
        "throughput_rps": tally.ended / window_s,
        "goodput_rps": tally.ended_good / window_s,
        "latency": _spread(tally.latency),
        "ttft": _spread(tally.ttft),
        "itl": _spread(tally.itl),
        "decode_latency": _spread(tally.decode),
        "processing_latency": _spread(tally.processing),
        "queue_latency": _spread(tally.queue),
        "tokens": {
            "input_per_s": tally.input_tokens / window_s,
            "output_per_s": tally.output_tokens / window_s,
            "cached_share": tally.cached_tokens / tally.input_tokens
            if tally.input_tokens
            else None,
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
    percentiles = dict(zip(PERCENTILES, times.percentiles(PERCENTILES), strict=True))
    spread = {"mean": times.mean} | {f"p{p:g}": seconds for p, seconds in percentiles.items()}
    return {
        **{name: round(seconds, 6) for name, seconds in spread.items()},
        "max": round(times.longest_s, 6),
        "count": times.count,
    }


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
        level = level_text(stage)
        for name, value, unit, at_least in (
            ("requests/s", stage["throughput_rps"], "1/s", True),
            ("good requests/s", stage["goodput_rps"], "1/s", True),
            ("output tokens/s", stage["tokens"]["output_per_s"], "1/s", True),
            ("latency p50", stage["latency"].get("p50"), "s", False),
            ("latency p95", stage["latency"].get("p95"), "s", False),
            ("TTFT p95", stage["ttft"].get("p95"), "s", False),
            ("ITL p95", stage["itl"].get("p95"), "s", False),
        ):
            if value is not None:
                name = f"{level}: {name}"
                found.append({"name": name, "value": value, "unit": unit, "at_least": at_least})
    return found


def level_text(stage: Plain) -> str:
    rate = stage["target_rps"]
    return f"{stage['concurrency_limit']} in flight" if rate is None else f"{rate:g} requests/s"


def best_stage(results: Sequence[Plain]) -> Plain | None:
    """The stage with the highest goodput of those that were not overloaded."""
    sound = [stage for stage in results if not stage["overloaded"] and stage["requests_success"]]
    return max(sound, key=lambda stage: float(stage["goodput_rps"]), default=None)


def check_writable(path: str) -> None:
    """Raises CommandError if a file cannot be written there. Before a run, because a run may take hours."""
    folder = Path(path).parent
    if Path(path).is_dir():
        raise CommandError(f"cannot write {path!r}: it is a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CommandError(f"cannot write {path!r}: {error.strerror}") from None


def write_results(path: str, content: Plain) -> None:
    """Replaces the file at once, so that a run that is interrupted leaves a whole one. Raises CommandError."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CommandError(f"cannot write {path!r}: {error.strerror}") from None


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


@dataclass(frozen=True)
class _Field:
    """``kinds``: types of JSON. ``inner``: the fields of an object."""

    kinds: tuple[type, ...]
    inner: Mapping[str, _Field] | None = None


_NUMBER, _OPTIONAL = _Field((int, float)), _Field((int, float, type(None)))
_SPREAD = _Field((dict,), {})
_STAGE: dict[str, _Field] = {
    "target_rps": _OPTIONAL,
    "concurrency_limit": _NUMBER,
    "requests_total": _NUMBER,
    "requests_success": _NUMBER,
    "error_rate": _NUMBER,
    "errors": _Field((dict,)),
    "throughput_rps": _NUMBER,
    "goodput_rps": _NUMBER,
    **dict.fromkeys(_TIMES, _SPREAD),
    "tokens": _Field((dict,), {"input_per_s": _NUMBER, "output_per_s": _NUMBER}),
    "skills": _Field((dict,)),
    "client": _Field((dict,), {"cpu_share": _NUMBER, "limits": _Field((list,))}),
    "overloaded": _Field((bool,)),
    "overload_reasons": _Field((list,)),
}


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


def _check_fields(where: str, value: Any, wanted: Mapping[str, _Field]) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not an object")
    for name, expected in wanted.items():
        found = value.get(name)
        is_truth = isinstance(found, bool) and bool not in expected.kinds
        if is_truth or not isinstance(found, expected.kinds):
            raise ValueError(f"{where}.{name} is missing or of another type")
        if isinstance(found, float) and not math.isfinite(found):
            raise ValueError(f"{where}.{name} is not finite")
        if expected.inner is not None:
            _check_fields(f"{where}.{name}", found, expected.inner)
        if expected is _SPREAD and isinstance(found, dict):
            _check_fields(f"{where}.{name}", found, dict.fromkeys(found, _NUMBER))
