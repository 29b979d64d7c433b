"""Training images pass what served ones pass: libvips' resize and a JPEG writer, measured in grey levels."""

import random

import numpy as np
import pytest
import torch

from training.images.jpeg import dct_matrix, jpeg_round_trip
from training.images.resize import crops, resize
from training.scenes.render import render_scene
from training.scenes.scenes import draw_scene
from training.scenes.tiling import View

pyvips = pytest.importorskip("pyvips")

SIZES = [(640, 480), (320, 240), (1500, 700), (500, 300), (150, 120), (300, 900)]


def _noisy(width: int, height: int) -> torch.Tensor:
    scene = draw_scene(random.Random(f"{width}x{height}"), width, height, count=8)
    generator = torch.Generator().manual_seed(1)
    pixels = render_scene(scene)
    return (pixels + torch.randn(pixels.shape, generator=generator) * 3).clamp(0, 255).round()


def _array(pixels: torch.Tensor) -> np.ndarray:
    return pixels.byte().permute(1, 2, 0).contiguous().numpy()


@pytest.mark.parametrize("size", SIZES)
def test_resize_matches_libvips(size: tuple[int, int]) -> None:
    pixels, view = _noisy(*size), View.of(*size)
    image = pyvips.Image.new_from_array(_array(pixels))
    for width, height in ((252, 252), (view.tiled_width, view.tiled_height)):
        wanted = image.resize(width / size[0], vscale=height / size[1]).numpy().astype(np.int64)
        found = _array(resize(pixels[None], height, width)[0]).astype(np.int64)
        assert wanted.shape == found.shape
        assert np.abs(wanted - found).mean() < 0.5
        assert np.abs(wanted - found).max() <= 4


@pytest.mark.parametrize("quality", [60, 75, 90])
@pytest.mark.parametrize("subsample", [True, False])
def test_jpeg_matches_libjpeg(quality: int, subsample: bool) -> None:
    pixels = _noisy(333, 210)
    mode = "on" if subsample else "off"
    image = pyvips.Image.new_from_array(_array(pixels)).copy(interpretation="srgb")
    written = image.jpegsave_buffer(Q=quality, subsample_mode=mode)
    wanted = pyvips.Image.new_from_buffer(written, "").numpy().astype(np.int64)
    found = _array(jpeg_round_trip(pixels[None], torch.tensor([quality]), subsample)[0]).astype(
        np.int64
    )
    assert np.abs(wanted - found).mean() < 1.0


def test_the_transform_is_orthonormal() -> None:
    m = dct_matrix()
    assert torch.allclose(m @ m.t(), torch.eye(8), atol=1e-6)


def test_crops_match_the_engine_on_a_jpeg() -> None:
    """The whole path: file -> engine's crops, against the training path on the same pixels."""
    from kestrel_engine.config.images import ImageLimits
    from kestrel_engine.preprocess.crops import prepare
    from kestrel_engine.preprocess.decoding.images import open_image
    from kestrel_engine.types.model_config import VisionConfig

    pixels = _noisy(640, 480)
    image = pyvips.Image.new_from_array(_array(pixels)).copy(interpretation="srgb")
    data = image.jpegsave_buffer(Q=75, subsample_mode="on")
    vision = VisionConfig(crop_size=252, overlap_margin=2, max_crops=6)
    wanted = np.asarray(prepare(open_image(data, ImageLimits()), vision).crops).astype(np.int64)
    coded = jpeg_round_trip(pixels[None], torch.tensor([75]))
    found = crops(coded, View.of(640, 480))[0].permute(0, 2, 3, 1).numpy().astype(np.int64)
    assert wanted.shape == found.shape
    assert np.abs(wanted - found).mean() < 1.0
