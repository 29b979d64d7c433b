"""Every golden case of both models in float32, through the runtime: logits, hidden states, ids, bins, values, text."""

from collections.abc import Callable

import pytest

from tests.golden.checks import (
    BLOCK_CASES,
    check_blocks,
    check_case,
    check_job,
    check_tops,
    new_job,
)
from tests.golden.driver import run_jobs
from tests.golden.goldens import Golden, case_ids

pytestmark = pytest.mark.golden
Goldens = Callable[[str], Golden]
ALL = pytest.mark.parametrize(("model", "case_id"), case_ids())
LOCATE = ("point", "detect")
FIRST = {"md2": (".0",), "md3": (".0", ".1")}
MANY = pytest.mark.parametrize(
    ("model", "case_id"),
    [
        pytest.param(model, case, marks=[pytest.mark.slow] if repeats else [])
        for model, case in case_ids()
        for repeats in (not case.startswith(LOCATE) and not case.endswith(FIRST[model]),)
    ],
)
"""All; in ``make test``, of each skill that writes text the first case of the older model and two of the newer one."""


@MANY
def test_the_prompt_and_what_follows(goldens: Goldens, model: str, case_id: str) -> None:
    check_case(goldens(model), goldens(model).case(case_id))


@pytest.mark.parametrize("model", ["md2", "md3"])
def test_steps_of_one_case_a_skill_are_stored(goldens: Goldens, model: str) -> None:
    expected = goldens(model).expected["cases"]
    kept = {c["skill"] for c in expected if f"{c['id']}.decode_logits" in goldens(model).arrays}
    assert kept == {case["skill"] for case in expected} - {*LOCATE}


def test_the_likeliest_ids_of_texts(golden: Golden) -> None:
    skills = ("query", "caption")
    kept = [
        case
        for case in golden.expected["cases"]
        if case["skill"] in skills and f"{case['id']}.decode_logits" in golden.arrays
    ]
    assert {case["skill"] for case in kept} == set(skills)
    for case in kept:
        check_tops(golden, case)


@pytest.mark.parametrize("case_id", BLOCK_CASES)
def test_blocks(golden: Golden, case_id: str) -> None:
    check_blocks(golden, golden.case(case_id))


@pytest.mark.slow
@ALL
def test_generation(goldens: Goldens, model: str, case_id: str) -> None:
    case = goldens(model).case(case_id)
    job = new_job(goldens(model), case)
    run_jobs(goldens(model).runtime, [job])
    check_job(case, job)
