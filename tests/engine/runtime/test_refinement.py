"""Masks in the steps of the plain runtime, and of the GPU runtime on a CPU: the results of the refiner alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kestrel_engine.models.moondream import Moondream
from kestrel_engine.models.refiner import Refiner, RefinerConfig, refiner_shapes
from kestrel_engine.runtime.gpu.adapters.layout import SlabLayout
from kestrel_engine.runtime.refinement import refine_bytes, results_of
from kestrel_engine.types.step import RefineRow, StepPlan
from tests.engine.adapters.random_adapters import adapter, merged, random_tensors
from tests.engine.runtime.gpu.small_models import gpu_runtime, small_model, torch_runtime

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {"num_pages": 8, "page_size": 17, "max_batch_size": 4, "max_seq_length": 100}


def refiner_for(config, device="cpu") -> Refiner:
    sizes = RefinerConfig(32, config.vision.enc_dim, config.vision.grid, 40)
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for name, shape in refiner_shapes(sizes).items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = (noise / max(1, noise[0].numel()) ** 0.5).to(device)
    return Refiner(sizes, tensors)


@pytest.fixture(scope="module")
def model():
    return small_model("moondream3")


@pytest.fixture(scope="module")
def plain(model):
    config, tensors = model
    runtime = torch_runtime(config, tensors, refiner=refiner_for(config), **SIZES)
    yield runtime
    runtime.close()


@pytest.fixture(scope="module")
def rows(model):
    side = model[0].vision.crop_size
    rng = np.random.default_rng(1)
    return tuple(
        RefineRow(
            number,
            rng.integers(0, 255, (side, side, 3), dtype=np.uint8),
            rng.integers(0, 2, (side, side), dtype=np.uint8),
        )
        for number in range(3)
    )


def refined(runtime, step, rows):
    return runtime.collect(runtime.launch(StepPlan(step, refine=rows))).refined


@torch.inference_mode()
def test_a_step_gives_what_the_refiner_gives(model, plain, rows):
    config, tensors = model
    assert plain.limits.refines
    found = refined(plain, 0, rows)
    assert found.keys() == {0, 1, 2}
    vision, refiner = Moondream(config, tensors).vision, refiner_for(config)
    for row in rows:
        features = vision.encode_two_depths(torch.from_numpy(row.pixels)[None], 0)
        wanted = refiner.refine(*features, torch.from_numpy(row.mask)[None])[0]
        np.testing.assert_allclose(found[row.sequence_id], wanted.numpy(), atol=1e-4)


def test_the_gpu_runtime_gives_the_same(model, plain, rows):
    config, tensors = model
    runtime = gpu_runtime(config, tensors, refiner=refiner_for(config, DEVICE), **SIZES)
    try:
        assert runtime.limits.refines
        wanted = refined(plain, 1, rows)
        alone = refined(runtime, 0, rows[:1]) | refined(runtime, 1, rows[1:])
        for number, mask in wanted.items():
            np.testing.assert_allclose(alone[number], mask, atol=1e-3)
    finally:
        runtime.close()


def test_a_mask_that_is_not_finite_is_missing(rows):
    masks = np.zeros((3, 4, 4), np.float32)
    masks[1, 2, 2] = np.nan
    assert results_of(rows, masks).keys() == {0, 2}


def test_without_a_refiner_a_runtime_refines_nothing(model):
    config, tensors = model
    runtime = torch_runtime(config, tensors, **SIZES)
    assert not runtime.limits.refines
    runtime.close()


def test_the_memory_grows_with_the_rows(model):
    config = RefinerConfig(256, 1152, 27, 2048)
    one, four = (refine_bytes(config, model[0].vision, torch.bfloat16, n) for n in (1, 4))
    assert four == 4 * one > 0


def test_an_adapter_of_the_tower_counts_as_merged_weights(model, rows):
    """Rows with different adapters and none share a step."""
    config, tensors = model
    changed = [random_tensors(config, i, rank, vision=True) for i, rank in ((1, 3), (2, 35))]
    adapters = [adapter(str(i), each) for i, each in enumerate(changed)]
    layout = SlabLayout(config, torch.float32, torch.device(DEVICE))
    on_gpu = [replace(each, weights={}, slabs=layout.pack(each.weights)) for each in adapters]
    wanted = {}
    for row, weights in zip(
        rows, [tensors, *(merged(tensors, each) for each in changed)], strict=True
    ):
        vision = Moondream(config, weights).vision
        with torch.inference_mode():
            features = vision.encode_two_depths(torch.from_numpy(row.pixels)[None], 0)
            refiner = refiner_for(config)
            wanted[row.sequence_id] = refiner.refine(*features, torch.from_numpy(row.mask)[None])[0]
    plain = torch_runtime(config, tensors, refiner=refiner_for(config), **SIZES)
    gpu = gpu_runtime(
        config, tensors, refiner=refiner_for(config, DEVICE), adapters=layout, **SIZES
    )
    for runtime, those in ((plain, adapters), (gpu, on_gpu)):
        asked = [replace(row, adapter=each) for row, each in zip(rows, [None, *those], strict=True)]
        found = refined(runtime, 0, tuple(reversed(asked)))
        runtime.close()
        for number, mask in wanted.items():
            np.testing.assert_allclose(found[number], mask.numpy(), atol=3e-5)
    assert np.abs(wanted[1].numpy() - found[0]).max() > 2e-4
