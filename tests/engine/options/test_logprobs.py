"""Log-probabilities of answers and descriptions in the engine on the fake runtime: results, streams, stop strings."""

import pytest

from kestrel_engine import InvalidRequest
from tests.engine.fakes import IMAGE, listening
from tests.engine.options.test_stop_strings import GREEDY, says, streamed, thinks
from tests.fake_runtime import FakeRuntime


async def test_the_tokens_are_those_of_the_answer(make_engine, fake_limits):
    runtime = FakeRuntime(fake_limits, says("größer 🐞. "))
    sampled = listening(runtime)
    engine = make_engine(runtime)
    settings = {**GREEDY, "max_tokens": 12, "logprobs": True}
    result = await engine.query(question="a", settings=settings)
    tokens = result.logprobs
    assert tuple(token.id for token in tokens) == result.token_ids and len(tokens) == 12
    assert [(token.id, token.logprob) for token in tokens] == [
        (token.id, token.logprob) for token in sampled[:12]
    ]
    assert len({token.logprob for token in tokens}) > 6
    joined = b"".join(token.utf8 for token in tokens).decode(errors="replace")
    assert joined == result.output["answer"] == "größer \ufffd"
    assert [token.text for token in tokens[:4]] == ["g", "r", "\ufffd", "\ufffd"]


async def test_asking_for_them_changes_nothing_else(make_engine, fake_limits):
    engine = make_engine(FakeRuntime(fake_limits, says("A dot. ")))
    settings = {"temperature": 0.7, "seed": 3, "max_tokens": 9}
    plain = await engine.caption(IMAGE, settings=settings)
    asked = await engine.caption(IMAGE, settings={**settings, "logprobs": True})
    declined = await engine.caption(IMAGE, settings={**settings, "logprobs": False})
    assert plain.logprobs is declined.logprobs is None
    assert asked.output == plain.output == declined.output
    assert asked.token_ids == plain.token_ids == tuple(token.id for token in asked.logprobs)


async def test_updates_hold_the_tokens_in_order(make_engine, fake_limits):
    engine = make_engine(FakeRuntime(fake_limits, says("größer 🐞. ")))
    settings = {**GREEDY, "max_tokens": 11, "logprobs": True}
    stream = await engine.query(question="a", stream=True, settings=settings)
    updates, result = await streamed(stream)
    told = []
    for update in updates:
        told += update.tokens
        assert len(told) == update.token_index
    assert tuple(told) == result.logprobs
    plain = await engine.query(question="a", stream=True, settings={**settings, "logprobs": False})
    assert all(update.tokens == () for update in (await streamed(plain))[0])


async def test_the_tokens_of_a_stop_string_are_in_the_last_update(make_engine, fake_limits):
    engine = make_engine(FakeRuntime(fake_limits, says("one, two, ")))
    settings = {**GREEDY, "stop": "two", "max_tokens": 50, "logprobs": True}
    stream = await engine.query(question="a", stream=True, settings=settings)
    updates, result = await streamed(stream)
    assert result.output["answer"] == "one, "
    assert b"".join(token.utf8 for token in result.logprobs) == b"one, two"
    told = [token for update in updates for token in update.tokens]
    assert tuple(told) == result.logprobs
    assert "".join(update.text for update in updates) == "one, "


async def test_a_stop_string_at_once_leaves_an_update_without_text(make_engine, fake_limits):
    engine = make_engine(FakeRuntime(fake_limits, says("stop")))
    settings = {**GREEDY, "stop": "st", "logprobs": True}
    stream = await engine.query(question="a", stream=True, settings=settings)
    updates, result = await streamed(stream)
    (update,) = updates
    assert (update.text, update.tokens) == ("", result.logprobs)
    assert [token.utf8 for token in result.logprobs] == [b"s", b"t"]


async def test_a_last_token_without_text_is_in_the_last_update(make_engine, fake_limits):
    """Without log-probabilities there is no such update."""
    engine = make_engine(
        FakeRuntime(fake_limits, lambda fed: 100 + ord("a") if len(fed) < 9 else 7)
    )
    settings = {**GREEDY, "max_tokens": 9}
    stream = await engine.query(question="a", stream=True, settings={**settings, "logprobs": True})
    updates, result = await streamed(stream)
    told = [token for update in updates for token in update.tokens]
    assert tuple(told) == result.logprobs and told[-1].utf8 == b""
    assert "".join(update.text for update in updates) == result.output["answer"]
    stream = await engine.query(question="a", stream=True, settings=settings)
    assert all(update.text for update in (await streamed(stream))[0])


async def test_reasoning_is_left_out(make_engine, fake_limits):
    engine = make_engine(FakeRuntime(fake_limits, thinks("so it ", says("yes "))))
    settings = {**GREEDY, "max_tokens": 8, "logprobs": True}
    stream = await engine.query(question="a", reasoning=True, stream=True, settings=settings)
    updates, result = await streamed(stream)
    assert result.output["reasoning"]["text"] == "so it "
    assert b"".join(token.utf8 for token in result.logprobs) == b"yes yes "
    assert len(result.token_ids) == len("so it yes yes ")
    assert all(bool(update.tokens) == bool(update.text) for update in updates)
    thinking = await engine.query(
        question="a", reasoning=True, settings={**settings, "max_tokens": 3}
    )
    assert thinking.output == {"answer": "yes", "reasoning": thinking.output["reasoning"]}
    assert [token.text for token in thinking.logprobs] == ["y", "e", "s"]


async def test_no_token_gives_an_empty_list(make_engine, fake_limits):
    engine = make_engine(FakeRuntime(fake_limits, lambda fed: 0))
    result = await engine.query(question="a", settings={**GREEDY, "logprobs": True})
    assert result.logprobs == () and result.finish_reason == "stop"


async def test_the_likeliest_tokens_at_each_place(make_engine, fake_limits):
    engine = make_engine(FakeRuntime(fake_limits, says("größer 🐞. ")))
    settings = {**GREEDY, "max_tokens": 12, "logprobs": True}
    plain = await engine.query(question="a", settings=settings)
    stream = await engine.query(
        question="a", stream=True, settings={**settings, "top_logprobs": 20}
    )
    updates, result = await streamed(stream)
    assert (result.output, result.token_ids) == (plain.output, plain.token_ids)
    for token, other in zip(result.logprobs, plain.logprobs, strict=True):
        assert len(token.top) == 20 and other.top == ()
        assert token.top[0] == other and token.top[0].utf8 == token.utf8
        assert [each.logprob for each in token.top] == [
            token.logprob - place / 16 for place in range(20)
        ]
        assert all(each.top == () for each in token.top)
    # The separator cannot be sampled after the first token, so it is no alternative either.
    assert all(3 not in [each.id for each in token.top] for token in result.logprobs[1:])
    told = [token for update in updates for token in update.tokens]
    assert tuple(told) == result.logprobs[: len(told)] and told


async def test_reasoning_has_no_alternatives(make_engine, fake_limits):
    runtime = FakeRuntime(
        fake_limits, lambda fed: 3 if fed[-1] == 100 + ord("s") else 100 + ord("s")
    )
    asked = []
    sample = runtime.sample

    def noted(row):
        asked.append(row.sample.rule.top)
        return sample(row)

    runtime.sample = noted
    engine = make_engine(runtime)
    settings = {**GREEDY, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    result = await engine.query(question="a", reasoning=True, settings=settings)
    assert asked[:2] == [0, 0] and asked[2:5] == [2] * 3
    assert all(len(token.top) == 2 for token in result.logprobs)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"logprobs": True, "top_logprobs": 21}, "21 is not a whole number from 0 to 20"),
        ({"logprobs": True, "top_logprobs": -1}, "-1 is not a whole number from 0 to 20"),
        ({"logprobs": True, "top_logprobs": True}, "True is not a whole number"),
        ({"top_logprobs": 2}, "is 2 without logprobs; set logprobs to true"),
    ],
)
async def test_alternatives_that_cannot_be_given(make_engine, fake_limits, settings, problem):
    engine = make_engine(FakeRuntime(fake_limits))
    with pytest.raises(InvalidRequest, match=problem) as caught:
        await engine.query(question="a", settings=settings)
    assert caught.value.field == "top_logprobs"


@pytest.mark.parametrize("value", [1, 0, "yes", [True]])
async def test_other_values_are_refused(make_engine, fake_limits, value):
    engine = make_engine(FakeRuntime(fake_limits))
    with pytest.raises(InvalidRequest, match="is not true or false") as caught:
        await engine.query(question="a", settings={"logprobs": value})
    assert caught.value.field == "logprobs"
