"""A limit of its own for the reasoning: budgets, cuts and finish reasons of both phases."""

import pytest

from kestrel_engine import ContextLengthError, InvalidRequest
from kestrel_engine.requests.request_check import token_limit
from kestrel_engine.skills import CaptionSkill, QuerySkill
from kestrel_engine.types.requests import Coord
from kestrel_engine.types.step import StepToken, TokenRule
from tests.engine.skills.test_skills import feed, start, text
from tests.fake_runtime import FakeRuntime

END, ANSWER = StepToken(0), StepToken(3)
LIMITS = {"max_reasoning_tokens": 3, "max_tokens": 5}


def build(context, **settings):
    return QuerySkill().build({"question": "q", "reasoning": True}, settings, context)


def thinking(context, settings=LIMITS):
    return start(QuerySkill(), context, 9, settings, question="q", reasoning=True)


@pytest.mark.parametrize(
    ("settings", "budget"),
    [
        ({}, 2 * 768 + 1),
        ({"max_tokens": 5}, 11),
        (LIMITS, 9),
        ({"max_reasoning_tokens": 3}, 3 + 1 + 768),
    ],
)
def test_the_budget_is_both_limits_and_the_token_between(moondream3, settings, budget):
    assert build(moondream3, **settings).token_budget == budget


def test_a_reasoning_that_its_own_limit_cuts_leaves_the_reason_to_the_answer(moondream3, codec):
    for answer, finish in (([*text(codec, "yes"), END], "stop"), (text(codec, "abcde"), "length")):
        _, state = thinking(moondream3)
        feed(state, text(codec, "thi"))
        assert state.rule() == TokenRule(forced=3)
        assert feed(state, [ANSWER, *answer])[1] == finish
        reasoning = state.out.output()["reasoning"]
        assert (reasoning["text"], reasoning["finish_reason"]) == ("thi", "length")
        assert state.out.num_reasoning_tokens == 3


def test_a_reasoning_that_the_model_ends_was_not_cut(moondream3, codec):
    _, state = thinking(moondream3)
    assert feed(state, [*text(codec, "th"), ANSWER, *text(codec, "y"), END])[1] == "stop"
    assert state.out.output()["reasoning"]["finish_reason"] == "stop"


def test_a_request_that_ends_within_its_reasoning_gives_it_no_reason(moondream3, codec):
    _, state = thinking(moondream3)
    feed(state, text(codec, "th"))
    state.out.finish()
    assert state.out.output()["reasoning"]["finish_reason"] is None


def test_a_context_without_room_for_both_shrinks_defaults_only(moondream3, codec):
    for settings, room, most in (({}, 9, 4), ({"max_tokens": 3}, 7, 3), ({"max_tokens": 5}, 7, 3)):
        _, state = start(QuerySkill(), moondream3, room, settings, question="q", reasoning=True)
        feed(state, text(codec, "x" * most))
        assert state.rule() == TokenRule(forced=3)
    limits = {"context": 20, "most": None, "default": 768}
    assert token_limit(build(moondream3, **LIMITS), 11, **limits) == 9
    with pytest.raises(ContextLengthError, match="3 \\+ 6 for the answer exceeds the 8 positions"):
        token_limit(build(moondream3, **LIMITS), 12, **limits)
    assert token_limit(build(moondream3, max_reasoning_tokens=18), 0, **limits) == 20
    with pytest.raises(ContextLengthError) as caught:
        token_limit(build(moondream3, max_reasoning_tokens=19), 0, **limits)
    assert caught.value.field == "max_reasoning_tokens"
    with pytest.raises(InvalidRequest, match="3 \\+ 6 for the answer exceeds this engine's limit"):
        token_limit(build(moondream3, **LIMITS), 0, context=20, most=8, default=768)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
def test_other_limits_are_refused(moondream3, value):
    with pytest.raises(InvalidRequest, match="is not a whole number of at least 1") as caught:
        build(moondream3, max_reasoning_tokens=value)
    assert caught.value.field == "max_reasoning_tokens"


def test_without_reasoning_there_is_nothing_to_limit(moondream3):
    with pytest.raises(InvalidRequest, match="without reasoning"):
        QuerySkill().build({"question": "q"}, {"max_reasoning_tokens": 3}, moondream3)
    with pytest.raises(InvalidRequest, match="not a setting of this skill"):
        CaptionSkill().build({}, {"max_reasoning_tokens": 3}, moondream3)


@pytest.mark.parametrize(
    "chunks",
    [
        ("", "zwei Käfer 🐞", " und ", "日本語"),
        ("e\u0301", "\u0301e", "👩\u200d👩\u200d👧", "\U0010ffff\x00"),
        ("\u202eabc\ufeff", "\r\n", "ﬁ", "ⅷ𝟘"),
    ],
)
def test_offsets_count_code_points_whatever_the_text(moondream3, codec, chunks):
    _, state = start(QuerySkill(), moondream3, 400, question="q", reasoning=True)
    for number, chunk in enumerate(chunks):
        point = [StepToken(5, Coord(number / 8)), StepToken(5, Coord(0.5))]
        feed(state, [StepToken(7), *text(codec, chunk), *point, StepToken(9)])
    feed(state, [ANSWER, END])
    reasoning = state.out.output()["reasoning"]
    assert reasoning["text"] == "".join(chunks)
    spans = {span["points"][0][0]: span for span in reasoning["grounding"]}
    for number, chunk in enumerate(chunks):
        span = spans[number / 8]
        assert reasoning["text"][span["start_idx"] : span["end_idx"]] == chunk


async def test_the_engine_cuts_the_reasoning_where_the_output_says_so(make_engine, fake_limits):
    """The context has room for less than the default of both phases."""
    engine = make_engine(FakeRuntime(fake_limits, lambda fed: 100 + 97))
    result = await engine.query(question="q", reasoning=True, settings={"temperature": 0})
    thought = result.metrics.reasoning_tokens
    room = fake_limits.max_seq_length - result.metrics.input_tokens
    assert thought == (room - 1) // 2 and result.finish_reason == "length"
    assert result.output["reasoning"]["finish_reason"] == "length"
    own = {"temperature": 0, **LIMITS}
    result = await engine.query(question="q", reasoning=True, settings=own)
    assert result.metrics.reasoning_tokens == 3 and result.metrics.output_tokens == 8
    assert (result.output["answer"], result.finish_reason) == ("aaaaa", "length")
