"""What a skill may not ask of a runtime, and in which words it is refused."""

import math
from dataclasses import replace

import pytest

from kestrel_engine.errors import SkillFault
from kestrel_engine.skills.registry import SkillRegistry
from kestrel_engine.skills.rule_check import RuleCheck, check_prompt
from kestrel_engine.types.requests import Coord, ImageBlock, Size
from kestrel_engine.types.step import StepToken, TokenRule

GOOD = [
    TokenRule(),
    TokenRule(suppressed=(0, 6), read_coord=True),
    TokenRule(allowed=(5, 0), suppressed=(5,)),
    TokenRule(allowed=(5, 0), read_coord=True),
    TokenRule(forced=5, read_coord=True, read_size=True),
    TokenRule(forced=7, suppressed=tuple(range(300))),
    TokenRule(otherwise=5, stop=0, read_coord=True),
    TokenRule(otherwise=5, stop=0, allowed=(0, 9), read_coord=True),
    TokenRule(suppressed=tuple(range(1, 300))),
    TokenRule(mask=bytes(36) + b"\x08" + bytes(3)),
]

BAD = [
    (None, "gave None as a rule"),
    ({"allowed": [1]}, "a rule is a TokenRule"),
    (TokenRule(allowed=()), "leaves no id"),
    (TokenRule(allowed=(1, 2), suppressed=(2, 1, 7)), "leaves no id"),
    (TokenRule(suppressed=tuple(range(300))), "leaves no id"),
    (TokenRule(suppressed=tuple(range(300)), otherwise=5), "leaves no id"),
    (TokenRule(allowed=(1, 300)), "allowed of the skill's rule has id 300; the model's ids are 0 to 299"),
    (TokenRule(suppressed=(-1,)), "suppressed of the skill's rule has id -1"),
    (TokenRule(forced=10**9), "forced of the skill's rule has id 1000000000"),
    (TokenRule(otherwise=300), "otherwise of the skill's rule has id 300"),
    (TokenRule(stop=300), "stop of the skill's rule has id 300"),
    (TokenRule(forced=True), "has True, which is no id"),
    (TokenRule(allowed=(1.5,)), "has 1.5, which is no id"),
    (TokenRule(allowed=[1, 2]), "not a tuple of ids"),
    (TokenRule(forced=6, read_coord=True), "reads a value with id 5, but can only give id 6"),
    (TokenRule(allowed=(0, 5), read_size=True), "reads a value with id 6, but can only give id 0, 5"),
    (TokenRule(allowed=(0, 5), suppressed=(5,), read_coord=True), "can only give id 0"),
    (TokenRule(otherwise=6, read_coord=True), "can only give id 0, 6"),
    (TokenRule(mask=bytes(40)), "leaves no id"),
    (TokenRule(mask=bytes([1] * 38)), "must be 40 bytes"),
    (TokenRule(mask=bytearray([1] * 40)), "must be 40 bytes"),
    (TokenRule(mask=bytes([1] * 40), suppressed=(3,)), "no suppressed ids"),
]  # fmt: skip


@pytest.fixture
def model(moondream3):
    return replace(moondream3.model, text=replace(moondream3.model.text, vocab_size=300))


@pytest.mark.parametrize("rule", GOOD)
def test_a_rule_that_can_be_followed(rule, model):
    check = RuleCheck(model)
    check(rule)
    check(rule)


@pytest.mark.parametrize(("rule", "words"), BAD)
def test_a_rule_that_can_not(rule, words, model):
    check = RuleCheck(model)
    for _ in range(2):
        with pytest.raises(SkillFault) as caught:
            check(rule)
        assert words in str(caught.value)


def test_what_is_remembered_is_bounded(model):
    check = RuleCheck(model)
    for begin in range(20_000):
        check(TokenRule(suppressed=(begin % 200,)))
    assert len(check.passed) <= 4096


@pytest.mark.parametrize(
    "token",
    [300, -1, True, 1.5, "a", None, Coord(math.nan), Size(0.5, math.inf), ImageBlock("k", 9)],
)
def test_a_prompt_of_what_the_model_can_not_embed(token, model):
    check_prompt((0, 299, Coord(0.5), Size(0.1, 0.2)), model)
    with pytest.raises(SkillFault, match="prompt holds"):
        check_prompt((0, token), model)


@pytest.mark.parametrize(
    ("skill", "arguments", "settings"),
    [
        ("query", {"question": "why?"}, {}),
        ("query", {"question": "why?", "reasoning": True}, {}),
        ("caption", {}, {}),
        ("point", {"object": "cat"}, {}),
        ("detect", {"object": "cat"}, {"max_objects": 3}),
        ("segment", {"object": "cat"}, {}),
    ],
)
def test_requests_share_their_rules(skill, arguments, settings, moondream3):
    """What knows a rule by its identity reads the rules of a skill once, not for every request."""
    spec = SkillRegistry.default().get(skill)

    def rules():
        request = spec.build(arguments, settings, moondream3)
        control = spec.new_control(replace(request, token_limit=9), 9, moondream3)
        found = []
        for index in range(4):
            found.append(control.rule(index))
            control.accept(StepToken(moondream3.model.ids.coord_id, Coord(0.5)))
        return found

    first = rules()
    assert all(rule is other for rule, other in zip(first, rules(), strict=True)), first
