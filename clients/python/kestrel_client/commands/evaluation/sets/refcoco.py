"""RefCOCO: the box of the object that an expression means, right if its IoU with the true box is at least 0.5.

Rows: ``answer`` (the expressions) and ``bbox`` (x, y, width, height in pixels); or ``samples``, a list of objects with
``sentences`` and ``bbox``.
"""

from __future__ import annotations

from ..benchmark import Asking, Benchmark, Case, Hub, Outcome, Score
from ..place_metrics import found_boxes, iou, size_of, to_pixels
from ..records import Edges, Record


def _cases(record: Record, asking: Asking) -> list[Case]:
    parts = [record]
    if record.has("samples"):
        parts = [
            Record(record.place, record.number, sample, record.image, record.load)
            for sample in record.rows("samples")
        ]
    group = record.text("split") if record.has("split") else ""
    found = []
    for part in parts:
        box = part.box("bbox")
        for expression in part.texts("answer", "sentences"):
            found.append(_case(expression, box, group, asking))
    return found


def _case(expression: str, box: Edges, group: str, asking: Asking) -> Case:
    return Case(
        task=asking.detect(expression),
        truth=box,
        question=expression,
        expected="its box",
        group=group,
        boxes=[box],
        frame=None,
    )


def _score(case: Case, outcome: Outcome | None) -> Score:
    boxes = [] if outcome is None else found_boxes(outcome)
    best = iou(to_pixels(boxes[0][0], size_of(outcome)), case.truth) if boxes and outcome else 0.0
    right = float(best >= 0.5)
    said = f"{len(boxes)} found, IoU {best:.2f}"
    return Score(best, {"accuracy at IoU 0.5": (right, 1.0), "mean IoU": (best, 1.0)}, said)


BENCHMARK = Benchmark(
    name="refcoco",
    title="RefCOCO",
    source="https://aclanthology.org/D14-1086",
    skills=("detect",),
    cases=_cases,
    score=_score,
    hub=Hub("moondream/refcoco-m", "validation"),
    groups=("val", "testA", "testB", "test"),
)
