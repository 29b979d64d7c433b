"""Penalties and logit bias in the engine on the fake runtime: the rules that reach the runtime, and what is refused."""

import asyncio
from collections import Counter

import pytest

from kestrel_engine import InvalidRequest
from tests.engine.fakes import IMAGE
from tests.engine.options.test_stop_strings import GREEDY, says
from tests.fake_runtime import FakeRuntime


def plain_logit(x, token, settings, prompt, said):
    """As vLLM documents it: bias, repetition of prompt and text, frequency and presence of the text."""
    x += settings.get("logit_bias", {}).get(token, 0.0)
    if token in said or token in prompt:
        x = x / settings["repetition_penalty"] if x > 0 else x * settings["repetition_penalty"]
    x -= settings["frequency_penalty"] * said[token]
    return x - settings["presence_penalty"] * (said[token] > 0)


def edited(x, token, rule):
    for edit in rule.edits:
        if edit.id == token:
            x += edit.bias
            return (x / edit.penalty if x > 0 else x * edit.penalty) - edit.minus
    return x


def rules_of(runtime):
    """The rules of all sampled tokens, by draw."""
    samples = [row.sample for plan in runtime.plans for row in (*plan.prefill, *plan.decode)]
    return {sample.draw: sample.rule for sample in samples if sample is not None}


@pytest.mark.parametrize("reasoning", [False, True])
async def test_the_logits_are_those_of_a_plain_implementation(make_engine, fake_limits, reasoning):
    def script(fed):
        if 4 in fed and 3 not in fed[fed.index(4) :]:
            said = len(fed) - 1 - fed.index(4)
            return 3 if said == 2 else 100 + b"so"[said]
        return says("abaca")(fed)

    settings = {
        **GREEDY, "max_tokens": 6, "repetition_penalty": 1.3, "presence_penalty": 0.5,
        "frequency_penalty": 0.25, "logit_bias": {100 + ord("a"): 1.0, 350: -100},
    }  # fmt: skip
    runtime = FakeRuntime(fake_limits, script)
    engine = make_engine(runtime)
    result = await engine.query(question="xay", reasoning=reasoning, settings=settings)
    assert result.output["answer"] == "abacaa"
    first = 3 if reasoning else 0
    rules = rules_of(runtime)
    assert all(not rules[draw].edits for draw in range(first))
    prompt = {100 + byte for byte in b"xay"}
    for index, letter in enumerate("abacaa"):
        said = Counter(100 + ord(each) for each in "abacaa"[:index])
        for token in (*range(190, 230), 350):
            for x in (-2.0, 0.5, 3.0):
                wanted = plain_logit(x, token, settings, prompt, said)
                assert edited(x, token, rules[first + index]) == pytest.approx(wanted), letter


async def test_a_bias_alone_needs_no_text_and_a_neutral_setting_nothing(make_engine, fake_limits):
    runtime = FakeRuntime(fake_limits)
    engine = make_engine(runtime)
    neutral = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "min_p": 0}
    await engine.caption(IMAGE, settings={**GREEDY, "max_tokens": 4, **neutral, "logit_bias": {}})
    assert not any(rule.edits for rule in rules_of(runtime).values())
    await engine.caption(IMAGE, settings={**GREEDY, "max_tokens": 4, "logit_bias": [("7", 3)]})
    assert [rule.edits for _, rule in sorted(rules_of(runtime).items())] == [
        ((7, 3.0, 1.0, 0.0),)
    ] * 4


async def test_they_mix_with_constraints_and_other_rows(make_engine, fake_limits):
    alone = make_engine(FakeRuntime(fake_limits))
    settings = {"temperature": 0.7, "max_tokens": 12, "seed": 5}
    wanted = await alone.query(question="b", settings=settings)
    engine = make_engine(FakeRuntime(fake_limits))
    mixed = {**GREEDY, "constraint": {"regex": "[ab]{9}"}, "frequency_penalty": 1}
    plain, other = await asyncio.gather(
        engine.query(question="b", settings=settings), engine.query(question="b", settings=mixed)
    )
    assert plain.token_ids == wanted.token_ids
    assert set(other.output["answer"]) <= {"a", "b"} and len(other.output["answer"]) == 9


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty", "0 is not in [0.01, 10]"),
        ({"repetition_penalty": True}, "repetition_penalty", "True"),
        ({"presence_penalty": 2.01}, "presence_penalty", "is not in [-2, 2]"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty", "nan"),
        ({"frequency_penalty": "1"}, "frequency_penalty", "'1'"),
        ({"min_p": 1.1}, "min_p", "1.1 is not in [0, 1]"),
        ({"logit_bias": 3}, "logit_bias", "must be an object"),
        ({"logit_bias": {5: 101}}, "logit_bias[5]", "101 is not in [-100, 100]"),
        ({"logit_bias": {51200: 1}}, "logit_bias[51200]", "ids are 0 to 51199"),
        ({"logit_bias": {-1: 1}}, "logit_bias[-1]", "ids are 0"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "ids are 0"),
        ({"logit_bias": [(1, 1), (2,)]}, "logit_bias[1]", "an id and a number"),
        ({"logit_bias": dict.fromkeys(range(301), 1)}, "logit_bias", "has 301 ids, the limit is 300"),
    ],
)  # fmt: skip
async def test_what_is_refused(make_engine, settings, field, words):
    with pytest.raises(InvalidRequest) as caught:
        await make_engine().query(question="a", settings=settings)
    assert caught.value.field == field and words in caught.value.message
