"""Runs the questions of a trace against a Target, with several callers at once, and summarises the answers."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..reports.report import Row, median, quantile
from .callers import Answer, Target
from .chart_trace import ChartTrace

PROGRESS_S = 5.0
"""Seconds between the lines that report the progress of a run."""


@dataclass(frozen=True)
class Exchange:
    """An answered question. Times are those of the monotonic clock, which all processes of a machine share."""

    is_repeat: bool
    began: float
    ended: float
    answer: Answer


@dataclass(frozen=True)
class RunPlan:
    """A run of ``in_flight`` callers, which send the next question after each answer, for at most ``limit_s`` seconds.
    Each caller asks at least one question.

    ``namespace``: separates the run from the caches of other runs.
    """

    in_flight: int
    tokens: int
    limit_s: float = 600.0
    namespace: str = ""


async def run_trace(
    target: Target, trace: ChartTrace, plan: RunPlan, numbers: Sequence[int] | None = None
) -> list[Exchange]:
    """Sends the questions ``numbers`` (default: all) in order. Raises the first error of a call."""
    waiting = iter(range(len(trace.questions)) if numbers is None else numbers)
    total = len(trace.questions) if numbers is None else len(numbers)
    asked: list[Exchange] = []
    began = reported_at = time.monotonic()

    async def caller() -> None:
        nonlocal reported_at
        for asked_before, number in enumerate(waiting):
            question, start = trace.questions[number], time.monotonic()
            if asked_before and start - began > plan.limit_s:
                return
            answer = await target.forced_query(
                trace.images[question.image], question.text, plan.tokens
            )
            now = time.monotonic()
            asked.append(Exchange(question.is_repeat, start, now, answer))
            if now - reported_at > PROGRESS_S:
                reported_at = now
                rate = len(asked) / (now - began)
                print(f"  {len(asked)} of {total} answered, {rate:.1f} a second", flush=True)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(plan.in_flight, total)):
                group.create_task(caller())
    except ExceptionGroup as several:
        raise several.exceptions[0] from several
    return asked


def span(asked: Sequence[Exchange]) -> tuple[float, float]:
    """Returns the times of the first question and of the last answer."""
    return min(a.began for a in asked), max(a.ended for a in asked)


def summary(asked: Sequence[Exchange]) -> Row:
    """Returns the rates of the whole run, and times in ms."""
    begin, end = span(asked)
    seconds = end - begin
    answers = [a.answer for a in asked]
    took = [1e3 * a.answer.seconds for a in asked]
    ttft = [a.ttft_ms for a in answers]
    gaps = [1e3 * gap for a in answers for gap in a.gaps_s]
    return {
        "requests": len(asked),
        "requests/s": len(asked) / seconds,
        "tokens/s": sum(a.output_tokens for a in answers) / seconds,
        "p50": median(took),
        "p95": quantile(took, 0.95),
        "p99": quantile(took, 0.99),
        "ttft p50": median(ttft),
        "ttft p95": quantile(ttft, 0.95),
        "itl p50": median(gaps),
        "itl p95": quantile(gaps, 0.95),
        "itl p99": quantile(gaps, 0.99),
        "hit rate": sum(a.cached_tokens for a in answers) / sum(a.input_tokens for a in answers),
    }


def busy_rate(asked: Sequence[Exchange], in_flight: int) -> float:
    """Returns the requests/s between the first ``in_flight`` answers and the last ones; nan if there are fewer than
    three times as many.

    In a closed loop, all callers wait for an answer in that time. At the end of a run they leave one after the other,
    and the servers that end first have nothing to do.
    """
    ends = sorted(a.ended for a in asked)
    if len(ends) < 3 * in_flight:
        return math.nan
    inner = ends[in_flight - 1 : -in_flight]
    return (len(inner) - 1) / (inner[-1] - inner[0])


def parts(asked: Sequence[Exchange]) -> dict[str, list[Exchange]]:
    """Returns the answers about new images and those about repeated images."""
    return {
        "uncached": [a for a in asked if not a.is_repeat],
        "repeats": [a for a in asked if a.is_repeat],
    }


def part_summary(asked: Sequence[Exchange]) -> Row:
    """Returns times in ms; nan without answers."""
    took = [1e3 * a.answer.seconds for a in asked]
    ttft = [a.answer.ttft_ms for a in asked]
    return {
        "requests": len(asked),
        "p50": median(took),
        "p95": quantile(took, 0.95),
        "p99": quantile(took, 0.99),
        "ttft p50": median(ttft),
        "ttft p95": quantile(ttft, 0.95),
    }


@dataclass(frozen=True)
class Steady:
    """Tokens a second while all streams decoded; ``begin`` and ``end`` are instants of the monotonic clock."""

    tokens_s: float
    begin: float
    end: float


def steady(answers: Sequence[Answer]) -> Steady:
    """Returns the rate of concurrent streams, from the last stream's first token to the first stream's last token."""
    begin = max(a.seen[0][0] for a in answers)
    end = min(a.seen[-1][0] for a in answers)
    assert begin < end, "the streams never decoded all at the same time: longer answers are needed"
    gained = sum(_tokens_at(a, end) - _tokens_at(a, begin) for a in answers)
    return Steady(gained / (end - begin), begin, end)


def _tokens_at(answer: Answer, instant: float) -> float:
    """Interpolates the number of tokens between two updates."""
    before_at, before = answer.seen[0]
    for at, count in answer.seen:
        if at >= instant:
            spent = (instant - before_at) / (at - before_at) if at > before_at else 1.0
            return before + (count - before) * spent
        before_at, before = at, count
    return float(before)
