"""The engine's front on the fake runtime: results, streams, refusals, and its reports about itself."""

import threading

import pytest

import kestrel_engine
from kestrel_engine import (
    AdapterNotFound,
    ContextLengthError,
    EngineResult,
    ImageDecodeError,
    InvalidRequest,
    RuntimeConfig,
    RuntimeFailure,
    SkillUnavailable,
)
from kestrel_engine.preprocess.tokenizer import LONG_TEXT
from kestrel_engine.requests.request_check import RequestCheck
from tests.engine.fakes import GREEDY, IMAGE, Listener, fake_build
from tests.fake_runtime import FakeRuntime


async def test_query_gives_the_whole_result(make_engine):
    engine = make_engine()
    result = await engine.query(IMAGE, "what?", settings=GREEDY, request_id="mine")
    assert isinstance(result, EngineResult)
    assert result.request_id == "mine"
    assert isinstance(result.output["answer"], str)
    assert result.finish_reason == "length"
    assert len(result.token_ids) == 6
    assert result.image_size == (60, 40)
    metrics = result.metrics
    # BOS, 81 of the image, 3 of the template, 5 letters, 1 opener.
    assert metrics.input_tokens == 1 + 81 + 3 + 5 + 1
    assert metrics.output_tokens == 6
    assert metrics.total_time_ms >= metrics.ttft_ms >= metrics.preprocess_time_ms > 0
    assert metrics.processing_time_ms == pytest.approx(
        metrics.total_time_ms - metrics.queue_time_ms
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {"question": "x" * LONG_TEXT},
        {"question": "x", "history": [("y" * (LONG_TEXT // 2), "z" * (LONG_TEXT // 2))]},
    ],
)
async def test_a_long_text_is_encoded_beside_the_event_loop(make_engine, monkeypatch, arguments):
    threads = []
    check = RequestCheck.check

    def noted(self, request):
        threads.append(threading.current_thread() is threading.main_thread())
        return check(self, request)

    monkeypatch.setattr(RequestCheck, "check", noted)
    engine = make_engine()
    await engine.query(IMAGE, "short?", settings=GREEDY)
    with pytest.raises(ContextLengthError):
        await engine.submit("query", IMAGE, arguments, GREEDY)
    assert threads == [True, False]
    await engine.query(IMAGE, "short?", settings=GREEDY)


async def test_objects_come_as_soon_as_they_are_complete(make_engine):
    stream = await make_engine().detect(IMAGE, "cat", stream=True, settings={"max_objects": 4})
    updates = [update async for update in stream]
    objects = (await stream.result()).output["objects"]
    assert [u.object for u in updates if u.object] == objects
    assert [u.token_index for u in updates] == [3 * (i + 1) for i in range(len(objects))]


async def test_a_stream_knows_its_images_and_its_seed_before_its_result(make_engine):
    engine = make_engine(seed=5)
    async with await engine.submit("query", IMAGE, {"question": "a"}) as stream:
        known = stream.images, stream.seed
        result = await stream.result()
    assert known == (result.images, result.seed) and known[1] == 5
    assert [seen.size for seen in known[0]] == [(IMAGE.shape[1], IMAGE.shape[0])]


async def test_a_second_question_on_a_image_reports_what_was_cached(make_engine, fake_limits):
    runtime = FakeRuntime(fake_limits)
    engine = make_engine(runtime)
    first = await engine.query(IMAGE, "what?", settings=GREEDY)
    second = await engine.query(IMAGE, "where?", settings=GREEDY)
    other = await engine.submit("query", IMAGE, {"question": "what?"}, GREEDY, cache_salt="tenant")
    assert first.metrics.cached_tokens == 0
    assert second.metrics.cached_tokens >= 82
    assert (await other.result()).metrics.cached_tokens == 0
    keys = {piece.image.key for plan in runtime.plans for piece in plan.encode}
    assert len(keys) == 2, "the tenant's picture is encoded for it alone"
    uncached = make_engine(prefix_cache=False)
    await uncached.query(IMAGE, "what?", settings=GREEDY)
    again = await uncached.query(IMAGE, "where?", settings=GREEDY)
    assert again.metrics.cached_tokens == 0
    assert again.output == second.output


async def test_an_observer_hears_of_every_step_and_request(fake_limits):
    listener = Listener()
    config = RuntimeConfig(max_batch_size=3)
    runtime = FakeRuntime(fake_limits)
    async with kestrel_engine.InferenceEngine(
        config, fake_build(config, runtime), observer=listener
    ) as engine:
        await engine.query(IMAGE, "what?", settings=GREEDY, request_id="r1")
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
    assert sum(e.num_crops for e in listener.steps) == 1  # Its tile equals its overview.
    assert sum(e.num_decode for e in listener.steps if "r1" in e.request_ids) == 5
    assert {i for e in listener.steps for i in e.encoded_request_ids} == {"r1"}
    assert (event.num_crops, event.image_size) == (2, (IMAGE.shape[1], IMAGE.shape[0]))
    assert [e.failed for e in listener.steps].count(True) == 1
    assert [e.step_id for e in listener.steps] == sorted(e.step_id for e in listener.steps)


async def test_requests_that_do_not_fit_are_refused_with_the_numbers(make_engine):
    engine = make_engine()
    with pytest.raises(ContextLengthError, match=r"209 positions left.*91.*300") as caught:
        await engine.query(IMAGE, "what?", settings={"max_tokens": 250})
    assert caught.value.field == "max_tokens"
    with pytest.raises(ContextLengthError) as caught:
        await engine.query(question="x" * 300)
    assert caught.value.field == "question"
    # A default shrinks instead.
    assert (await engine.query(IMAGE, "what?")).metrics.output_tokens <= 209


async def test_a_request_may_not_ask_for_more_tokens_than_the_engine_gives(make_engine):
    engine = make_engine(max_new_tokens=10)
    with pytest.raises(InvalidRequest, match="11 exceeds this engine's limit of 10"):
        await engine.query(question="a", settings={"max_tokens": 11})
    assert (
        await engine.query(question="a", settings={"temperature": 0})
    ).metrics.output_tokens <= 10


@pytest.mark.parametrize(
    ("skill", "key", "each"), [("detect", "objects", 3), ("point", "points", 2)]
)
async def test_objects_end_at_max_tokens_and_at_the_engines_limit(
    make_engine, fake_limits, skill, key, each
):
    async def ask(engine, **settings):
        return await getattr(engine, skill)(IMAGE, "cat", settings=settings)

    runtime = FakeRuntime(fake_limits, lambda fed: 5)
    engine = make_engine(runtime, max_new_tokens=10)
    cut = await ask(engine, max_tokens=7)
    assert (len(cut.output[key]), cut.finish_reason) == (7 // each, "length")
    assert cut.metrics.output_tokens == 7
    # Defaults and max_objects shrink, a number of tokens that the caller names is refused.
    for settings in ({}, {"max_objects": 2000}):
        result = await ask(engine, **settings)
        assert (len(result.output[key]), result.finish_reason) == (10 // each, "length")
    with pytest.raises(InvalidRequest, match="11 exceeds this engine's limit of 10"):
        await ask(engine, max_tokens=11)
    result = await ask(engine, max_tokens=10, max_objects=2)
    assert (len(result.output[key]), result.finish_reason) == (2, "length")


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
        (lambda e: e.query(None, "q", settings={"adapter": "x@1"}), AdapterNotFound, "adapter"),
        (lambda e: e.query(None, "q", settings={"adapter": 1}), InvalidRequest, "adapter"),
        (
            lambda e: e.submit("query", None, {"question": "q"}, adapter="x@1"),
            AdapterNotFound,
            "adapter",
        ),
        (lambda e: e.submit("paint"), SkillUnavailable, "skill"),
        (lambda e: e.submit("query", priority="urgent"), InvalidRequest, "priority"),
        (lambda e: e.submit("query", timeout_s=float("nan")), InvalidRequest, "timeout_s"),
        (lambda e: e.prepare_image(IMAGE, timeout_s="5"), InvalidRequest, "timeout_s"),
    ],
)
async def test_bad_requests_name_their_field_and_hold_nothing(make_engine, call, error, field):
    engine = make_engine()
    with pytest.raises(error) as caught:
        await call(engine)
    assert caught.value.field == field
    assert engine.num_requests == 0


def test_dtype_may_be_a_torch_dtype_or_its_name():
    import torch

    assert (
        RuntimeConfig(dtype=torch.bfloat16).dtype == RuntimeConfig(dtype="bf16").dtype == "bfloat16"
    )


def test_the_public_names_are_these():
    from kestrel_engine import engine
    from kestrel_engine.config import runtime
    from kestrel_engine.skills import base

    for module in (engine, base):
        assert module.EngineResult is kestrel_engine.EngineResult
        assert module.EngineStream is kestrel_engine.EngineStream
    assert base.SkillSpec is kestrel_engine.SkillSpec
    assert runtime.RuntimeConfig is kestrel_engine.RuntimeConfig
    assert engine.InferenceEngine is kestrel_engine.InferenceEngine
