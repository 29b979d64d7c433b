from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from kestrel_engine import InferenceEngine, Observer, RuntimeConfig, SkillRegistry, SkillSpec
from kestrel_engine.types.step import RuntimeLimits
from tests.engine.fakes import fake_build
from tests.fake_runtime import FakeRuntime


@pytest.fixture
def fake_limits() -> RuntimeLimits:
    return RuntimeLimits(
        num_pages=200, page_size=2, max_batch_size=3, max_seq_length=300, vocab_size=400
    )


@pytest.fixture
async def make_engine(fake_limits: RuntimeLimits) -> AsyncIterator[Callable[..., InferenceEngine]]:
    """Builds engines and shuts them down at the end of the test."""
    engines: list[InferenceEngine] = []

    def make(
        runtime: FakeRuntime | None = None,
        *,
        family: str = "moondream3",
        observer: Observer | None = None,
        skills: Sequence[SkillSpec[Any]] | None = None,
        **config: object,
    ) -> InferenceEngine:
        runtime = runtime or FakeRuntime(fake_limits)
        settings = RuntimeConfig(max_batch_size=runtime.limits.max_batch_size, **config)  # type: ignore[arg-type]
        built = fake_build(settings, runtime, family)
        registry = None if skills is None else SkillRegistry(skills)
        engine = InferenceEngine(settings, built, registry, observer=observer)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        await engine.shutdown(grace_s=0)
