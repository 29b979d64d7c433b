"""A profile of the step thread: its bounds and its file. The engine continues if a profile fails."""

import asyncio
import gzip
import json
import stat

import pytest

from kestrel_engine import InferenceEngine, ProfileError, ProfileRequest, RuntimeConfig
from kestrel_engine.runtime.profile import StepProfile
from kestrel_engine.types.step import RuntimeLimits
from tests.engine.fakes import fake_build, never_ends
from tests.fake_runtime import FakeRuntime

LIMITS = RuntimeLimits(
    num_pages=200, page_size=2, max_batch_size=3, max_seq_length=300, vocab_size=400
)


@pytest.fixture
async def engine():
    config = RuntimeConfig(max_batch_size=3)
    runtime = FakeRuntime(LIMITS, never_ends, cost=lambda plan: 0.002)
    async with InferenceEngine(config, fake_build(config, runtime)) as engine:
        yield engine


def asked(tmp_path, name="a.json.gz", **bounds):
    return ProfileRequest(
        **{"path": str(tmp_path / name), "seconds": 60, "steps": 10, "max_bytes": 10**8, **bounds}
    )


async def taken(engine, request, *, stop_after_s=None):
    begun, stop = asyncio.Event(), asyncio.Event()
    profile = asyncio.ensure_future(engine.profile(request, begun=begun, stop=stop))
    await asyncio.wait(
        {profile, asyncio.ensure_future(begun.wait())}, return_when="FIRST_COMPLETED"
    )
    if not profile.done():
        settings = {"max_tokens": 60, "temperature": 0.0}
        await engine.query(question="what?", settings=settings)
    if stop_after_s is not None:
        await asyncio.sleep(stop_after_s)
        stop.set()
    return await profile


async def test_it_ends_after_its_steps_with_a_trace_for_its_owner_only(engine, tmp_path):
    profile = await taken(engine, asked(tmp_path, python_functions=True))
    assert (profile.steps, profile.path) == (10, str(tmp_path / "a.json.gz"))
    assert 0 < profile.seconds < 60
    file = tmp_path / "a.json.gz"
    assert list(tmp_path.iterdir()) == [file]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.stat().st_size == profile.file_bytes
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert any("loop.py" in event.get("name", "") for event in events)


async def test_it_ends_after_its_time_or_when_told_to(engine, tmp_path):
    timed = await taken(engine, asked(tmp_path, seconds=0.1, steps=10_000))
    assert timed.seconds >= 0.1 and timed.steps < 100
    told = await taken(engine, asked(tmp_path, "b.json.gz", steps=10_000), stop_after_s=0.0)
    assert 59 <= told.steps <= 61


async def test_one_at_a_time(engine, tmp_path):
    begun, stop = asyncio.Event(), asyncio.Event()
    first = asyncio.ensure_future(engine.profile(asked(tmp_path), begun=begun, stop=stop))
    await begun.wait()
    with pytest.raises(ProfileError, match="is being taken"):
        await engine.profile(asked(tmp_path, "b"), begun=asyncio.Event(), stop=asyncio.Event())
    stop.set()
    assert (await first).steps == 0


async def test_what_goes_wrong_leaves_no_file_and_a_living_engine(engine, tmp_path, monkeypatch):
    with pytest.raises(ProfileError, match="the limit is 10"):
        await taken(engine, asked(tmp_path, max_bytes=10))
    with pytest.raises(ProfileError, match="No such file"):
        await taken(engine, asked(tmp_path / "gone"))

    def refuse(profiler):
        raise RuntimeError("no driver")

    monkeypatch.setattr("torch.profiler.profile.start", refuse)
    with pytest.raises(ProfileError, match="failed: no driver"):
        await taken(engine, asked(tmp_path))
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    result = await engine.query(question="what?", settings={"max_tokens": 3})
    assert len(result.token_ids) == 3


async def test_an_engine_that_ends_ends_its_profile(engine, tmp_path):
    begun = asyncio.Event()
    profile = asyncio.ensure_future(
        engine.profile(asked(tmp_path), begun=begun, stop=asyncio.Event())
    )
    await begun.wait()
    await engine.shutdown(grace_s=0)
    assert (await profile).steps == 0
    with pytest.raises(ProfileError, match="no engine"):
        await engine.profile(asked(tmp_path, "b"), begun=asyncio.Event(), stop=asyncio.Event())


def test_giving_up_waiting_does_not_cancel_it():
    profile = StepProfile(1, cuda=False, python_functions=False)
    assert not profile.begun.cancel() and not profile.ended.cancel()
