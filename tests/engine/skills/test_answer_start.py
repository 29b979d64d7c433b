"""The beginning of an answer, which the model continues."""

import pytest

from kestrel_engine import InvalidRequest
from kestrel_engine.skills import QuerySkill


def prompt(context, **arguments):
    return QuerySkill().build(arguments, {}, context).prompt_suffix


def test_it_follows_the_prompt_as_the_answer_of_an_earlier_turn_does(moondream2, moondream3):
    for context in (moondream2, moondream3):
        plain = prompt(context, question="What?")
        begun = prompt(context, question="What?", answer_start="A red ")
        assert begun == (*plain, *context.codec.encode("A red "))
        later = prompt(context, question="And?", history=[("What?", "A red ")])
        assert later[: len(begun)] == begun
        assert prompt(context, question="What?", answer_start="") == plain


@pytest.mark.parametrize("start", [3, b"x", "x" * 40_000, "\ud800"])
def test_other_values_are_refused(moondream3, start):
    with pytest.raises(InvalidRequest) as caught:
        prompt(moondream3, question="What?", answer_start=start)
    assert caught.value.field == "answer_start"


def test_reasoning_comes_before_an_answer(moondream3):
    with pytest.raises(InvalidRequest, match="comes before the answer"):
        prompt(moondream3, question="What?", answer_start="A", reasoning=True)
