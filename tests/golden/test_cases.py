"""Every golden case of both models in float32, through the runtime: logits, hidden states, ids, bins, values, text."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kestrel_engine.requests import Coord, Size
from kestrel_engine.skills.answer import AnswerState
from kestrel_engine.skills.base import SkillState
from kestrel_engine.skills.locate import LocateState
from kestrel_engine.skills.query import ReasoningState
from kestrel_engine.skills.segment import SegmentState
from kestrel_engine.step import StepToken
from tests.golden.driver import Feed, Job, pages_for, run_jobs
from tests.golden.goldens import Golden, case_ids

pytestmark = pytest.mark.golden
CASES = pytest.mark.parametrize(("model", "case_id"), case_ids())


def new_state(golden: Golden, case: dict[str, Any]) -> tuple[SkillState, int]:
    """The skill's state machine for a case, and the most tokens it may sample."""
    context, most = golden.context, case.get("max_tokens", 0)
    match case["skill"]:
        case "query_reasoning":
            return ReasoningState(most, most, context), 2 * most + 1
        case "point" | "detect" as skill:
            boxes, objects = skill == "detect", case["max_objects"]
            state = LocateState(skill, boxes=boxes, max_objects=objects, model=context.model)
            return state, 3 * objects
        case "segment":
            return SegmentState(case["object"], context), most
        case _:
            return AnswerState("answer", context), most


def case_of(goldens: Callable[[str], Golden], model: str, case_id: str) -> tuple[Golden, Any, Feed]:
    golden = goldens(model)
    case = golden.case(case_id)
    feed = Feed(golden.runtime, pages_for(golden.runtime, 900, seed=7))
    return golden, case, feed


@CASES
def test_prefill(goldens, model, case_id):
    golden, case, feed = case_of(goldens, model, case_id)
    prompt = golden.prompt(case)
    hidden = feed(*prompt)
    golden.check("hidden", hidden, f"{case_id}.prefill_hidden")
    logits = golden.runtime.model.text.logits(hidden[None])[0]
    golden.check("logits", logits, f"{case_id}.prefill_logits")
    region = golden.runtime.model.region
    coords = [token.value for token in prompt if isinstance(token, Coord)]
    sizes = [(token.width, token.height) for token in prompt if isinstance(token, Size)]
    if coords:
        embedded = region.embed_coords(torch.tensor(coords))
        golden.check("ref_embeds", embedded, f"{case_id}.ref_coord_embeds")
    if sizes:
        embedded = region.embed_sizes(torch.tensor(sizes))
        golden.check("ref_embeds", embedded, f"{case_id}.ref_size_embeds")


@pytest.mark.parametrize(
    ("model", "case_id"),
    [(m, c) for m, c in case_ids() if c.startswith(("point", "detect"))],
)
def test_region_logits_of_the_first_object(goldens, model, case_id):
    golden, case, feed = case_of(goldens, model, case_id)
    text, region = golden.runtime.model.text, golden.runtime.model.region
    hidden = feed(*golden.prompt(case))[None]
    x = region.coord_logits(hidden)[0]
    golden.check("region_logits", x, f"{case_id}.first.x_logits")
    assert int(x.argmax()) == case["bins"][0][0]
    hidden = feed(Coord(case["bins"][0][0] / 1024))[None]
    golden.check("hidden", hidden[0], f"{case_id}.first.y_hidden")
    y = region.coord_logits(hidden)[0]
    golden.check("region_logits", y, f"{case_id}.first.y_logits")
    assert int(y.argmax()) == case["bins"][0][1]
    hidden = feed(Coord(case["bins"][0][1] / 1024))[None]
    if case["skill"] == "detect":
        golden.check("hidden", hidden[0], f"{case_id}.first.size_hidden")
        sizes = region.size_logits(hidden)[0]
        golden.check("region_logits", sizes, f"{case_id}.first.size_logits")
        bins = sizes.argmax(dim=-1).tolist()
        assert bins == case["bins"][0][2:]
        hidden = feed(Size(*(2 ** (10 * b / 1023 - 10) for b in bins)))[None]
    golden.check("logits", text.logits(hidden)[0], f"{case_id}.first.next_logits")


def test_decode_logits_teacher_forced(golden: Golden):
    checked = set()
    for key in golden.arrays:
        case_id, _, what = key.rpartition(".")
        if what != "decode_logits":
            continue
        case = golden.case(case_id)
        feed = Feed(golden.runtime, pages_for(golden.runtime, 900, seed=3))
        feed(*golden.prompt(case))
        fed = fed_tokens(case)
        check_decode(golden, feed, fed, key)
        if case["skill"] == "query_reasoning":
            feed(*fed[len(golden.arrays[key]) :])
            hidden = feed(*case["answer_prompt_ids"])
            logits = golden.runtime.model.text.logits(hidden[None])[0]
            golden.check("logits", logits, f"{case_id}.answer_prefill_logits")
            check_decode(golden, feed, case["answer"]["ids"], f"{case_id}.answer_decode_logits")
        checked.add(case["skill"])
    assert checked == {c["skill"] for c in golden.expected["cases"]} - {"point", "detect"}


def fed_tokens(case: dict[str, Any]) -> list[Any]:
    """What a text or segment case feeds after its prompt, values in place of ids where a region head was read."""
    if case["skill"] == "segment":
        kinds = {"text": int, "coord": Coord, "size": lambda value: Size(*value)}
        return [
            kinds[t["type"]](t["id"] if t["type"] == "text" else t["value"]) for t in case["tokens"]
        ]
    if case["skill"] == "query_reasoning":
        pairs = zip(case["reasoning_ids"], case["reasoning_coord_values"], strict=True)
        return [token if value is None else Coord(value) for token, value in pairs]
    return list(case["ids"])


def check_decode(golden: Golden, feed: Feed, tokens: list[Any], key: str) -> None:
    steps = len(golden.arrays[key])
    hidden = torch.stack([feed(token) for token in tokens[:steps]])
    golden.check("logits", golden.runtime.model.text.logits(hidden), key)


@CASES
def test_generation(goldens, model, case_id):
    golden, case, _ = case_of(goldens, model, case_id)
    state, most = new_state(golden, case)
    job = Job(golden.prompt(case), state, most)
    run_jobs(golden.runtime, [job])
    check_job(golden, case, job)


def check_job(golden: Golden, case: dict[str, Any], job: Job) -> None:
    """Ids, stops, bins, values and text of a finished job, exactly as stored."""
    reasons = {"eos": "stop", "max_tokens": "length", "max_objects": "length"}
    ending = case["answer"] if case["skill"] == "query_reasoning" else case
    assert job.finish == reasons[ending["stop"]]
    output = job.state.output()
    match case["skill"]:
        case "point" | "detect" as skill:
            assert len(output[skill]) == len(case["objects"])
            for found, expected in zip(output[skill], case["objects"], strict=True):
                assert found == pytest.approx(expected, abs=1e-6)
            assert bins_of(job) == [b for object_bins in case["bins"] for b in object_bins]
        case "segment":
            assert job.state.token_ids == tuple(t["id"] for t in case["tokens"])
            assert bins_of(job) == [
                b
                for t in case["tokens"]
                for b in ([t["bin"]] if t["type"] == "coord" else t.get("bins", []))
            ]
            values = [value_of(token) for token in job.tokens[: len(case["tokens"])]]
            for value, token in zip(values, case["tokens"], strict=True):
                assert value == pytest.approx(token.get("value"), abs=1e-6)
        case "query_reasoning":
            answer_ids = case["answer"]["ids"]
            assert job.state.token_ids == (*case["reasoning_ids"], *answer_ids)
            assert output["answer"] == case["answer"]["text"]
            values = [value_of(token) for token in job.tokens[: len(case["reasoning_ids"])]]
            assert values == case["reasoning_coord_values"]
        case _:
            assert job.state.token_ids == tuple(case["ids"])
            assert output["answer"] == case["text"]


def value_of(token: StepToken) -> float | list[float] | None:
    if isinstance(token.value, Size):
        return [token.value.width, token.value.height]
    return None if token.value is None else token.value.value


def bins_of(job: Job) -> list[int]:
    """The bins behind all values that a job read."""
    bins: list[int] = []
    for token in job.tokens:
        if isinstance(token.value, Coord):
            bins.append(round(token.value.value * 1024))
        elif isinstance(token.value, Size):
            sides = (token.value.width, token.value.height)
            bins += [round((math.log2(side) + 10) / 10 * 1023) for side in sides]
    return bins


def test_cases_of_all_skills_in_one_batch_give_what_each_gives_alone(golden: Golden):
    """Cases join one another step by step, with scattered pages; each must still give exactly what is stored."""
    cases = golden.expected["cases"]
    # A stride through the list mixes the skills within a batch; 11 is coprime to both models' 25 and 29 cases.
    order = [cases[i * 11 % len(cases)] for i in range(len(cases))]
    for begin in range(0, len(order), 6):
        batch = order[begin : begin + 6]
        jobs = [Job(golden.prompt(case), *new_state(golden, case)) for case in batch]
        run_jobs(golden.runtime, jobs, starts_per_step=2)
        for case, job in zip(batch, jobs, strict=True):
            check_job(golden, case, job)
