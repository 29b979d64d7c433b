"""ChartQA: questions about charts, by relaxed accuracy.

Rows: ``query``, ``label`` and perhaps ``human_or_machine`` (0: asked by people).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..benchmark import Asking, Benchmark, Case, Hub, Outcome, Score, share
from ..reading import image_file, json_file, objects_of
from ..records import Record

PROMPT = (
    "Analyze the chart carefully, consider both visual features and data values, and provide a precise answer "
    "without any additional explanation or formatting. {question}"
)
_ASKERS: dict[Any, str] = {0: "human", 1: "augmented", "human": "human", "augmented": "augmented"}
_PARTS = {"human": "test_human.json", "augmented": "test_augmented.json"}


def _cases(record: Record, asking: Asking) -> list[Case]:
    question, answer = record.text("query", "question"), record.texts("label", "answer")[0]
    asker = record.values.get("human_or_machine")
    return [
        Case(
            task=asking.query(question, PROMPT),
            truth=answer,
            question=question,
            expected=answer,
            group=_ASKERS.get(asker, "") if isinstance(asker, (int, str)) else "",
        )
    ]


def _score(case: Case, outcome: Outcome | None) -> Score:
    said = "" if outcome is None else str(outcome["answer"])
    right = outcome is not None and relaxed_correct(case.truth, said)
    return share("relaxed accuracy", float(right), said)


def relaxed_correct(expected: str, said: str, tolerance: float = 0.05) -> bool:
    """ChartQA's relaxed accuracy: numbers may be off by 5 %, other answers must be equal but for case.

    https://arxiv.org/abs/2203.10244, section 5.1. A percentage is its value over 100.
    """
    truth, answer = expected.strip().lower(), said.strip().lower()
    wanted, given = _number(truth), _number(answer)
    if wanted and given is not None:  # Nothing is within 5 % of 0 but 0, which is equal as a text.
        return abs(given - wanted) / abs(wanted) <= tolerance
    return truth == answer


def _number(text: str) -> float | None:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _layout(folder: Path) -> Iterator[dict[str, Any]] | None:
    """``test/test_human.json`` and ``test/test_augmented.json``, with the images in ``test/png``."""
    base = next((f for f in (folder / "test", folder) if (f / _PARTS["human"]).is_file()), None)
    return None if base is None else _rows(base)


def _rows(base: Path) -> Iterator[dict[str, Any]]:
    for part, name in _PARTS.items():
        file = base / name
        for row in objects_of(json_file(file), file) if file.is_file() else ():
            image = Path(image_file(base, row.get("imgname"), "png"))
            yield {
                "image": str(image.relative_to(base.parent if base.name == "test" else base)),
                "query": row.get("query"),
                "label": row.get("label"),
                "human_or_machine": part,
            }


BENCHMARK = Benchmark(
    name="chartqa",
    title="ChartQA",
    source="https://arxiv.org/abs/2203.10244",
    skills=("query",),
    cases=_cases,
    score=_score,
    hub=Hub("HuggingFaceM4/ChartQA", "test"),
    layout=_layout,
    groups=("human", "augmented"),
)
