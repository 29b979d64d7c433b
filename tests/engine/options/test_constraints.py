"""Constraints in the engine on the fake runtime: answers, streams, batches, reasoning, stop strings, preemption."""

import asyncio
import itertools
import json
import re
import threading
import types
from dataclasses import replace

import pytest

from kestrel_engine import ConstraintsCostly, EngineClosed, InvalidRequest, RuntimeFailure
from kestrel_engine.requests import constraints
from kestrel_engine.requests import submitter as submitter_module
from kestrel_engine.skills.constraints import mask_threads
from kestrel_engine.skills.constraints.grammars import Grammars, Matcher
from kestrel_engine.skills.constraints.mask_threads import MaskThreads
from kestrel_engine.skills.constraints.setting import read_constraint
from kestrel_engine.steps.loop import EngineLoop
from kestrel_engine.types.model_config import parse_model_config
from tests.engine.fakes import IMAGE, SMALL, ByteCodec
from tests.engine.inside import inside
from tests.engine.options.test_stop_strings import GREEDY, says, thinks
from tests.fake_runtime import FakeRuntime, hashed
from tests.waiting import until

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
    monkeypatch.setattr(submitter_module, "Grammars", lambda *arguments, **options: shared_grammars)


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
        assert together.wait(60)
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
    engine = make_engine(FakeRuntime(fake_limits, thinks("so it ", says("yes "))))
    settings = {**GREEDY, "constraint": {"choices": ["no", "yes ye"]}}
    result = await engine.query(question="a", reasoning=True, settings=settings)
    assert result.output["reasoning"]["text"] == "so it "
    assert (result.output["answer"], result.finish_reason) == ("yes ye", "stop")
    cut = await engine.query(question="a", reasoning=True, settings={**settings, "max_tokens": 3})
    assert cut.output["answer"] == "yes" and cut.finish_reason == "length"


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
    cycle = (
        '{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'
    )
    for endless in (
        {"json_schema": '{"$ref": "#"}'},
        {"json_schema": cycle},
        {"grammar": "start: start"},
    ):
        with pytest.raises(InvalidRequest, match="requires itself without end"):
            await engine.query(question="a", settings={"constraint": endless})
    assert engine.num_requests == 0 and not runtime.plans
    with pytest.raises(InvalidRequest, match="is not a setting of this skill"):
        await engine.detect(IMAGE, "a", settings={"constraint": {"choices": ["a"]}})


class Held:
    """A matcher of the library whose masks wait until ``open`` is set."""

    def __init__(self, inner):
        self._inner = inner
        self.entered, self.open = threading.Event(), threading.Event()

    def deep_copy(self):
        return self

    def compute_bitmask(self):
        self.entered.set()
        assert self.open.wait(60)
        return self._inner.compute_bitmask()

    def __getattr__(self, name):
        return getattr(self._inner, name)


async def test_others_go_on_while_a_mask_is_computed(make_engine, fake_limits, shared_grammars):
    runtime = FakeRuntime(fake_limits)
    engine = make_engine(runtime)
    constraint = read_constraint({"regex": "[ab]{3}held"})
    grammar = shared_grammars.compile(constraint)
    held = Held(grammar.template)
    grammar = replace(grammar, template=held)
    inside(engine).submitter.constraints.keep(constraint, "", grammar)
    settings = {**GREEDY, "max_tokens": 20}
    slow = asyncio.create_task(
        engine.query(question="a", settings={**settings, "constraint": {"regex": "[ab]{3}held"}})
    )
    await asyncio.to_thread(held.entered.wait, 60)
    constrained = {**settings, "constraint": {"regex": "[0-9]{5}"}}
    others = await asyncio.gather(
        engine.query(question="b", settings=settings),
        engine.query(question="c", settings=constrained),
    )
    assert [len(r.token_ids) for r in others] == [20, 5]
    assert re.fullmatch("[0-9]{5}", others[1].output["answer"])
    assert not slow.done()
    held.open.set()
    assert re.fullmatch("[ab]{3}held", (await slow).output["answer"])


async def test_a_request_ends_while_its_mask_is_computed(make_engine, shared_grammars):
    engine = make_engine()
    constraint = read_constraint({"regex": "[ab]{4}held"})
    grammar = shared_grammars.compile(constraint)
    held = Held(grammar.template)
    grammar = replace(grammar, template=held)
    inside(engine).submitter.constraints.keep(constraint, "", grammar)
    settings = {**GREEDY, "constraint": {"regex": "[ab]{4}held"}}
    stream = await engine.query(question="a", settings=settings, stream=True)
    await asyncio.to_thread(held.entered.wait, 60)
    await stream.aclose()
    other = await engine.query(question="b", settings={**GREEDY, "max_tokens": 6})
    held.open.set()
    assert len(other.token_ids) == 6


@pytest.fixture
def costly_masks(monkeypatch):
    """Each mask counts as 50 ms of processor time."""
    ticks = itertools.count()
    threads = MaskThreads(cpu_clock=lambda: 0.05 * next(ticks))
    model = parse_model_config(SMALL, family="moondream3")
    grammars = Grammars(ByteCodec(), model.text.vocab_size, model.ids.eos_id, threads)
    monkeypatch.setattr(submitter_module, "Grammars", lambda *arguments, **options: grammars)


async def test_a_request_that_takes_too_long_to_follow_fails_alone(make_engine, costly_masks):
    engine = make_engine()
    settings = {**GREEDY, "max_tokens": 100}
    other = asyncio.create_task(engine.query(question="b", settings=settings))
    stream = await engine.query(
        question="a", settings={**settings, "constraint": {"regex": "[ab]{100}"}}, stream=True
    )
    with pytest.raises(InvalidRequest, match=r"following it took 2\.\d s.*limit is 2 s") as caught:
        await stream.result()
    assert caught.value.field == "constraint.regex"
    assert len((await other).token_ids) == 100


async def test_a_library_that_panics_fails_its_request_alone(make_engine, monkeypatch, caplog):
    """Panics of the library are no Exceptions."""
    engine = make_engine()

    def panic(matcher):
        raise BaseException("a panic")

    monkeypatch.setattr(Matcher, "compute", panic)
    with pytest.raises(RuntimeFailure, match="failed to follow the constraint"):
        await engine.query(
            question="a", settings={**GREEDY, "constraint": {"regex": "[ab]{4}panic"}}
        )
    assert "a panic" in caplog.text
    other = await engine.query(question="b", settings={**GREEDY, "max_tokens": 6})
    assert len(other.token_ids) == 6


async def test_a_principal_that_takes_too_long_is_refused_and_others_are_not(
    make_engine, costly_masks, monkeypatch
):
    monkeypatch.setattr(mask_threads, "REFILL", 1e-9)
    engine = make_engine()
    settings = {**GREEDY, "max_tokens": 36, "constraint": {"regex": "[ab]{100}"}}

    async def ask(principal):
        # 35 masks, less than what a request may have.
        stream = await engine.submit(
            "query", None, {"question": "a"}, settings, principal=principal
        )
        return await stream.result()

    answered = 0
    with pytest.raises(ConstraintsCostly, match=r"constraint.regex .* of rude used 10\.") as caught:
        for _ in range(100):
            await ask("rude")
            answered += 1
    assert answered == 5, "of 1.75 s each, and 10 s are the limit"
    assert caught.value.quota.principal == "rude" and caught.value.retry_after_s >= 1
    assert len((await ask("polite")).token_ids) == 36


@pytest.fixture
async def held_compiler(make_engine, monkeypatch):
    """An engine whose compiler waits for ``opened``, and what it has compiled."""
    engine, opened, compiled = make_engine(), threading.Event(), []
    compiler = inside(engine).submitter.constraints
    grammars = compiler.grammars

    def compile(constraint):
        assert opened.wait(60)
        compiled.append(constraint.source[0])
        return grammars.compile(constraint)

    held = types.SimpleNamespace(compile=compile, close=grammars.close)
    monkeypatch.setattr(compiler, "grammars", held)

    async def ask(choice, principal=""):
        settings = {**GREEDY, "constraint": {"choices": [choice]}}
        stream = await engine.submit(
            "query", None, {"question": "a"}, settings, principal=principal
        )
        return (await stream.result()).output["answer"]

    return types.SimpleNamespace(
        compiler=compiler, opened=opened, compiled=compiled, ask=ask, engine=engine
    )


async def test_principals_take_turns_to_have_constraints_compiled(held_compiler):
    """60 of one principal, of which none is refused, and one of another, which is compiled next."""
    ask, queue = held_compiler.ask, held_compiler.compiler.queue
    rude = [asyncio.create_task(ask(f"rude {i}", "rude")) for i in range(60)]
    await until(lambda: len(queue) == 59)
    polite = asyncio.create_task(ask("polite", "polite"))
    shared = asyncio.create_task(ask("rude 50", "polite"))
    await until(lambda: len(queue) == 61)
    held_compiler.opened.set()
    assert [await polite, await shared] == ["polite", "rude 50"]
    assert await asyncio.gather(*rude) == [f"rude {i}" for i in range(60)]
    compiled = held_compiler.compiled
    assert compiled[:5] == ["rude 0", "rude 1", "polite", "rude 2", "rude 50"]
    assert sorted(compiled) == sorted([f"rude {i}" for i in range(60)] + ["polite"])


async def test_a_constraint_for_which_no_request_waits_is_not_compiled(held_compiler):
    ask, compiler = held_compiler.ask, held_compiler.compiler
    first, *ended = [asyncio.create_task(ask(f"{i}", "rude")) for i in range(40)]
    shared = asyncio.create_task(ask("5", "other"))
    await until(lambda: len(compiler.queue) == 40)
    for task in ended:
        task.cancel()
    await asyncio.gather(*ended, return_exceptions=True)
    assert len(compiler.queue) == 1 and len(compiler.jobs) == 2
    held_compiler.opened.set()
    assert [await first, await shared] == ["0", "5"]
    assert held_compiler.compiled == ["0", "5"]


async def test_the_engine_closes_while_constraints_wait(held_compiler):
    tasks = [asyncio.create_task(held_compiler.ask(f"{i}")) for i in range(3)]
    await until(lambda: len(held_compiler.compiler.queue) == 2)
    closing = asyncio.create_task(held_compiler.engine.shutdown(grace_s=0))
    await until(lambda: held_compiler.compiler.is_closed)
    held_compiler.opened.set()
    await closing
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in ended] == [EngineClosed] * 3


async def test_compiled_constraints_are_kept_and_shared(held_compiler, monkeypatch):
    monkeypatch.setattr(constraints, "MAX_CACHED", 3)
    held_compiler.opened.set()
    ask, compiled = held_compiler.ask, held_compiler.compiled
    await ask("mine", "polite")
    for i in range(5):
        await ask(f"{i}", "rude")
    assert await ask("mine", "polite") == await ask("mine", "rude") == "mine"
    assert await ask("4", "polite") == "4"
    assert compiled == ["mine", *"01234"]
    assert await ask("2", "rude") == "2"
    assert compiled == ["mine", *"01234", "2"]
