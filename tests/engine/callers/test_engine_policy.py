"""Which requests are accepted, which wait, their order and their ends: bounds, deadlines, priorities, cancelling,
shutdown."""

import asyncio
import dataclasses
import sys

import pytest

import kestrel_engine
from kestrel_engine import (
    DeadlineExceeded,
    EngineClosed,
    InferenceEngine,
    RuntimeConfig,
)
from kestrel_engine.adapters.library import Lease
from kestrel_engine.types.adapter import Adapter
from tests.engine.fakes import GREEDY, Gate, SlowImage, fake_build, never_ends
from tests.fake_runtime import FakeRuntime
from tests.forking.process import run_forked
from tests.waiting import until


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
    # All pages are back: a request that needs most of the pool is served at once.
    await engine.query(question="x" * 200, settings={"max_tokens": 60})
    [cancelled] = (row.sequence_id for row in runtime.plans[0].prefill)
    later = [row for plan in runtime.plans[steps + 1 :] for row in (*plan.prefill, *plan.decode)]
    assert later and cancelled not in {row.sequence_id for row in later}


class SlowAdapters:
    """A library whose adapters are loaded when the test opens it."""

    def __init__(self):
        self.entered, self.open = asyncio.Event(), asyncio.Event()

    async def acquire(self, name):
        self.entered.set()
        await self.open.wait()
        return Lease(Adapter(name, name, {}, 0), lambda: None)

    async def close(self):
        pass


async def test_all_stages_of_a_request_share_one_deadline(moved_clock, fake_limits, tmp_path):
    """Each stage takes less than the deadline, and both together take more."""
    adapters, image = SlowAdapters(), SlowImage(tmp_path)
    config = RuntimeConfig(max_batch_size=3)
    built = dataclasses.replace(fake_build(config, FakeRuntime(fake_limits)), adapters=adapters)
    async with InferenceEngine(config, built) as engine:
        settings = {**GREEDY, "adapter": "own"}
        asked = engine.submit("query", image, {"question": "a"}, settings, timeout_s=1000)
        submitted = asyncio.create_task(asked)
        await adapters.entered.wait()
        moved_clock.advance(600)
        adapters.open.set()
        await asyncio.to_thread(image.entered.wait, 60)
        moved_clock.advance(600)
        await until(submitted.done)  # A stage with a deadline of its own would wait on.
        image.open.set()
        with pytest.raises(DeadlineExceeded, match="preprocessing"):
            await submitted


async def test_shutdown_lets_a_image_be_prepared_and_asked_about(make_engine, tmp_path):
    slow = SlowImage(tmp_path)
    engine = make_engine()
    accepted = asyncio.create_task(engine.query(slow, "what?", settings=GREEDY))
    await asyncio.to_thread(slow.entered.wait, 60)
    stopping = asyncio.create_task(engine.shutdown(grace_s=20))
    await asyncio.sleep(0)
    with pytest.raises(EngineClosed):
        await engine.query(question="a")
    slow.open.set()
    assert (await accepted).output["answer"]
    await stopping


async def test_shutdown_does_not_wait_for_a_device_that_hangs(fake_limits, monkeypatch):
    monkeypatch.setattr("kestrel_engine.engine.STOP_PATIENCE_S", 0.01)
    gate = Gate()
    config = RuntimeConfig(max_batch_size=3)
    engine = kestrel_engine.InferenceEngine(
        config, fake_build(config, FakeRuntime(fake_limits, gate))
    )
    stream = await engine.submit("query", None, {"question": "a"}, GREEDY)
    await asyncio.to_thread(gate.entered.wait, 60)
    await engine.shutdown(grace_s=0)
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
from tests.fake_runtime import FakeRuntime
from kestrel_engine.types.step import RuntimeLimits
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
    ended = run_forked([sys.executable, "-c", program], text=True)
    assert (ended.returncode, ended.stdout) == (3, "closed\n"), ended.stderr
