"""Lessons have the prompts of the skills, and a target for each token that the model must produce."""

import pytest

from kestrel_engine import InvalidRequest
from kestrel_engine.skills.base import SkillContext
from kestrel_engine.skills.registry import SkillRegistry
from kestrel_engine.teaching.data.examples import (
    BoxExample,
    CaptionExample,
    PointExample,
    QuestionExample,
)
from kestrel_engine.teaching.data.lessons import EndTarget, write
from kestrel_engine.types.model_config import parse_model_config
from kestrel_engine.types.requests import Coord, Size
from tests.engine.skills.conftest import context_of

SKILLS = SkillRegistry.default()


@pytest.fixture(params=["moondream2", "moondream3"])
def context(request: pytest.FixtureRequest) -> SkillContext:
    return context_of(parse_model_config({}, family=request.param))


def test_an_answer_follows_the_prompt_of_query_and_ends(context: SkillContext) -> None:
    prompt = SKILLS.get("query").build({"question": "Is it?"}, {}, context).prompt_suffix
    answer = context.codec.encode("yes")
    lesson = write(QuestionExample("Is it?", "yes"), context, 0.5)
    assert lesson.tokens == [*prompt, *answer] and lesson.weight == 0.5
    end = context.model.ids.eos_id
    followed = [(target.at, target.id) for target in lesson.words]
    places = range(len(prompt) - 1, len(lesson.tokens))
    assert followed == list(zip(places, [*answer, end], strict=True))
    assert not lesson.ends
    assert all(isinstance(token, int) for token in lesson.tokens)


def test_known_ids_of_an_answer_are_taken_as_they_are(context: SkillContext) -> None:
    assert write(QuestionExample("Is it?", "", (41, 42)), context).tokens[-2:] == [41, 42]
    lesson = write(CaptionExample("short", (41,)), context)
    assert lesson.tokens == [*context.model.templates.caption["short"], 41]


def test_points_and_boxes_follow_the_cycle_of_locate(context: SkillContext) -> None:
    prompt = SKILLS.get("detect").build({"object": "nut"}, {}, context).prompt_suffix
    at = len(prompt) - 1
    pair = context.model.family == "moondream3"
    lesson = write(BoxExample("nut", ((0.0, 0.25, 0.5, 0.75), (0.5, 0.0, 1.0, 1.0))), context)
    assert lesson.tokens == [
        *prompt, Coord(0.25), Coord(0.5), Size(0.5, 0.5), Coord(0.75), Coord(0.5), Size(0.5, 1.0),
    ]  # fmt: skip
    assert lesson.ends == [
        EndTarget(at, False, False),
        EndTarget(at + 3, False, pair),
        EndTarget(at + 6, True, pair),
    ]
    pointed = write(PointExample("nut", ((0.1, 0.2),)), context)
    assert pointed.tokens[-2:] == [Coord(0.1), Coord(0.2)]
    assert [each.is_end for each in pointed.ends] == [False, True]
    assert write(PointExample("nut", ()), context).ends[0].is_end


def test_a_text_that_the_skill_refuses_is_refused(context: SkillContext) -> None:
    with pytest.raises(InvalidRequest, match="question"):
        write(QuestionExample(" ", "yes"), context)
