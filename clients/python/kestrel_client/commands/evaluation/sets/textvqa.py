"""TextVQA: questions about text in photographs, by VQA accuracy.

Rows: ``question`` and ``answers``, the answers of ten people.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..benchmark import Asking, Benchmark, Case, Hub, Outcome, Score, share
from ..reading import image_file, json_file, objects_of
from ..records import Record
from ..text_metrics import vqa_accuracy

PROMPT = (
    "Read the text in the image and provide a brief lowercase answer. Respond 'unanswerable' only if there is no "
    "plausible answer. {question}"
)


def _cases(record: Record, asking: Asking) -> list[Case]:
    question, answers = record.text("question"), record.texts("answers")
    usual = Counter(answers).most_common(1)[0][0]
    return [
        Case(task=asking.query(question, PROMPT), truth=answers, question=question, expected=usual)
    ]


def _score(case: Case, outcome: Outcome | None) -> Score:
    said = "" if outcome is None else str(outcome["answer"])
    return share("VQA accuracy", 0.0 if outcome is None else vqa_accuracy(case.truth, said), said)


def _layout(folder: Path) -> Iterator[dict[str, Any]] | None:
    """``TextVQA_0.5.1_val.json``, with the images in ``train_images``."""
    file = next(iter(sorted(folder.glob("TextVQA_*_val.json"))), None)
    return None if file is None else _rows(folder, file)


def _rows(folder: Path, file: Path) -> Iterator[dict[str, Any]]:
    for row in objects_of(json_file(file), file, "data"):
        image = image_file(folder, f"{row.get('image_id')}.jpg", "train_images", "val_images")
        yield {
            "image": str(Path(image).relative_to(folder)),
            "question": row.get("question"),
            "answers": row.get("answers"),
        }


BENCHMARK = Benchmark(
    name="textvqa",
    title="TextVQA",
    source="https://arxiv.org/abs/1904.08920",
    skills=("query",),
    cases=_cases,
    score=_score,
    hub=Hub("lmms-lab/textvqa", "validation"),
    layout=_layout,
)
