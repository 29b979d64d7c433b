"""CountBenchQA: how many objects there are, by exact count.

Rows: ``question`` and ``number``.
"""

from __future__ import annotations

from ..benchmark import Asking, Benchmark, Case, Hub, Outcome, Score
from ..records import Record
from ..text_metrics import stated_count

PROMPT = (
    "Look at the image carefully and count the objects. Answer with just a number, without any additional text. "
    "{question}"
)


def _cases(record: Record, asking: Asking) -> list[Case]:
    question, count = record.text("question"), record.integer("number")
    return [
        Case(
            task=asking.query(question, PROMPT),
            truth=count,
            question=question,
            expected=str(count),
            group=f"answer {count:2}",
        )
    ]


def _score(case: Case, outcome: Outcome | None) -> Score:
    said = "" if outcome is None else str(outcome["answer"])
    count = stated_count(said)
    exact = float(count == case.truth)
    near = float(count is not None and abs(count - case.truth) <= 1)
    return Score(exact, {"exact count": (exact, 1.0), "off by at most one": (near, 1.0)}, said)


BENCHMARK = Benchmark(
    name="countbench",
    title="CountBenchQA",
    source="https://arxiv.org/abs/2302.12066",
    skills=("query",),
    cases=_cases,
    score=_score,
    hub=Hub("vikhyatk/CountBenchQA", "test"),
)
