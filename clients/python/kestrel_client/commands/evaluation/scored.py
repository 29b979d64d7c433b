"""Joins the answers of a run with the truths, and keeps the scores in a file that comparisons read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..files import json_lines, json_text
from ..parser import CommandError
from .benchmark import Benchmark, Case, Item, Outcome

Key = tuple[str, int, str]
"""Image, row and case: what distinguishes a case from all others of its data set."""


@dataclass(frozen=True, slots=True)
class ScoredCase:
    """The score of one case, as plain values."""

    image: str
    row: int
    case: str
    group: str
    question: str
    expected: str
    said: str
    value: float
    counts: Mapping[str, tuple[float, float]]
    """By metric, what the case adds to the part and to the whole."""
    error: str | None
    """Why there is no answer."""

    @property
    def key(self) -> Key:
        return self.image, self.row, self.case


@dataclass(frozen=True, slots=True)
class AnsweredCase:
    """A case with its answer and score."""

    item: Item
    case: Case
    outcome: Outcome | None
    scored: ScoredCase


def score_lines(
    lines: Iterable[Mapping[str, Any]], items: Mapping[Any, Item], benchmark: Benchmark
) -> Iterator[AnsweredCase]:
    """Scores the results of a journal. ``items``: by identity; results of other items are left out. Raises CommandError
    if a result is of another question."""
    for line in lines:
        item = items.get((line["image"], line.get("row")))
        if item is None:
            continue
        for key, case in item.cases.items():
            outcome, error = _outcome(line, key)
            if outcome is not None and not _answers(outcome, case):
                raise CommandError(
                    f"{item.image!r}, row {item.number}: the result answers another question than {case.question!r}; "
                    "the data has changed, so start over with --fresh"
                )
            score = benchmark.score(case, outcome)
            scored = ScoredCase(
                item.image,
                item.number,
                key,
                case.group,
                case.question,
                case.expected,
                score.said,
                score.value,
                score.counts,
                error,
            )
            yield AnsweredCase(item, case, outcome, scored)


def write_scores(scored: Iterable[ScoredCase], file: Path) -> None:
    """Raises OSError."""
    with file.open("w", encoding="utf-8") as opened:
        for each in scored:
            opened.write(f"{json_text(asdict(each))}\n")


def read_scores(file: Path) -> list[ScoredCase]:
    """Raises CommandError."""
    if not file.exists():
        raise CommandError(
            f"{str(file.parent)!r} has no scores; 'eval SET --output {file.parent}' makes them"
        )
    try:
        return [ScoredCase(**line) for line in json_lines(file)]
    except TypeError:
        raise CommandError(f"{str(file)!r} is not a file of scores") from None


def _outcome(line: Mapping[str, Any], key: str) -> tuple[Outcome | None, str | None]:
    """A case's result, or the text of its error."""
    result = line if "error" in line else line["tasks"].get(key, {"error": _NO_RESULT})
    if "error" not in result:
        return result, None
    error = result["error"]
    return None, f"{error['message']} [{error['code']}]"


def _answers(outcome: Outcome, case: Case) -> bool:
    """Whether a result is of the case's question or object. Results of captions do not tell."""
    return all(
        outcome.get(name, value) == value
        for name in ("question", "object")
        if (value := getattr(case.task, name, None)) is not None
    )


_NO_RESULT = {"message": "the server gave no result", "code": "UNKNOWN"}
