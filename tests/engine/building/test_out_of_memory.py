"""A device without memory: the start fails and says which flag to lower; later only one step fails."""

import pytest

from kestrel_engine import InferenceEngine, InsufficientMemoryError, RuntimeConfig, RuntimeFailure
from tests.engine.fakes import fake_build
from tests.fake_runtime import FakeRuntime


class FullDevice(FakeRuntime):
    """Refuses the steps while ``full``."""

    full = True
    error: type[Exception] = MemoryError

    def collect(self, handle):
        result = super().collect(handle)
        if self.full:
            raise self.error("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return result


async def test_a_warm_up_without_memory_says_what_to_lower(fake_limits, monkeypatch):
    monkeypatch.setattr(
        "kestrel_engine.building.factory.build",
        lambda config, progress, lora: fake_build(config, FullDevice(fake_limits)),
    )
    with pytest.raises(InsufficientMemoryError) as caught:
        await InferenceEngine.create(RuntimeConfig(max_batch_size=3, kv_cache_gib=2.0))
    for words in ("--kv-cache-gib (now 2)", "--max-batch-size (now 3)", "--max-seq-length"):
        assert words in str(caught.value)


async def test_later_one_step_fails_and_the_next_request_is_served(fake_limits, make_engine):
    runtime = FullDevice(fake_limits)
    engine = make_engine(runtime)
    with pytest.raises(RuntimeFailure, match="the device is out of memory") as caught:
        await engine.query(question="how many?", settings={"max_tokens": 3})
    assert caught.value.out_of_memory
    runtime.full = False
    result = await engine.query(question="how many?", settings={"max_tokens": 3})
    assert result.metrics.output_tokens > 0 and engine.is_ready


async def test_another_failure_is_none_of_memory(fake_limits, make_engine):
    """Not even one whose class has the name of torch's."""
    runtime = FullDevice(fake_limits)
    runtime.error = type("OutOfMemoryError", (Exception,), {})
    with pytest.raises(RuntimeFailure) as caught:
        await make_engine(runtime).query(question="how many?", settings={"max_tokens": 3})
    assert not caught.value.out_of_memory
