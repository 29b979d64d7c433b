"""POPE: does the image show an object, yes or no, by accuracy, precision, recall and F1 of "yes".

Rows: ``question``, ``answer`` (yes or no) and perhaps ``category`` (random, popular, adversarial).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..benchmark import Asking, Benchmark, Case, Hub, Outcome, Score
from ..reading import image_file, json_lines
from ..records import Record
from ..text_metrics import yes_or_no

PROMPT = "{question}\nAnswer yes or no."
_PARTS = ("random", "popular", "adversarial")


def _cases(record: Record, asking: Asking) -> list[Case]:
    question, answer = record.text("question"), record.text("answer").strip().lower()
    if answer not in ("yes", "no"):
        record.refuse("answer", answer, "yes or no")
    return [
        Case(
            task=asking.query(question, PROMPT),
            truth=answer,
            question=question,
            expected=answer,
            group=record.text("category") if record.has("category") else "",
        )
    ]


def _score(case: Case, outcome: Outcome | None) -> Score:
    said = "" if outcome is None else str(outcome["answer"])
    found = yes_or_no(said)
    right = float(found == case.truth)
    is_yes, says_yes = case.truth == "yes", found == "yes"
    hit = float(is_yes and says_yes)
    counts = {
        "accuracy": (right, 1.0),
        "F1": (2 * hit, float(is_yes) + float(says_yes)),
        "precision": (hit, float(says_yes)),
        "recall": (hit, float(is_yes)),
        "share of yes": (float(says_yes), 1.0),
    }
    return Score(right, counts, said)


def _layout(folder: Path) -> Iterator[dict[str, Any]] | None:
    """``coco_pope_random.json`` and the two others, with the images of COCO in ``val2014``."""
    files = {part: folder / f"coco_pope_{part}.json" for part in _PARTS}
    found = {part: file for part, file in files.items() if file.is_file()}
    return _rows(folder, found) if found else None


def _rows(folder: Path, files: dict[str, Path]) -> Iterator[dict[str, Any]]:
    for part, file in files.items():
        for row in json_lines(file):
            image = image_file(folder, row.get("image"), "val2014")
            yield {
                "image": str(Path(image).relative_to(folder)),
                "question": row.get("text"),
                "answer": row.get("label"),
                "category": part,
            }


BENCHMARK = Benchmark(
    name="pope",
    title="POPE",
    source="https://arxiv.org/abs/2305.10355",
    skills=("query",),
    cases=_cases,
    score=_score,
    hub=Hub("lmms-lab/POPE", "test"),
    layout=_layout,
    groups=_PARTS,
)
