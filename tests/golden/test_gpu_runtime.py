"""The golden cases through GpuRuntime. Interpreted, an image of this size takes minutes: only on a CUDA device.

What runs without one is tests/engine/runtime/gpu/test_gpu_runtime.py, on models small enough.
"""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from kestrel_engine.runtime.gpu.parts import Options
from kestrel_engine.runtime.gpu.runtime import GpuRuntime
from kestrel_engine.types.requests import PreparedImage
from tests.golden.checks import check_job, check_tops, new_job
from tests.golden.driver import Feed, pages_for, run_jobs
from tests.golden.goldens import Golden

pytestmark = [
    pytest.mark.golden,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def runtimes(
    goldens: Callable[[str], Golden], pictures: dict[str, PreparedImage]
) -> Callable[[str], Golden]:
    """From "md2" or "md3" to the golden model with a GpuRuntime in it, its images encoded."""
    made: dict[str, Golden] = {}

    def get(name: str) -> Golden:
        if name not in made:
            golden = goldens(name)
            runtime = GpuRuntime(
                golden.config,
                {key: tensor.to("cuda", copy=True) for key, tensor in golden.weights.items()},
                Options(
                    num_pages=6 * 85,
                    page_size=10,
                    max_batch_size=8,
                    max_seq_length=golden.config.text.max_context,
                ),
            )
            golden.encode(runtime, pictures)
            made[name] = dataclasses.replace(golden, runtime=runtime)
        return made[name]

    return get


@pytest.mark.parametrize("model", ["md2", "md3"])
def test_prefill_and_then_token_by_token(runtimes, model):
    golden = runtimes(model)
    for case in golden.expected["cases"]:
        feed = Feed(golden.runtime, pages_for(golden.runtime, 900, seed=7))
        hidden = feed(*golden.prompt(case)).cpu()
        golden.check("hidden", hidden, f"{case['id']}.prefill_hidden")


@pytest.mark.parametrize("model", ["md2", "md3"])
def test_generation_in_one_batch(runtimes, model):
    golden = runtimes(model)
    cases = golden.expected["cases"]
    for begin in range(0, len(cases), 6):
        batch = cases[begin : begin + 6]
        jobs = [new_job(golden, case) for case in batch]
        run_jobs(golden.runtime, jobs, starts_per_step=2)
        for case, job in zip(batch, jobs, strict=True):
            check_job(case, job)


@pytest.mark.parametrize("model", ["md2", "md3"])
def test_the_likeliest_ids_of_texts(runtimes, model):
    golden = runtimes(model)
    for case in golden.expected["cases"]:
        has_logits = f"{case['id']}.decode_logits" in golden.arrays
        if case["skill"] in ("query", "caption") and has_logits:
            check_tops(golden, case)
