"""ScreenSpot: where to click in a screenshot, right if the point is in the element's box.

Rows: ``instruction``, ``bbox`` (left, upper, right, lower edge as fractions), and perhaps ``data_source`` and
``data_type``.
"""

from __future__ import annotations

from ..benchmark import Asking, Benchmark, Case, Hub, Outcome, Score, share
from ..place_metrics import inside
from ..records import Edges, Record

_PLATFORMS = ("mobile", "desktop", "web")
_PLATFORM_OF = {
    **dict.fromkeys(("ios", "android"), "mobile"),
    **dict.fromkeys(("windows", "macos"), "desktop"),
    **dict.fromkeys(("gitlab", "shop", "forum", "tool"), "web"),
}


def _cases(record: Record, asking: Asking) -> list[Case]:
    instruction, box = record.text("instruction"), _box(record)
    source = str(record.values.get("data_source") or "")
    kind = str(record.values.get("data_type") or "")
    return [
        Case(
            task=asking.point(instruction),
            truth=box,
            question=instruction,
            expected="a click in the box",
            group=" ".join(filter(None, (_PLATFORM_OF.get(source, source), kind))),
            boxes=[box],
        )
    ]


def _box(record: Record) -> Edges:
    left, top, right, bottom = record.numbers("bbox", 4)
    if left > right or top > bottom:
        record.refuse("bbox", record.value("bbox"), "left, upper, right and lower edge")
    return left, top, right, bottom


def _score(case: Case, outcome: Outcome | None) -> Score:
    points = [] if outcome is None else list(outcome.get("points", ()))
    if outcome is None or not points:
        return share("click accuracy", 0.0, "no point")
    best = max(points, key=lambda point: point.get("score", 1.0))
    right = inside(best["x"], best["y"], case.truth)
    return share("click accuracy", float(right), f"{best['x']:.3f}, {best['y']:.3f}")


BENCHMARK = Benchmark(
    name="screenspot",
    title="ScreenSpot",
    source="https://arxiv.org/abs/2401.10935",
    skills=("point",),
    cases=_cases,
    score=_score,
    hub=Hub("rootsautomation/ScreenSpot", "test"),
    groups=tuple(f"{part} {kind}" for part in _PLATFORMS for kind in ("text", "icon")),
)
