"""Batch places that pass between principals while a GPU's graphs run: answers stay the reference's."""

import asyncio
import contextvars

import pytest

from kestrel_engine import InferenceEngine, RuntimeConfig
from tests.golden.test_engine import CHECKS, cases, check_text, run

_caller: contextvars.ContextVar[dict[str, str]] = contextvars.ContextVar("caller")


@pytest.mark.parametrize("model", ["md2", "md3"])
async def test_places_that_pass_leave_answers_as_they_are(model, golden_folder, golden_images):
    config = RuntimeConfig(
        model_path=golden_folder(model),
        device="cuda",
        dtype="float32",
        max_batch_size=4,
        kv_cache_gib=2.0,
    )
    todo = [case for case in cases(model) for _ in range(3)]
    callers = [
        {"principal": "flood"},
        {"principal": "other"},
        {"principal": "other", "priority": "high"},
        {"principal": "flood", "priority": "low"},
        {"principal": "third"},
    ]
    async with await InferenceEngine.create(config) as engine:
        submit = engine.submit

        def as_caller(*args, **options):
            return submit(*args, **options, **_caller.get())

        engine.submit = as_caller  # type: ignore[method-assign]

        async def ask(index: int, case):
            _caller.set(callers[index % len(callers)])
            if index % len(callers):
                await asyncio.sleep(0.02 * index)  # The flood fills the batch first.
            return await run(engine, case, golden_images)

        asked = [ask(index, case) for index, case in enumerate(todo)]
        results = await asyncio.gather(*asked)
        preemptions = engine.stats.preemptions
    for case, result in zip(todo, results, strict=True):
        CHECKS.get(case["skill"], check_text)(case, result)
    assert preemptions > 0, "no place has passed"
