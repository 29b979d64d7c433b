"""GpuRuntime with keys and values in eight bits: what plain torch makes of them, whatever the batch and the way there.

Without a GPU Triton interprets the kernels, so the models are small.
"""

import pytest
import torch

from kestrel_engine.models.kv_format import EIGHT_BITS
from kestrel_engine.types.requests import ImageBlock
from kestrel_engine.types.step import EncodeSlice, StepPlan
from tests.engine.runtime.gpu.small_models import gpu_runtime, picture, small_model, torch_runtime
from tests.engine.runtime.gpu.test_gpu_runtime import SIZES, TEXT, Talk, answers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALES = ((0.004, 0.001), (0.02, 0.003))
FLIPS = 2e-2
"""Share by which one number may differ that one side rounds up and the other down, several layers on."""


@pytest.fixture(params=["moondream2", "moondream3"], scope="module")
def both(request):
    """A TorchRuntime and a GpuRuntime with equal weights and scales, holding image "single"."""
    config, tensors = small_model(request.param)
    reference = torch_runtime(config, tensors, kv_scales=SCALES, **SIZES)
    tested = gpu_runtime(config, tensors, kv_scales=SCALES, **SIZES)
    single = picture("single", (1, 1), config, seed=2)
    for runtime in (reference, tested):
        runtime.collect(runtime.launch(StepPlan(0, encode=(EncodeSlice(single, 0, 2),))))
    yield config, reference, tested
    tested.close()
    reference.close()


def prompts(config):
    block = ImageBlock("single", config.image_positions)
    return [(0, block, 40, 41, 42), (0, 50, 51, 52, 53, 54, 55), (0, block, 60)]


def talks(config, *, chunk=None):
    return [
        Talk(number, prompt, [TEXT] * 3, chunk=chunk)
        for number, prompt in enumerate(prompts(config))
    ]


def same(left, right, *, logprobs):
    assert left.keys() == right.keys()
    for number, tokens in left.items():
        assert [t.id for t in tokens] == [t.id for t in right[number]]
        assert [t.logprob for t in tokens] == pytest.approx(
            [t.logprob for t in right[number]], abs=logprobs
        )


@pytest.mark.slow_with("moondream2")
def test_answers_and_what_is_stored_are_the_references(both):
    config, reference, tested = both
    same(answers(tested, talks(config)), answers(reference, talks(config)), logprobs=FLIPS)
    for kept, expected in (
        (tested.parts.cache.keys, reference.cache.keys),
        (tested.parts.cache.values, reference.cache.values),
    ):
        assert kept.dtype == expected.dtype == EIGHT_BITS
        pages = [page for talk in talks(config) for page in talk.pages[:1]]
        slots = torch.tensor([page * SIZES["page_size"] + i for page in pages for i in range(5)])
        left, right = (
            pool.view(torch.uint8)[:, slots.to(pool.device)].cpu().int()
            for pool in (kept, expected)
        )
        # Neighbours at most, and seldom: a sum in another order may fall on the other side of a tie.
        assert (left - right).abs().max() <= 1
        assert (left != right).float().mean() < 0.01


@pytest.mark.slow
def test_chunks_and_neighbours_change_nothing(both):
    config, _, tested = both
    together = answers(tested, talks(config))
    alone = {
        number: tokens
        for talk in talks(config, chunk=3)
        for number, tokens in answers(tested, [talk]).items()
    }
    same(alone, together, logprobs=1e-4)


@pytest.mark.slow
def test_what_a_image_left_in_the_cache_is_as_good_as_new(both):
    config, _, tested = both
    first, again = talks(config)[0], talks(config)[0]
    expected = answers(tested, [first])
    # The prefix lies in the pages; this time only what follows is fed.
    again.fed, again.position = 2, config.image_prefix
    same(answers(tested, [again]), expected, logprobs=1e-4)
