"""DocVQA: questions about scanned documents, by ANLS.

Rows: ``question``, ``answers`` and perhaps ``question_types``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..benchmark import Asking, Benchmark, Case, Hub, Outcome, Score, share
from ..reading import image_file, json_file, objects_of
from ..records import Record
from ..text_metrics import anls

PROMPT = "{question} The answer should be a short text span taken verbatim from the document."


def _cases(record: Record, asking: Asking) -> list[Case]:
    question, answers = record.text("question"), record.texts("answers")
    kinds = record.texts("question_types") if record.values.get("question_types") else [""]
    return [
        Case(
            task=asking.query(question, PROMPT),
            truth=answers,
            question=question,
            expected=" | ".join(dict.fromkeys(answers)),
            group=kinds[0],
        )
    ]


def _score(case: Case, outcome: Outcome | None) -> Score:
    said = "" if outcome is None else str(outcome["answer"])
    return share("ANLS", 0.0 if outcome is None else anls(case.truth, said), said)


def _layout(folder: Path) -> Iterator[dict[str, Any]] | None:
    """``val_v1.0.json`` or ``val_v1.0_withQT.json``, with the images in ``documents``."""
    file = next(iter(sorted(folder.glob("val_v1.0*.json"))), None)
    return None if file is None else _rows(folder, file)


def _rows(folder: Path, file: Path) -> Iterator[dict[str, Any]]:
    for row in objects_of(json_file(file), file, "data"):
        image = image_file(folder, row.get("image"), "", "documents")
        yield {
            "image": str(Path(image).relative_to(folder)),
            "question": row.get("question"),
            "answers": row.get("answers"),
            "question_types": row.get("question_types"),
        }


BENCHMARK = Benchmark(
    name="docvqa",
    title="DocVQA",
    source="https://arxiv.org/abs/2007.00398",
    skills=("query",),
    cases=_cases,
    score=_score,
    hub=Hub("lmms-lab/DocVQA", "validation", "DocVQA"),
    layout=_layout,
)
