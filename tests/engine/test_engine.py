"""The engine's front on the fake runtime: results, streams, cancellation, pressure, failure, shutdown."""

import asyncio
import subprocess
import sys
import threading

import numpy as np
import pytest

import kestrel_engine
from kestrel_engine import (
    ConfigError,
    ContextLengthError,
    DeadlineExceeded,
    EngineClosed,
    EngineOverloaded,
    EngineResult,
    EngineStream,
    ImageDecodeError,
    InvalidRequest,
    QueueTimeout,
    RuntimeConfig,
    RuntimeFailure,
    SkillRegistry,
    SkillUnavailable,
)
from kestrel_engine.preprocess import pool
from kestrel_engine.preprocess.crops import prepare
from kestrel_engine.runtime.fake import FakeRuntime
from kestrel_engine.skills import QuerySkill
from tests.engine.fakes import fake_build

PICTURE = np.full((40, 60, 3), 200, np.uint8)
GREEDY = {"temperature": 0.0, "max_tokens": 6}


def never_ends(fed):
    return 100 + 97


class Gate:
    """A script that holds the step thread until it is opened."""

    def __init__(self):
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self, fed):
        self.entered.set()
        assert self.open.wait(20)
        return 100 + 97


async def test_query_gives_the_whole_result(make_engine):
    engine = make_engine()
    result = await engine.query(PICTURE, "what?", settings=GREEDY, request_id="mine")
    assert isinstance(result, EngineResult)
    assert result.request_id == "mine"
    assert isinstance(result.output["answer"], str)
    assert result.finish_reason == "length"
    assert len(result.token_ids) == 6
    assert result.image_size == (60, 40)
    metrics = result.metrics
    # BOS, 81 of the picture, 3 of the template, 5 letters, 1 opener.
    assert metrics.input_tokens == 1 + 81 + 3 + 5 + 1
    assert metrics.output_tokens == 6
    assert metrics.total_time_ms >= metrics.ttft_ms >= metrics.preprocess_time_ms > 0
    assert metrics.processing_time_ms == pytest.approx(
        metrics.total_time_ms - metrics.queue_time_ms
    )


async def test_all_skills_share_a_batch_and_give_what_each_gives_alone(make_engine, fake_limits):
    calls = {
        "query": {"question": "how many?"},
        "caption": {"length": "long"},
        "point": {"object": "cat"},
        "detect": {"object": "dog"},
        "segment": {"object": "bird"},
    }

    async def run(engine, names):
        streams = []
        for name in names:
            settings = {"max_objects": 3} if name in ("point", "detect") else GREEDY
            streams.append(await engine.submit(name, PICTURE, calls[name], settings))
        return {name: (await s.result()).output for name, s in zip(names, streams, strict=True)}

    runtime = FakeRuntime(fake_limits, cost=lambda plan: 0.01)
    together = await run(make_engine(runtime), list(calls))
    assert max(len(plan.decode) for plan in runtime.plans) == fake_limits.max_batch_size
    for name in calls:
        assert (await run(make_engine(), [name]))[name] == together[name]


async def test_stream_deltas_join_to_the_answer(make_engine):
    stream = await make_engine().query(PICTURE, "what?", stream=True, settings={"max_tokens": 40})
    assert isinstance(stream, EngineStream)
    updates = [update async for update in stream]
    result = await stream.result()
    assert "".join(u.text for u in updates) == result.output["answer"]
    assert [u.token_index for u in updates] == sorted(u.token_index for u in updates)
    assert {u.request_id for u in updates} == {result.request_id}


async def test_objects_come_as_soon_as_they_are_complete(make_engine):
    stream = await make_engine().detect(PICTURE, "cat", stream=True, settings={"max_objects": 4})
    updates = [update async for update in stream]
    objects = (await stream.result()).output["objects"]
    assert [u.object for u in updates if u.object] == objects
    assert [u.token_index for u in updates] == [3 * (i + 1) for i in range(len(objects))]


async def test_a_seed_decides_and_is_reported(make_engine):
    engine = make_engine()
    assert (await engine.query(question="a", settings={"seed": 7, "max_tokens": 2})).seed == 7
    drawn = {(await engine.query(question="a", settings={"max_tokens": 2})).seed for _ in range(3)}
    assert len(drawn) == 3
    configured = make_engine(seed=5)
    seeds = [
        (await configured.query(question="a", settings={"max_tokens": 2})).seed for _ in range(2)
    ]
    assert seeds == [5, 6]


async def test_aclose_cancels_and_frees(make_engine, fake_limits):
    runtime = FakeRuntime(fake_limits, never_ends, cost=lambda plan: 0.001)
    engine = make_engine(runtime)
    stream = await engine.query(question="go on", stream=True, settings={"max_tokens": 200})
    assert (await anext(stream)).text
    await stream.aclose()
    assert engine.num_requests == 0
    result = await stream.result()
    assert result.finish_reason == "cancelled"
    assert result.output["answer"].startswith("a")
    steps = len(runtime.plans)
    await asyncio.sleep(0.05)
    assert len(runtime.plans) <= steps + 1
    # All pages are back: a request that needs most of the pool is served at once.
    await engine.query(question="x" * 200, settings={"max_tokens": 60})


async def test_a_cancelled_caller_frees_its_request(make_engine, fake_limits):
    engine = make_engine(FakeRuntime(fake_limits, never_ends, cost=lambda plan: 0.001))
    task = asyncio.create_task(engine.query(question="go on", settings={"max_tokens": 250}))
    while engine.num_requests == 0:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.num_requests == 0


async def test_the_queue_is_bounded(make_engine, fake_limits):
    gate = Gate()
    engine = make_engine(FakeRuntime(fake_limits, gate), max_queue=2)
    streams = [
        await engine.submit("query", None, {"question": "a"}, {"max_tokens": 1}) for _ in range(5)
    ]
    with pytest.raises(EngineOverloaded, match="max_queue=2"):
        await engine.submit("query", None, {"question": "a"})
    gate.open.set()
    for stream in streams:
        await stream.result()
    await engine.query(question="a", settings={"max_tokens": 1})


async def test_a_failed_step_fails_its_requests_and_the_engine_goes_on(make_engine, fake_limits):
    runtime = FakeRuntime(fake_limits)
    engine = make_engine(runtime)
    runtime.fail_next = RuntimeError("device lost")
    with pytest.raises(RuntimeFailure) as caught:
        await engine.query(question="a", settings=GREEDY)
    assert "device lost" not in str(caught.value)
    assert (await engine.query(question="a", settings=GREEDY)).output["answer"]


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


@pytest.mark.parametrize("broken", [BrokenControl, BrokenRule, BrokenOutput])
async def test_a_broken_skill_fails_its_own_request_only(fake_limits, broken):
    config = RuntimeConfig(max_batch_size=3)
    skills = SkillRegistry([QuerySkill(), broken()])
    built = fake_build(config, FakeRuntime(fake_limits))
    async with kestrel_engine.InferenceEngine(config, built, skills) as engine:
        bad = await engine.submit(broken.name, None, {"question": "a"}, GREEDY)
        good = await engine.submit("query", None, {"question": "a"}, GREEDY)
        with pytest.raises(RuntimeFailure):
            await bad.result()
        assert (await good.result()).output["answer"]
        assert engine.num_requests == 0


async def test_a_skill_that_fails_to_begin_holds_nothing(fake_limits):
    class Unborn(QuerySkill):
        name = "unborn"

        def new_output(self, request, context):
            raise ZeroDivisionError

    config = RuntimeConfig(max_batch_size=3)
    built = fake_build(config, FakeRuntime(fake_limits))
    async with kestrel_engine.InferenceEngine(config, built, SkillRegistry([Unborn()])) as engine:
        with pytest.raises(ZeroDivisionError):
            await engine.submit("unborn", None, {"question": "a"}, GREEDY)
        assert engine.num_requests == 0


async def test_a_hung_device_fails_those_who_wait_and_tells_where_it_hangs(fake_limits, caplog):
    gate = Gate()
    config = RuntimeConfig(max_batch_size=3, step_timeout_s=0.3)
    built = fake_build(config, FakeRuntime(fake_limits, gate))
    listener = Listener()
    engine = kestrel_engine.InferenceEngine(config, built, observer=listener)
    streams = [await engine.submit("query", None, {"question": "a"}, GREEDY) for _ in range(4)]
    for stream in streams:
        with pytest.raises(RuntimeFailure, match="no step ended for"):
            await stream.result()
    assert [e.error for e in listener.requests] == 4 * ["RuntimeFailure"]
    assert all(e.metrics.total_time_ms >= 300 for e in listener.requests)
    assert not engine.is_ready
    with pytest.raises(EngineClosed, match="failed"):
        await engine.query(question="a")
    assert "kestrel-steps" in caplog.text
    assert "assert self.open.wait(20)" in caplog.text
    gate.open.set()
    await engine.shutdown()


async def test_a_dead_step_thread_is_noticed(make_engine, fake_limits):
    runtime = FakeRuntime(fake_limits)
    engine = make_engine(runtime)
    runtime.fail_next = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(RuntimeFailure, match="the engine failed"):
        await engine.query(question="a")
    for _ in range(200):
        if not engine.is_ready:
            break
        await asyncio.sleep(0.01)
    assert not engine.is_ready
    with pytest.raises(EngineClosed):
        await engine.query(question="a")


async def test_a_picture_prepared_while_the_engine_died_is_not_waited_for(
    make_engine, fake_limits, monkeypatch
):
    preparing, go = threading.Event(), threading.Event()

    def slowly(decoded, vision, *, threads):
        preparing.set()
        assert go.wait(20)
        return prepare(decoded, vision, threads=threads)

    monkeypatch.setattr(pool, "prepare", slowly)
    runtime = FakeRuntime(fake_limits)
    engine = make_engine(runtime)
    late = asyncio.create_task(engine.query(PICTURE, "what?", settings=GREEDY))
    await asyncio.to_thread(preparing.wait, 20)
    runtime.fail_next = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(RuntimeFailure):
        await engine.query(question="a")
    while engine.is_ready:
        await asyncio.sleep(0.01)
    go.set()
    with pytest.raises(EngineClosed):
        await asyncio.wait_for(late, 10)
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
    assert (await engine.query(PICTURE, "what?", settings=GREEDY)).output["answer"]


class Spiteful:
    def on_step(self, event):
        raise ValueError("no")

    def on_request(self, event):
        raise ValueError("no")


async def test_an_observer_that_raises_disturbs_nobody(fake_limits, caplog):
    config = RuntimeConfig(max_batch_size=3)
    built = fake_build(config, FakeRuntime(fake_limits))
    async with kestrel_engine.InferenceEngine(config, built, observer=Spiteful()) as engine:
        assert (await engine.query(question="a", settings=GREEDY)).output["answer"]
    assert "the observer failed on a step" in caplog.text
    assert "the observer failed on request" in caplog.text


async def test_a_deadline_in_the_queue_drops_the_request_before_any_compute(
    make_engine, fake_limits
):
    gate = Gate()
    runtime = FakeRuntime(fake_limits, gate)
    engine = make_engine(runtime)
    running = [await engine.submit("query", None, {"question": "a"}, GREEDY) for _ in range(3)]
    await asyncio.to_thread(gate.entered.wait, 20)
    waiting = await engine.submit("query", None, {"question": "zzz"}, GREEDY, timeout_s=0.05)
    await asyncio.sleep(0.1)
    gate.open.set()
    with pytest.raises(DeadlineExceeded):
        await waiting.result()
    for stream in running:
        await stream.result()
    fed = [token for plan in runtime.plans for row in plan.prefill for token in row.tokens]
    assert 100 + ord("z") not in fed


async def test_the_engines_own_bound_on_waiting_has_its_own_error(make_engine, fake_limits):
    gate = Gate()
    engine = make_engine(FakeRuntime(fake_limits, gate), max_queue_wait_s=0.05)
    streams = [await engine.submit("query", None, {"question": "a"}, GREEDY) for _ in range(4)]
    await asyncio.sleep(0.1)
    gate.open.set()
    ends = await asyncio.gather(*(s.result() for s in streams), return_exceptions=True)
    assert isinstance(ends[0], EngineResult)
    assert isinstance(ends[3], QueueTimeout)
    assert "max_queue_wait_s" in str(ends[3])


async def test_priorities_decide_who_is_next(make_engine, fake_limits):
    gate = Gate()
    engine = make_engine(FakeRuntime(fake_limits, gate))
    for _ in range(3):
        await engine.submit("query", None, {"question": "a"}, {"max_tokens": 1})
    await asyncio.to_thread(gate.entered.wait, 20)
    done = []

    async def ask(priority):
        stream = await engine.submit(
            "query", None, {"question": priority}, {"max_tokens": 1}, priority=priority
        )
        await stream.result()
        done.append(priority)

    tasks = []
    for priority in ["low", "low", "low", "normal", "normal", "normal", "high", "high", "high"]:
        tasks.append(asyncio.create_task(ask(priority)))
        await asyncio.sleep(0)
    gate.open.set()
    await asyncio.gather(*tasks)
    assert done == ["high"] * 3 + ["normal"] * 3 + ["low"] * 3
    with pytest.raises(InvalidRequest, match="high, normal, low"):
        await engine.submit("query", None, {"question": "a"}, priority="urgent")


async def test_a_second_question_on_a_picture_reports_what_was_cached(make_engine, fake_limits):
    runtime = FakeRuntime(fake_limits)
    engine = make_engine(runtime)
    first = await engine.query(PICTURE, "what?", settings=GREEDY)
    second = await engine.query(PICTURE, "where?", settings=GREEDY)
    other = await engine.submit(
        "query", PICTURE, {"question": "what?"}, GREEDY, cache_salt="tenant"
    )
    assert first.metrics.cached_tokens == 0
    assert second.metrics.cached_tokens >= 82
    assert (await other.result()).metrics.cached_tokens == 0
    keys = {piece.image.key for plan in runtime.plans for piece in plan.encode}
    assert len(keys) == 2, "the tenant's picture is encoded for it alone"
    uncached = make_engine(prefix_cache=False)
    await uncached.query(PICTURE, "what?", settings=GREEDY)
    again = await uncached.query(PICTURE, "where?", settings=GREEDY)
    assert again.metrics.cached_tokens == 0
    assert again.output == second.output


class Listener:
    def __init__(self):
        self.steps, self.requests = [], []

    def on_step(self, event):
        self.steps.append(event)

    def on_request(self, event):
        self.requests.append(event)


async def test_an_observer_hears_of_every_step_and_request(fake_limits):
    listener = Listener()
    config = RuntimeConfig(max_batch_size=3)
    runtime = FakeRuntime(fake_limits)
    async with kestrel_engine.InferenceEngine(
        config, fake_build(config, runtime), observer=listener
    ) as engine:
        await engine.query(PICTURE, "what?", settings=GREEDY, request_id="r1")
        stream = await engine.query(question="a", stream=True, request_id="r2")
        await stream.aclose()
        runtime.fail_next = RuntimeError("x")
        with pytest.raises(RuntimeFailure):
            await engine.query(question="a", settings=GREEDY, request_id="r3")
        stats = engine.stats
    assert (stats.running, stats.waiting, stats.pages_total) == (0, 0, fake_limits.num_pages)
    ended = {e.request_id: (e.skill, e.finish_reason, e.error) for e in listener.requests}
    assert ended["r1"] == ("query", "length", "")
    assert ended["r2"][1:] == ("cancelled", "")
    assert ended["r3"] == ("query", "", "RuntimeFailure")
    event = next(e for e in listener.requests if e.request_id == "r1")
    assert event.accepted_at <= event.prepared_at <= event.scheduled_at
    assert event.scheduled_at <= event.first_token_at <= event.finished_at
    assert sum(e.num_crops for e in listener.steps) == 2
    assert sum(e.num_decode for e in listener.steps if "r1" in e.request_ids) == 5
    assert {i for e in listener.steps for i in e.encoded_request_ids} == {"r1"}
    assert (event.num_crops, event.image_size) == (2, (PICTURE.shape[1], PICTURE.shape[0]))
    assert [e.failed for e in listener.steps].count(True) == 1
    assert [e.step_id for e in listener.steps] == sorted(e.step_id for e in listener.steps)


async def test_shutdown_lets_running_requests_end_then_refuses(make_engine, fake_limits):
    engine = make_engine(FakeRuntime(fake_limits, cost=lambda plan: 0.002))
    stream = await engine.query(question="a", stream=True, settings=GREEDY)
    await engine.shutdown()
    assert (await stream.result()).finish_reason
    assert not engine.is_ready
    with pytest.raises(EngineClosed):
        await engine.query(question="a")
    await engine.shutdown()


async def test_shutdown_lets_a_picture_be_prepared_and_asked_about(make_engine, monkeypatch):
    preparing, go = threading.Event(), threading.Event()

    def slowly(decoded, vision, *, threads):
        preparing.set()
        assert go.wait(20)
        return prepare(decoded, vision, threads=threads)

    monkeypatch.setattr(pool, "prepare", slowly)
    engine = make_engine()
    accepted = asyncio.create_task(engine.query(PICTURE, "what?", settings=GREEDY))
    await asyncio.to_thread(preparing.wait, 20)
    stopping = asyncio.create_task(engine.shutdown(grace_s=20))
    await asyncio.sleep(0)
    with pytest.raises(EngineClosed):
        await engine.query(question="a")
    go.set()
    assert (await accepted).output["answer"]
    await stopping


async def test_shutdown_does_not_wait_for_a_device_that_hangs(fake_limits):
    gate = Gate()
    config = RuntimeConfig(max_batch_size=3, step_timeout_s=0.3)
    engine = kestrel_engine.InferenceEngine(
        config, fake_build(config, FakeRuntime(fake_limits, gate))
    )
    stream = await engine.submit("query", None, {"question": "a"}, GREEDY)
    await asyncio.to_thread(gate.entered.wait, 20)
    await asyncio.wait_for(engine.shutdown(grace_s=0), 10)
    with pytest.raises(EngineClosed):
        await stream.result()
    gate.open.set()


async def test_shutdown_without_grace_fails_what_is_unfinished(make_engine, fake_limits):
    runtime = FakeRuntime(fake_limits, never_ends, cost=lambda plan: 0.005)
    engine = make_engine(runtime)
    streams = [
        await engine.submit("query", None, {"question": "a"}, {"max_tokens": 250}) for _ in range(6)
    ]
    await engine.shutdown(grace_s=0)
    for stream in streams:
        with pytest.raises(EngineClosed):
            await stream.result()
    assert runtime.closed
    assert engine.num_requests == 0


def test_a_program_that_ends_without_shutdown_leaves_no_step_running():
    program = """
import asyncio, logging
from kestrel_engine import InferenceEngine, RuntimeConfig
from kestrel_engine.runtime.fake import FakeRuntime
from kestrel_engine.step import RuntimeLimits
from tests.engine.fakes import fake_build

class Told(FakeRuntime):
    def close(self):
        print("closed")

async def main():
    config = RuntimeConfig()
    limits = RuntimeLimits(
        num_pages=200, page_size=2, max_batch_size=3, max_seq_length=300, vocab_size=400
    )
    runtime = Told(limits, lambda fed: 197, cost=lambda plan: 0.01)
    engine = InferenceEngine(config, fake_build(config, runtime))
    await engine.submit("query", None, {"question": "a"}, {"max_tokens": 250})
    raise SystemExit(3)

asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (3, "closed\n"), ended.stderr


async def test_requests_that_do_not_fit_are_refused_with_the_numbers(make_engine):
    engine = make_engine()
    with pytest.raises(ContextLengthError, match=r"209 positions left.*91.*300") as caught:
        await engine.query(PICTURE, "what?", settings={"max_tokens": 250})
    assert caught.value.field == "max_tokens"
    with pytest.raises(ContextLengthError) as caught:
        await engine.query(question="x" * 300)
    assert caught.value.field == "question"
    # A default shrinks instead.
    assert (await engine.query(PICTURE, "what?")).metrics.output_tokens <= 209


async def test_a_request_may_not_ask_for_more_tokens_than_the_engine_gives(make_engine):
    engine = make_engine(max_new_tokens=10)
    with pytest.raises(InvalidRequest, match="11 exceeds this engine's limit of 10"):
        await engine.query(question="a", settings={"max_tokens": 11})
    assert (
        await engine.query(question="a", settings={"temperature": 0})
    ).metrics.output_tokens <= 10


@pytest.mark.parametrize(
    ("call", "error", "field"),
    [
        (lambda e: e.caption(None), InvalidRequest, "image"),
        (lambda e: e.caption(b""), ImageDecodeError, "image"),
        (lambda e: e.query(None, "q", spatial_refs=[[0.1, 0.1]]), InvalidRequest, "image"),
        (lambda e: e.query(None, ""), InvalidRequest, "question"),
        (lambda e: e.query(None, "q", request_id=""), InvalidRequest, "request_id"),
        (lambda e: e.query(None, "q", request_id="x" * 200), InvalidRequest, "request_id"),
        (lambda e: e.query(None, "q", settings={"top_p": 1.5}), InvalidRequest, "top_p"),
        (lambda e: e.query(None, "q", settings={"adapter": "x@1"}), InvalidRequest, "adapter"),
        (lambda e: e.submit("paint"), SkillUnavailable, "skill"),
    ],
)
async def test_bad_requests_name_their_field_and_hold_nothing(make_engine, call, error, field):
    engine = make_engine()
    with pytest.raises(error) as caught:
        await call(engine)
    assert caught.value.field == field
    assert engine.num_requests == 0


async def test_moondream2_does_not_offer_segment(make_engine):
    engine = make_engine(family="moondream2")
    assert "segment" not in engine.info.skills
    with pytest.raises(SkillUnavailable):
        await engine.segment(PICTURE, "cat")


async def test_reasoning_is_streamed_apart_from_the_answer(make_engine, fake_limits):
    def script(fed):
        return 3 if len(fed) > 12 and fed[-1] != 3 and 3 not in fed[6:] else 100 + 98

    engine = make_engine(FakeRuntime(fake_limits, script))
    stream = await engine.query(
        question="a", reasoning=True, stream=True, settings={"max_tokens": 20, "temperature": 0}
    )
    updates = [u async for u in stream]
    output = (await stream.result()).output
    assert "".join(u.reasoning for u in updates) == output["reasoning"]["text"] != ""
    assert "".join(u.text for u in updates) == output["answer"] != ""


@pytest.mark.parametrize(
    "settings",
    [
        {"max_batch_size": 0},
        {"dtype": "int8"},
        {"device": "tpu"},
        {"default_top_p": 0.0},
        {"default_temperature": float("inf")},
        {"page_size": 0},
        {"seed": -1},
        {"model": ""},
        {"max_queue": True},
    ],
)
def test_invalid_configurations_name_field_value_and_limit(settings):
    with pytest.raises(ConfigError) as caught:
        RuntimeConfig(**settings)
    (field,) = settings
    assert caught.value.field == field
    assert repr(settings[field]) in str(caught.value)


def test_dtype_may_be_a_torch_dtype_or_its_name():
    import torch

    assert (
        RuntimeConfig(dtype=torch.bfloat16).dtype == RuntimeConfig(dtype="bf16").dtype == "bfloat16"
    )


def test_importing_the_package_loads_no_torch():
    code = "import sys, kestrel_engine; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_public_names_are_these():
    assert set(kestrel_engine.__all__) >= {
        "InferenceEngine",
        "RuntimeConfig",
        "EngineResult",
        "SkillRegistry",
    }
    from kestrel_engine import config, engine
    from kestrel_engine.skills import base

    for module in (engine, base):
        assert module.EngineResult is kestrel_engine.EngineResult
        assert module.EngineStream is kestrel_engine.EngineStream
    assert base.SkillSpec is kestrel_engine.SkillSpec
    assert config.RuntimeConfig is kestrel_engine.RuntimeConfig
    assert engine.InferenceEngine is kestrel_engine.InferenceEngine
