"""A profile on a CUDA device has the kernels, those of captured graphs too; a second one works as the first did."""

import asyncio
import gzip
import json

from kestrel_engine import InferenceEngine, ProfileRequest, RuntimeConfig
from tests.tiny import TINY


async def profiled(engine, path):
    """The events of a profile of 40 steps."""
    request = ProfileRequest(path=str(path), seconds=60, steps=40, max_bytes=10**9)
    begun, stop = asyncio.Event(), asyncio.Event()
    profile = asyncio.ensure_future(engine.profile(request, begun=begun, stop=stop))
    await asyncio.wait(
        {profile, asyncio.ensure_future(begun.wait())}, return_when="FIRST_COMPLETED"
    )
    settings = {"max_tokens": 60, "temperature": 0.0}
    await engine.query(question="Tell a long story.", settings=settings)
    stop.set()
    told = await profile
    assert 0 < told.steps <= 40
    return told.steps, json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


async def test_two_profiles_hold_the_kernels_of_captured_graphs(tmp_path):
    async with await InferenceEngine.create(
        RuntimeConfig(model_path=TINY, device="cuda")
    ) as engine:
        load = engine.info.load
        assert engine.compiled.compiled + engine.compiled.cached > 0 and engine.compiled.seconds > 0
        assert load.weights_s > 0 and load.capture_s > 0 and load.warm_up_s > 0
        for name in ("first", "second"):
            steps, events = await profiled(engine, tmp_path / name)
            kernels = [event for event in events if event.get("cat") == "kernel"]
            assert len(kernels) > 10 * steps, f"{name}: {len(kernels)} kernels in {steps} steps"
        result = await engine.query(question="Still there?", settings={"max_tokens": 3})
        assert result.token_ids
