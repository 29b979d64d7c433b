"""Which requests fail when steps, skills, devices, threads or observers fail."""

import asyncio
import dataclasses
import threading

import pytest

import kestrel_engine
from kestrel_engine import (
    ContextLengthError,
    EngineClosed,
    RuntimeConfig,
    RuntimeFailure,
    SkillFault,
)
from kestrel_engine.skills import QuerySkill
from kestrel_engine.types.step import TokenRule
from tests.engine.fakes import GREEDY, IMAGE, Gate, Listener, SlowImage, fake_build, never_ends
from tests.engine.inside import inside
from tests.fake_runtime import FakeRuntime


class BrokenControl(QuerySkill):
    name = "broken control"

    def new_control(self, request, max_tokens, context):
        control = super().new_control(request, max_tokens, context)
        control.accept = lambda token: 1 / 0  # type: ignore[method-assign]
        return control


class BrokenRule(QuerySkill):
    """Its rule is asked for ahead, when the step before is launched."""

    name = "broken rule"

    def new_control(self, request, max_tokens, context):
        control = super().new_control(request, max_tokens, context)
        first = control.rule(0)
        control.rule = lambda index: first if index == 0 else 1 / 0  # type: ignore[method-assign]
        return control


class BrokenOutput(QuerySkill):
    name = "broken output"

    def new_output(self, request, context):
        output = super().new_output(request, context)
        output.push = lambda token: 1 / 0  # type: ignore[method-assign]
        return output


async def test_an_output_of_another_class_is_a_fault_of_the_skill(make_engine):
    class Other(QuerySkill):
        name = "other"

        def new_output(self, request, context):
            return object()

    engine = make_engine(skills=[Other()])
    with pytest.raises(SkillFault, match="SkillOutput"):
        await engine.submit("other", None, {"question": "a"}, GREEDY)
    assert engine.places.held == 0


@pytest.mark.parametrize("broken", [BrokenControl, BrokenRule, BrokenOutput])
async def test_a_broken_skill_fails_its_own_request_only(make_engine, broken):
    engine = make_engine(skills=[QuerySkill(), broken()])
    bad = await engine.submit(broken.name, None, {"question": "a"}, GREEDY)
    good = await engine.submit("query", None, {"question": "a"}, GREEDY)
    with pytest.raises(RuntimeFailure):
        await bad.result()
    assert (await good.result()).output["answer"]
    assert engine.num_requests == 0


class Essay(QuerySkill):
    """A plug-in with an argument of its own."""

    name = "essay"

    def build(self, arguments, settings, context):
        request = super().build({"question": arguments["topic"]}, settings, context)
        return dataclasses.replace(request, skill=self.name, prompt_field="topic")


class Demanding(QuerySkill):
    """A plug-in that no model can do."""

    name = "demanding"

    def can_run(self, model):
        return False


async def test_a_plug_in_names_its_own_argument_and_whether_a_model_can_do_it(make_engine):
    engine = make_engine(skills=[QuerySkill(), Essay(), Demanding()])
    assert engine.info.skills == ("query", "essay")
    with pytest.raises(ContextLengthError) as caught:
        await engine.submit("essay", None, {"topic": "x" * 300})
    assert caught.value.field == "topic"


def asking_for(rule, index):
    """A skill that gives ``rule`` for its token ``index``."""

    class Asking(QuerySkill):
        name = "asking"

        def new_control(self, request, max_tokens, context):
            control = super().new_control(request, max_tokens, context)
            usual = control.rule
            control.rule = lambda i: rule if i == index else usual(i)  # type: ignore[method-assign]
            return control

    return Asking()


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (TokenRule(allowed=()), "leaves no id to sample"),
        (TokenRule(suppressed=tuple(range(51200))), "leaves no id to sample"),
        (TokenRule(allowed=(51200,)), "ids are 0 to 51199"),
        (TokenRule(forced=6, read_coord=True), "can only give id 6"),
        ("any", "a rule is a TokenRule"),
    ],
)
async def test_a_rule_that_can_not_be_followed_fails_its_own_request_only(
    make_engine, fake_limits, rule, words, index
):
    skills = [QuerySkill(), asking_for(rule, index)]
    engine = make_engine(FakeRuntime(fake_limits, never_ends), skills=skills)
    good = await engine.submit("query", None, {"question": "a"}, GREEDY)
    bad = await engine.submit("asking", None, {"question": "a"}, GREEDY)
    with pytest.raises(SkillFault) as caught:
        await bad.result()
    assert words in str(caught.value)
    assert (await good.result()).output["answer"] == "aaaaaa"
    assert engine.num_requests == 0


async def test_a_prompt_beyond_the_vocabulary_is_refused(make_engine):
    class Beyond(QuerySkill):
        name = "beyond"

        def build(self, arguments, settings, context):
            return dataclasses.replace(
                super().build(arguments, settings, context), prompt_suffix=(51, 51200)
            )

    engine = make_engine(skills=[Beyond()])
    with pytest.raises(SkillFault, match="prompt holds 51200"):
        await engine.submit("beyond", None, {"question": "a"}, GREEDY)
    assert engine.num_requests == 0


async def test_a_row_that_is_not_finite_fails_its_request_only(make_engine, fake_limits, caplog):
    runtime = FakeRuntime(fake_limits, never_ends, cost=lambda plan: 0.005)
    engine = make_engine(runtime)
    settings = {"temperature": 0.0, "max_tokens": 40}
    streams = [
        await engine.query(question=f"{n}?", stream=True, settings=settings) for n in range(3)
    ]
    await anext(streams[1])
    (bad,) = (
        i for i, each in inside(engine).open_requests._open.items() if each.stream is streams[1]
    )
    runtime.bad_sequences.add(bad)
    with pytest.raises(RuntimeFailure, match="numbers that are not finite"):
        await streams[1].result()
    for stream in (streams[0], streams[2]):
        assert (await stream.result()).output["answer"] == 40 * "a"
    assert f"request {streams[1].request_id}: the model gave numbers" in caplog.text
    assert (await engine.query(question="1?", settings=settings)).output["answer"] == 40 * "a"


async def test_an_image_that_is_not_finite_fails_the_requests_about_it_and_is_encoded_anew(
    make_engine, fake_limits
):
    runtime = FakeRuntime(fake_limits, never_ends)
    engine = make_engine(runtime)
    good = await engine.query(IMAGE, "what?", settings=GREEDY)
    await engine.flush_caches()
    (key,) = {piece.image.key for plan in runtime.plans for piece in plan.encode}
    runtime.bad_images.add(key)
    other = engine.query(IMAGE // 2, "what?", settings=GREEDY)
    bad = engine.query(IMAGE, "what?", settings=GREEDY)
    failed, answered = await asyncio.gather(bad, other, return_exceptions=True)
    assert isinstance(failed, RuntimeFailure)
    assert answered.output["answer"]
    again = await engine.query(IMAGE, "what?", settings=GREEDY)
    assert again.token_ids == good.token_ids and again.metrics.cached_tokens == 0


async def test_a_skill_that_fails_to_begin_holds_nothing(make_engine):
    class Unborn(QuerySkill):
        name = "unborn"

        def new_output(self, request, context):
            raise ZeroDivisionError

    engine = make_engine(skills=[Unborn()])
    with pytest.raises(ZeroDivisionError):
        await engine.submit("unborn", None, {"question": "a"}, GREEDY)
    assert engine.num_requests == 0


async def test_a_hung_device_fails_those_who_wait_and_tells_where_it_hangs(
    moved_clock, fake_limits, caplog
):
    gate = Gate()
    config = RuntimeConfig(max_batch_size=3, step_timeout_s=300)
    built = fake_build(config, FakeRuntime(fake_limits, gate))
    listener = Listener()
    engine = kestrel_engine.InferenceEngine(config, built, observer=listener)
    streams = [await engine.submit("query", None, {"question": "a"}, GREEDY) for _ in range(4)]
    await asyncio.to_thread(gate.entered.wait, 60)
    moved_clock.advance(301)
    for stream in streams:
        with pytest.raises(
            RuntimeFailure, match=r"no step ended for 3\d\d\.\d s, the limit is 300\.0 s"
        ):
            await stream.result()
    assert [e.error for e in listener.requests] == 4 * ["RuntimeFailure"]
    assert min(e.metrics.total_time_ms for e in listener.requests) >= 301_000
    assert not engine.is_ready
    with pytest.raises(EngineClosed, match="failed"):
        await engine.query(question="a")
    assert "kestrel-steps" in caplog.text
    assert "assert self.open.wait(60)" in caplog.text
    gate.open.set()
    await engine.shutdown()


async def test_a_step_that_hangs_when_its_requests_have_ended_is_noticed(moved_clock, fake_limits):
    """Later requests wait for it in the queue of commands, where the counts of the scheduler do not see them."""
    hangs, goes_on = threading.Event(), threading.Event()

    def cost(plan):
        if len(runtime.plans) > 1:  # Launched before the first step has said that the request ends.
            hangs.set()
            assert goes_on.wait(60)
        return 0.0

    runtime = FakeRuntime(fake_limits, lambda fed: 0, cost=cost)
    config = RuntimeConfig(max_batch_size=3, step_timeout_s=300)
    engine = kestrel_engine.InferenceEngine(config, fake_build(config, runtime))
    assert (await engine.query(question="a", settings=GREEDY)).finish_reason == "stop"
    await asyncio.to_thread(hangs.wait, 60)
    assert engine.stats.running == engine.num_requests == 0
    later = await engine.submit("query", None, {"question": "a"}, GREEDY)
    moved_clock.advance(301)
    with pytest.raises(
        RuntimeFailure, match=r"no step ended for 3\d\d\.\d s, the limit is 300\.0 s"
    ):
        await later.result()
    goes_on.set()
    await engine.shutdown()


async def test_a_dead_step_thread_is_noticed(make_engine, fake_limits):
    runtime = FakeRuntime(fake_limits)
    engine = make_engine(runtime)
    runtime.fail_next = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(RuntimeFailure, match="the engine failed"):
        await engine.query(question="a")
    await asyncio.to_thread(inside(engine).loop.thread.join, 60)
    assert not engine.is_ready
    with pytest.raises(EngineClosed):
        await engine.query(question="a")


async def test_a_image_prepared_while_the_engine_died_is_not_waited_for(
    make_engine, fake_limits, tmp_path
):
    slow = SlowImage(tmp_path)
    runtime = FakeRuntime(fake_limits)
    engine = make_engine(runtime)
    late = asyncio.create_task(engine.query(slow, "what?", settings=GREEDY))
    await asyncio.to_thread(slow.entered.wait, 60)
    runtime.fail_next = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(RuntimeFailure):
        await engine.query(question="a")
    await asyncio.to_thread(inside(engine).loop.thread.join, 60)
    slow.open.set()
    with pytest.raises(EngineClosed):
        await late
    assert engine.num_requests == 0


async def test_a_step_that_cannot_be_launched_fails_its_requests_and_the_engine_goes_on(
    make_engine, fake_limits
):
    runtime = FakeRuntime(fake_limits, cost=lambda plan: 0.005)
    engine = make_engine(runtime)
    running = await engine.query(question="a", stream=True, settings={"max_tokens": 50})
    await anext(running)
    runtime.fail_launch = RuntimeError("out of memory")
    with pytest.raises(RuntimeFailure):
        await running.result()
    assert (await engine.query(IMAGE, "what?", settings=GREEDY)).output["answer"]


class Spiteful:
    def on_step(self, event):
        raise ValueError("no")

    def on_request(self, event):
        raise ValueError("no")

    def on_image(self, event):
        raise ValueError("no")


async def test_an_observer_that_raises_disturbs_nobody(make_engine, caplog):
    engine = make_engine(observer=Spiteful())
    assert (await engine.query(question="a", settings=GREEDY)).output["answer"]
    await engine.shutdown()
    assert "the observer failed on a step" in caplog.text
    assert "the observer failed on request" in caplog.text
