"""What a data set is: the questions about its rows, the truths, and the scores of answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kestrel_client import DetectTask, PointTask, QueryTask, SegmentTask, Task

from ..requests.inputs import Source
from .records import Record

if TYPE_CHECKING:
    from .scored import AnsweredCase

Outcome = Mapping[str, Any]
"""A task's result as plain values, as `Result.to_dict` gives it."""
MAX_CASES = 32
"""Tasks of one call, as the server limits them."""


@dataclass(frozen=True, slots=True)
class Asking:
    """The options of the questions."""

    prompt: str | None = None
    """The text of a question, where {question} stands for the row's; None for the row's question alone."""
    reasoning: bool = False
    temperature: float = 0.0
    max_tokens: int | None = None
    min_score: float | None = None
    absent: int = 0
    """Names of absent objects to ask for in each image, in ``coco``."""
    skills: Sequence[str] | None = None
    """Ask only requests of these skills; None: all of the data set."""

    def query(self, question: str) -> QueryTask:
        return QueryTask(
            (self.prompt or "{question}").replace("{question}", question),
            reasoning=self.reasoning,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
        )

    def find(self, skill: str, name: str) -> Task:
        """``skill``: point, detect or segment."""
        task: Task = _TASKS[skill](
            name,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            min_score=self.min_score,
        )
        return task


_TASKS: dict[str, Any] = {"point": PointTask, "detect": DetectTask, "segment": SegmentTask}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One question and its truth."""

    task: Task
    truth: Any
    """What ``Benchmark.score`` compares the answer with."""
    question: str
    """As the report shows it."""
    expected: str
    group: str = ""
    """The part of the data set that it belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """An image and the cases about it, by key. ``load``: returns the image."""

    image: str
    number: int
    load: Callable[[], Source]
    cases: Mapping[str, Case]

    @property
    def identity(self) -> tuple[str, int | None]:
        return self.image, self.number


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one answer.

    ``value``: how good it is, from 0 to 1. ``counts``: by metric, what the answer adds to the part and to the whole.
    The metric of a data set is the sum of the parts over the sum of the wholes.
    """

    value: float
    counts: Mapping[str, tuple[float, float]]
    said: str


def share(metric: str, value: float, said: str) -> Score:
    """A score that is the only count of its case."""
    return Score(value, {metric: (value, 1.0)}, said)


@dataclass(frozen=True, slots=True)
class SetMetrics:
    """Metrics that are no sums over cases, such as average precision. ``values``: by metric, from 0 to 1."""

    values: Mapping[str, float]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A data set. Its module in ``sets/`` makes one."""

    name: str
    title: str
    source: str
    """Where the data set and its metric are defined."""
    skills: tuple[str, ...]
    cases: Callable[[Record, Asking], Sequence[Case]]
    """The cases of a row."""
    score: Callable[[Case, Outcome | None], Score]
    """Scores an answer; None for a request that failed, which has the lowest score."""
    built_in: Path | None = None
    """The folder of rows that it has itself."""
    layout: Callable[[Path], Iterator[dict[str, Any]] | None] | None = None
    """Reads a folder in the set's own layout as rows; ``image`` is the path of a file. None for another layout."""
    whole: Callable[[Sequence[AnsweredCase]], SetMetrics | None] | None = None
    """Metrics of all answers together."""


def items_of(records: Iterator[Record], benchmark: Benchmark, asking: Asking) -> Iterator[Item]:
    """The items of rows. A row with more cases than a call may have becomes several items."""
    number = 0
    for record in records:
        cases = list(benchmark.cases(record, asking))
        for first in range(0, len(cases), MAX_CASES):
            number += 1
            keyed = {str(first + i): c for i, c in enumerate(cases[first : first + MAX_CASES])}
            yield Item(image=record.image, number=number, load=record.load, cases=keyed)
