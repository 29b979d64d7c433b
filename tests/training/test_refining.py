"""The bundled refiner on held-out scenes, and the samples that trained it."""

import random

import numpy as np
import pytest

from kestrel_engine.outlines.region import Region
from kestrel_engine.types.model_config import parse_model_config
from kestrel_grpc.scenes.scenes import draw_scene
from training.refining.evaluate import BUNDLED_REFINER, run
from training.refining.samples import draw_coarse, samples, true_mask

VISION = parse_model_config(
    {"config": {"vision": {"crop_size": 252, "overlap_margin": 2, "max_crops": 6}}},
    family="moondream3",
).vision


@pytest.mark.slow
async def test_refined_outlines_are_better_on_held_out_scenes() -> None:
    """The mean of the bundled refiner on 120 scenes is in docs/models.md."""
    coarse, final = await run(30, BUNDLED_REFINER, 1)
    assert len(final) > 20
    assert np.mean(coarse) == pytest.approx(0.955, abs=0.01)
    assert np.mean(final) > np.mean(coarse) + 0.005, (np.mean(coarse), np.mean(final))


def test_samples_repeat_and_their_coarse_masks_are_near_the_truth() -> None:
    source, again = samples("test", VISION), samples("test", VISION)
    ious = []
    for _ in range(4):
        one, other = next(source), next(again)
        assert np.array_equal(one.pixels, other.pixels) and np.array_equal(one.coarse, other.coarse)
        assert one.pixels.shape == (252, 252, 3)
        inside, true = one.coarse > 0, one.truth > 0.5
        ious.append((inside & true).sum() / (inside | true).sum())
    assert 0.8 < np.mean(ious) < 1


def test_the_true_mask_covers_the_area_of_the_shape() -> None:
    rng = random.Random("area")
    scene = draw_scene(rng, 400, 300, count=3)
    for shape in scene.shapes:
        box, _ = draw_coarse(rng, scene, shape)
        region = Region.around(box)
        assert region is not None
        covered = true_mask(scene, shape, region, 252).mean()
        wanted = shape.area / (region.width * 400 * region.height * 300)
        assert covered == pytest.approx(wanted, rel=0.02)
