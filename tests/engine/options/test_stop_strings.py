"""Stop strings in the engine on the fake runtime: results, streams, batches, reasoning, failures of later steps."""

import asyncio

import pytest

from kestrel_engine import RuntimeFailure
from tests.engine.fakes import never_ends
from tests.fake_runtime import FakeRuntime

GREEDY = {"temperature": 0.0}


def says(text):
    """A script: after the prompt, the bytes of ``text`` over and over."""
    ids = [100 + byte for byte in text.encode()]

    def script(fed):
        said = len(fed) - 1 - max(index for index, token in enumerate(fed) if token == 3)
        return ids[said % len(ids)]

    return script


async def streamed(stream):
    updates = [update async for update in stream]
    return updates, await stream.result()


async def test_an_answer_ends_before_the_stop_string(make_engine, fake_limits):
    engine = make_engine(FakeRuntime(fake_limits, says("one, two, three, ")))
    settings = {**GREEDY, "stop": ["two", ", th"], "max_tokens": 100}
    updates, result = await streamed(
        await engine.query(question="a", stream=True, settings=settings)
    )
    assert result.output == {"answer": "one, "}
    assert result.finish_reason == "stop"
    assert result.metrics.output_tokens == len(result.token_ids) == len("one, two")
    assert "".join(update.text for update in updates) == "one, "
    assert all(not update.text.endswith("t") for update in updates)


async def test_a_stop_string_that_the_last_token_completes_is_the_reason(make_engine, fake_limits):
    engine = make_engine(FakeRuntime(fake_limits, says("abcd")))
    result = await engine.query(question="a", settings={**GREEDY, "max_tokens": 3, "stop": "bc"})
    assert (result.output["answer"], result.finish_reason) == ("a", "stop")
    assert result.metrics.output_tokens == 3


async def test_the_sequence_ends_and_frees_its_pages(make_engine, fake_limits):
    engine = make_engine(FakeRuntime(fake_limits, never_ends, cost=lambda plan: 0.002))
    result = await engine.query(question="a", settings={**GREEDY, "stop": "aaaaa"})
    assert (result.output["answer"], result.finish_reason) == ("", "stop")
    assert result.metrics.output_tokens == 5
    assert (engine.stats.running, engine.stats.waiting, engine.num_requests) == (0, 0, 0)


async def test_stop_strings_are_of_their_request_only(make_engine, fake_limits):
    """A full batch with and without stop strings: each request as it is alone."""
    engine = make_engine(FakeRuntime(fake_limits, says("abcdefgh")))
    stops = [(), ("c",), ("fg", "hz"), ("x",), ("ha", "d"), ("gh",)]
    expected = ["abcdefghab", "ab", "abcde", "abcdefghab", "abc", "abcdef"]
    results = await asyncio.gather(
        *(
            engine.query(question="a", settings={**GREEDY, "max_tokens": 10, "stop": list(stop)})
            for stop in stops
        )
    )
    assert [result.output["answer"] for result in results] == expected
    reasons = [result.finish_reason for result in results]
    assert reasons == ["length", "stop", "stop", "length", "stop", "stop"]


def thinks(thought, answer):
    """A script that reasons with the six letters of ``thought`` if it may, and then goes on as ``answer`` does."""

    def script(fed):
        if 4 in fed and 3 not in fed[fed.index(4) :]:
            said = len(fed) - 1 - fed.index(4)
            return 3 if said == 6 else 100 + thought.encode()[said]
        return answer(fed)

    return script


async def test_reasoning_is_not_searched(make_engine, fake_limits):
    engine = make_engine(FakeRuntime(fake_limits, thinks("so END", says("yes END no"))))
    settings = {**GREEDY, "max_tokens": 30, "stop": ["END"]}
    updates, result = await streamed(
        await engine.query(question="a", reasoning=True, stream=True, settings=settings)
    )
    assert result.output["reasoning"]["text"] == "so END"
    assert result.output["answer"] == "yes "
    assert result.finish_reason == "stop"
    assert "".join(update.text for update in updates) == "yes "
    assert result.metrics.output_tokens == len("so END") + len("yes END")


async def test_a_cancelled_request_returns_what_was_held_back(make_engine, fake_limits):
    engine = make_engine(FakeRuntime(fake_limits, never_ends, cost=lambda plan: 0.02))
    stream = await engine.query(
        question="a", stream=True, settings={**GREEDY, "stop": "a" * 10 + "b", "max_tokens": 250}
    )
    async for update in stream:
        assert set(update.text) == {"a"}
        break
    await stream.aclose()
    result = await stream.result()
    assert result.finish_reason == "cancelled"
    assert result.output["answer"] == "a" * result.metrics.output_tokens
    assert result.metrics.output_tokens > 10


async def test_a_step_that_fails_after_the_stop_string_does_not_matter(make_engine, fake_limits):
    """Steps that are out when the stop string is found compute tokens that nobody needs."""
    runtime = FakeRuntime(fake_limits, says("abcd"))
    engine = make_engine(runtime)
    execute = runtime.execute

    def fails_after_the_stop(plan):
        if any(row.sample is not None and row.sample.draw >= 4 for row in plan.decode):
            raise RuntimeError("device lost")
        return execute(plan)

    runtime.execute = fails_after_the_stop
    result = await engine.query(question="a", settings={**GREEDY, "stop": "bc", "max_tokens": 50})
    assert (result.output["answer"], result.finish_reason) == ("a", "stop")
    with pytest.raises(RuntimeFailure):
        await engine.query(question="a", settings={**GREEDY, "stop": "x", "max_tokens": 50})
