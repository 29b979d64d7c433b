"""ChartQA: questions about charts, by relaxed accuracy.

Rows: ``query``, ``label`` and perhaps ``human_or_machine`` (0: asked by people).
"""

from __future__ import annotations

import math
from typing import Any

from ..benchmark import Asking, Benchmark, Case, Hub, Outcome, Score, share
from ..records import Record

PROMPT = (
    "Analyze the chart carefully, consider both visual features and data values, and provide a precise answer "
    "without any additional explanation or formatting. {question}"
)
_ASKERS: dict[Any, str] = {0: "human", 1: "augmented", "human": "human", "augmented": "augmented"}


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
    wanted, number = _number(truth), _number(answer)
    if wanted and number is not None:  # Nothing is within 5 % of 0 but 0, which is equal as a text.
        return abs(number - wanted) / abs(wanted) <= tolerance
    return truth == answer


def _number(text: str) -> float | None:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


BENCHMARK = Benchmark(
    name="chartqa",
    title="ChartQA",
    source="https://arxiv.org/abs/2203.10244",
    skills=("query",),
    cases=_cases,
    score=_score,
    hub=Hub("HuggingFaceM4/ChartQA", "test"),
    groups=("human", "augmented"),
)
