"""System text: where it stands in a prompt (moondream.md section 13)."""

import pytest

from kestrel_engine import InvalidRequest
from kestrel_engine.skills import QuerySkill
from kestrel_engine.types.requests import Coord


def prompt(context, **arguments):
    return QuerySkill().build(arguments, {}, context).prompt_suffix


def test_it_precedes_the_first_question_with_a_blank_line(moondream2, moondream3):
    for context in (moondream2, moondream3):
        joined = prompt(context, question="Be brief.\n\nWhat?")
        assert prompt(context, question=" What? ", system=" Be brief.\n") == joined
        assert prompt(context, question="What?", system=" ") == prompt(context, question="What?")
        reasoning = prompt(context, question="What?", system="Be brief.", reasoning=True)
        assert reasoning == prompt(context, question="Be brief.\n\nWhat?", reasoning=True)


def test_in_a_conversation_it_belongs_to_the_first_turn_alone(moondream3):
    turns = [("First?", "one"), ("Second?", "two")]
    given = prompt(moondream3, question="Third?", history=turns, system="Be brief.")
    turns[0] = ("Be brief.\n\nFirst?", "one")
    assert given == prompt(moondream3, question="Third?", history=turns)


def test_spatial_references_stand_before_it(moondream3):
    tokens = prompt(moondream3, question="What?", system="Be brief.", spatial_refs=[(0.5, 0.25)])
    assert tokens[3:5] == (Coord(0.5), Coord(0.25))
    assert tokens[5:-1] == tuple(moondream3.codec.encode("Be brief.\n\nWhat?"))


@pytest.mark.parametrize("system", [3, b"x", ["x"], "x" * 40_000, "\ud800"])
def test_other_values_are_refused(moondream3, system):
    with pytest.raises(InvalidRequest) as caught:
        prompt(moondream3, question="What?", system=system)
    assert caught.value.field == "system"
