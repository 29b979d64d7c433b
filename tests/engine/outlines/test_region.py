"""Regions of images as crops: from pixels and from tiles alike, in the right place."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kestrel_engine.outlines.region import Region, crop
from kestrel_engine.preprocess.crops import cut_crops
from kestrel_engine.preprocess.decoding.decoded_image import DecodedImage
from kestrel_engine.types.model_config import parse_model_config

VISION = parse_model_config(
    {"config": {"vision": {"crop_size": 126, "overlap_margin": 1, "max_crops": 6}}},
    family="moondream3",
).vision


def smooth(width: int, height: int) -> np.ndarray:
    """An image whose grey levels are gradients, so that a shift by one pixel shows."""
    x, y = (np.arange(width) + 0.5) / width, (np.arange(height) + 0.5) / height
    planes = np.broadcast_arrays(
        240 * x[None, :], 240 * y[:, None], 120 * (x[None, :] + y[:, None])
    )
    return np.rint(np.stack(planes, axis=-1)).astype(np.uint8)


def test_a_region_exceeds_its_box_by_a_quarter_and_stays_in_the_image():
    region = Region.around((0.4, 0.2, 0.6, 0.6))
    assert region is not None
    edges = (region.x_min, region.y_min, region.x_max, region.y_max)
    assert edges == pytest.approx((0.35, 0.1, 0.65, 0.7))
    assert Region.around((0.0, 0.0, 1.0, 1.0)) == Region(0.0, 0.0, 1.0, 1.0)


@pytest.mark.parametrize("box", [(0.5, 0.2, 0.5, 0.6), (0.1, 0.3, 0.4, 0.3), (0.6, 0.1, 0.4, 0.5)])
def test_a_box_without_area_has_no_region(box):
    assert Region.around(box) is None


def test_pixels_are_read_bilinearly():
    pixels = np.random.default_rng(1).integers(0, 255, (80, 100, 3), dtype=np.uint8)
    image = cut_crops(DecodedImage(pixels), VISION, device_pixels=10**6)
    assert image.pixels is not None
    region = Region(0.25, 0.25, 0.75, 0.75)  # Whole pixels: 25..75 and 20..60.
    part = torch.from_numpy(pixels[20:60, 25:75]).permute(2, 0, 1)[None].double()
    wanted = F.interpolate(part, size=(126, 126), mode="bilinear")[0].permute(1, 2, 0).numpy()
    # At its edge, a part alone repeats its last pixel; the region reads its neighbour.
    found = crop(image, region, VISION)[4:-4, 4:-4].astype(float)
    assert np.abs(found - wanted[4:-4, 4:-4]).max() <= 0.51


@pytest.mark.parametrize("size", [(60, 90), (126, 126), (200, 150), (420, 300), (900, 700)])
def test_tiles_show_the_same_place_as_pixels(size):
    pixels = smooth(*size)
    with_pixels = cut_crops(DecodedImage(pixels), VISION, device_pixels=10**7)
    with_crops = cut_crops(DecodedImage(pixels), VISION)
    assert with_crops.pixels is None
    for region in (
        Region(0.1, 0.2, 0.6, 0.55),
        Region(0.0, 0.0, 1.0, 1.0),
        Region(0.7, 0.5, 1.0, 1.0),
    ):
        one, other = (
            crop(image, region, VISION).astype(int) for image in (with_pixels, with_crops)
        )
        inner = np.abs(one - other)[6:-6, 6:-6]
        # Half a pixel of an enlarged image of 60 would be two levels.
        assert inner.mean() < 0.6, (region, inner.mean())


def test_a_large_image_costs_no_more_memory_than_its_crop():
    pixels = np.broadcast_to(np.uint8(7), (3000, 4000, 3))
    image = cut_crops(DecodedImage(smooth(200, 150)), VISION, device_pixels=10**6)
    object.__setattr__(image, "pixels", pixels)
    assert (crop(image, Region(0.0, 0.0, 1.0, 1.0), VISION) == 7).all()
