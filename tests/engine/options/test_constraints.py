"""Constraints in the engine on the fake runtime: answers, streams, batches, reasoning, stop strings, preemption."""

import asyncio
import json
import re
import threading
import types
from dataclasses import replace

import pytest

from kestrel_engine import EngineOverloaded, InvalidRequest
from kestrel_engine import engine as engine_module
from kestrel_engine.front.submitting import constraints
from kestrel_engine.runtime.fake import FakeRuntime, hashed
from kestrel_engine.skills.constraints.grammars import Grammars
from kestrel_engine.steps.loop import EngineLoop
from kestrel_engine.types.model_config import parse_model_config
from tests.engine.fakes import IMAGE, SMALL, ByteCodec
from tests.engine.options.test_stop_strings import GREEDY, says, streamed

SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "c": {"enum": ["red", "green"]},
    },
    "required": ["n", "c"],
    "additionalProperties": False,
}
CONSTRAINTS = [
    {"choices": ["red", "green", "green crescent"]},
    {"regex": "[0-9]{1,3} (dots|lines)"},
    {"grammar": 'start: "(" start ")" | "x"'},
    {"json_schema": json.dumps(SCHEMA)},
    {"json_schema": SCHEMA},
]


@pytest.fixture(scope="module")
def shared_grammars():
    """One for all engines here: each would start a process and build a tree of the vocabulary."""
    model = parse_model_config(SMALL, family="moondream3")
    grammars = Grammars(ByteCodec(), model.text.vocab_size, model.ids.eos_id)
    yield types.SimpleNamespace(
        compile=grammars.compile, close=lambda: None, counts=grammars.counts
    )
    grammars.close()


@pytest.fixture(autouse=True)
def one_compiler(monkeypatch, shared_grammars):
    monkeypatch.setattr(engine_module, "Grammars", lambda *arguments: shared_grammars)


def matches(constraint, text):
    match constraint:
        case {"choices": choices}:
            return text in choices
        case {"regex": pattern}:
            return re.fullmatch(pattern, text) is not None
        case {"grammar": _}:
            depth = text.count("(")
            return text == "(" * depth + "x" + ")" * depth
        case {"json_schema": _}:
            value = json.loads(text)
            return (
                list(value) == ["n", "c"]
                and 0 <= value["n"] <= 99
                and value["c"] in ("red", "green")
            )
    raise AssertionError(constraint)


async def test_an_answer_matches(make_engine):
    engine = make_engine()
    for constraint in CONSTRAINTS:
        settings = {**GREEDY, "constraint": constraint, "max_tokens": 100}
        for question in "abc":
            result = await engine.query(question=question, settings=settings)
            assert result.finish_reason == "stop"
            assert matches(constraint, result.output["answer"]), result.output
        result = await engine.caption(IMAGE, settings=settings)
        assert matches(constraint, result.output["caption"])


async def test_a_text_that_matches_anyway_is_unchanged(make_engine, fake_limits):
    engine = make_engine(FakeRuntime(fake_limits, says("12 dots\x00")))
    plain = await engine.query(question="a", settings={**GREEDY, "stop": "\x00", "logprobs": True})
    settings = {**GREEDY, "constraint": {"regex": "[0-9]+ dots"}, "logprobs": True}
    result = await engine.query(question="a", settings=settings)
    assert result.output == plain.output == {"answer": "12 dots"}
    assert result.token_ids == plain.token_ids[:-1] and len(result.logprobs) == 7


async def test_a_stream_adds_up(make_engine, fake_limits):
    # Steps take a while, so that a reader sees several updates.
    engine = make_engine(FakeRuntime(fake_limits, cost=lambda plan: 0.005))
    settings = {**GREEDY, "constraint": {"json_schema": SCHEMA}, "max_tokens": 100}
    updates, result = await streamed(
        await engine.query(question="a", stream=True, settings=settings)
    )
    assert "".join(update.text for update in updates) == result.output["answer"]
    assert matches({"json_schema": SCHEMA}, result.output["answer"]) and len(updates) > 1


async def test_other_rows_of_the_batch_are_unchanged(make_engine, fake_limits):
    limits = replace(fake_limits, max_batch_size=8)
    settings = {"temperature": 0.7, "max_tokens": 20}
    alone = make_engine(FakeRuntime(limits))
    wanted = [
        await alone.query(question=str(i), settings={**settings, "seed": i}) for i in range(4)
    ]
    engine = make_engine(FakeRuntime(limits))
    plain = [engine.query(question=str(i), settings={**settings, "seed": i}) for i in range(4)]
    constrained = [
        engine.query(question="a", settings={**GREEDY, "constraint": c}) for c in CONSTRAINTS[:4]
    ]
    results = await asyncio.gather(*constrained, *plain)
    assert [r.token_ids for r in results[4:]] == [r.token_ids for r in wanted]
    for constraint, result in zip(CONSTRAINTS[:4], results[:4], strict=True):
        assert matches(constraint, result.output["answer"])


async def test_preemption_keeps_the_place_in_the_grammar(make_engine, fake_limits, monkeypatch):
    constraint = {"regex": "(ab|ba){10}[0-9]"}
    settings = {**GREEDY, "constraint": constraint, "max_tokens": 40}
    roomy = make_engine(FakeRuntime(fake_limits))
    wanted = [await roomy.query(question=q, settings=settings) for q in "abc"]
    # The first token waits until all three requests are with the step thread: alone, each has room enough.
    submitted, together = [], threading.Event()
    submit = EngineLoop.submit

    def counted(loop, work):
        submit(loop, work)
        submitted.append(work)
        if len(submitted) == 3:
            together.set()

    def held(fed):
        assert together.wait(20)
        return hashed(fed, fake_limits.vocab_size)

    monkeypatch.setattr(EngineLoop, "submit", counted)
    tight = make_engine(FakeRuntime(replace(fake_limits, num_pages=28), held))
    results = await asyncio.gather(*(tight.query(question=q, settings=settings) for q in "abc"))
    assert tight.stats.preemptions > 0
    assert [r.token_ids for r in results] == [r.token_ids for r in wanted]
    assert all(matches(constraint, r.output["answer"]) for r in results)


async def test_a_limit_may_leave_it_incomplete(make_engine):
    settings = {**GREEDY, "constraint": {"json_schema": SCHEMA}, "max_tokens": 4}
    result = await make_engine().query(question="a", settings=settings)
    assert result.finish_reason == "length"
    assert result.output["answer"].startswith("{") and len(result.token_ids) == 4


async def test_a_stop_string_ends_it(make_engine):
    settings = {**GREEDY, "constraint": {"regex": "a{3}b+"}, "stop": "ab"}
    result = await make_engine().query(question="a", settings=settings)
    assert (result.output["answer"], result.finish_reason) == ("aa", "stop")


async def test_reasoning_is_free(make_engine, fake_limits):
    def script(fed):
        if 4 in fed and 3 not in fed[fed.index(4) :]:
            said = len(fed) - 1 - fed.index(4)
            return 3 if said == 6 else 100 + b"so it "[said]
        return says("yes ")(fed)

    engine = make_engine(FakeRuntime(fake_limits, script))
    settings = {**GREEDY, "constraint": {"choices": ["no", "yes ye"]}}
    result = await engine.query(question="a", reasoning=True, settings=settings)
    assert result.output["reasoning"]["text"] == "so it "
    assert (result.output["answer"], result.finish_reason) == ("yes ye", "stop")
    cut = await engine.query(question="a", reasoning=True, settings={**settings, "max_tokens": 3})
    assert cut.output["answer"] == "yes" and cut.finish_reason == "length"


async def test_a_rule_too_long_to_follow_ends_its_request_only(make_engine):
    engine = make_engine()
    hostile = {"regex": "(.*a){40}(.*b){40}" + "|".join(f"(.*a.{{{i}}})" for i in range(60))}
    settings = {**GREEDY, "max_tokens": 60}
    other = asyncio.create_task(engine.query(question="b", settings=settings))
    try:
        result = await engine.query(question="a", settings={**settings, "constraint": hostile})
        assert (
            re.fullmatch(hostile["regex"], result.output["answer"])
            or result.finish_reason == "length"
        )
    except InvalidRequest as error:
        assert error.field.startswith("constraint") and "complex" in error.message
    assert len((await other).token_ids) == 60


async def test_errors_name_the_place_before_anything_is_computed(make_engine, fake_limits):
    runtime = FakeRuntime(fake_limits)
    engine = make_engine(runtime)
    for constraint, field in [
        ({"regex": "(a"}, "constraint.regex"),
        ({"json_schema": "{"}, "constraint.json_schema"),
        ({"choices": [""]}, "constraint.choices[0]"),
    ]:
        with pytest.raises(InvalidRequest) as caught:
            await engine.query(question="a", settings={"constraint": constraint})
        assert caught.value.field == field
    assert engine.num_requests == 0 and not runtime.plans
    with pytest.raises(InvalidRequest, match="is not a setting of this skill"):
        await engine.detect(IMAGE, "a", settings={"constraint": {"choices": ["a"]}})


async def test_constraints_that_wait_to_be_compiled_are_bounded(make_engine, monkeypatch):
    engine = make_engine()
    monkeypatch.setattr(constraints, "MAX_COMPILING", 2)
    opened = threading.Event()
    compiled = []

    def compile(constraint):
        assert opened.wait(20)
        compiled.append(constraint.source)
        return grammars.compile(constraint)

    compiler = engine._submitter.constraints
    grammars = compiler._grammars
    monkeypatch.setattr(
        compiler, "_grammars", types.SimpleNamespace(compile=compile, close=grammars.close)
    )

    def ask(choice):
        settings = {**GREEDY, "constraint": {"choices": [choice]}}
        return asyncio.create_task(engine.query(question="a", settings=settings))

    waiting = [ask("one") for _ in range(3)] + [ask("two")]
    await asyncio.sleep(0.01)
    with pytest.raises(EngineOverloaded, match="2 constraints wait"):
        await ask("three")
    waiting.pop(0).cancel()
    opened.set()
    assert [r.output["answer"] for r in await asyncio.gather(*waiting)] == ["one", "one", "two"]
    assert compiled == [("one",), ("two",)]
    assert (await ask("three")).output["answer"] == "three"
