"""ScreenSpot: where to click in a screenshot, right if the point is in the element's box.

Rows: ``instruction``, ``bbox`` (left, upper, right, lower edge as fractions; or x, y, width, height in pixels in
``bbox_pixels``), and perhaps ``data_source`` and ``data_type``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..benchmark import Asking, Benchmark, Case, Hub, Outcome, Score, share
from ..place_metrics import inside, size_of
from ..reading import image_file, json_file, objects_of
from ..records import Edges, Record

_PLATFORMS = ("mobile", "desktop", "web")
_PLATFORM_OF = {
    **dict.fromkeys(("ios", "android"), "mobile"),
    **dict.fromkeys(("windows", "macos"), "desktop"),
    **dict.fromkeys(("gitlab", "shop", "forum", "tool"), "web"),
}


def _cases(record: Record, asking: Asking) -> list[Case]:
    instruction = record.text("instruction")
    pixels = record.has("bbox_pixels")
    box = record.box("bbox_pixels") if pixels else _fractions(record)
    source = str(record.values.get("data_source") or "")
    kind = str(record.values.get("data_type") or "")
    return [
        Case(
            task=asking.point(instruction),
            truth=(box, pixels),
            question=instruction,
            expected="a click in the box",
            group=" ".join(filter(None, (_PLATFORM_OF.get(source, source), kind))),
            boxes=[box],
            frame=None if pixels else (1.0, 1.0),
        )
    ]


def _fractions(record: Record) -> Edges:
    left, top, right, bottom = record.numbers("bbox", 4)
    if left > right or top > bottom:
        record.refuse("bbox", record.value("bbox"), "left, upper, right and lower edge")
    return left, top, right, bottom


def _score(case: Case, outcome: Outcome | None) -> Score:
    points = [] if outcome is None else list(outcome.get("points", ()))
    if outcome is None or not points:
        return share("click accuracy", 0.0, "no point")
    best = max(points, key=lambda point: point.get("score", 1.0))
    box, pixels = case.truth
    across, down = size_of(outcome) if pixels else (1, 1)
    right = inside(best["x"] * across, best["y"] * down, box)
    return share("click accuracy", float(right), f"{best['x']:.3f}, {best['y']:.3f}")


def _layout(folder: Path) -> Iterator[dict[str, Any]] | None:
    """``screenspot_mobile.json`` and the two others, with the images in ``screenspot_imgs``."""
    files = {part: folder / f"screenspot_{part}.json" for part in _PLATFORMS}
    found = {part: file for part, file in files.items() if file.is_file()}
    return _rows(folder, found) if found else None


def _rows(folder: Path, files: dict[str, Path]) -> Iterator[dict[str, Any]]:
    for part, file in files.items():
        for row in objects_of(json_file(file), file):
            image = image_file(folder, row.get("img_filename"), "screenspot_imgs")
            yield {
                "image": str(Path(image).relative_to(folder)),
                "instruction": row.get("instruction"),
                "bbox_pixels": row.get("bbox"),
                "data_source": part,
                "data_type": row.get("data_type"),
            }


BENCHMARK = Benchmark(
    name="screenspot",
    title="ScreenSpot",
    source="https://arxiv.org/abs/2401.10935",
    skills=("point",),
    cases=_cases,
    score=_score,
    hub=Hub("rootsautomation/ScreenSpot", "test"),
    layout=_layout,
    groups=tuple(f"{part} {kind}" for part in _PLATFORMS for kind in ("text", "icon")),
)
