"""Crops, encoder, stitching, pooling and projector against the stored rows of every golden image."""

import pytest
import torch

from kestrel_engine.types.requests import PreparedImage
from tests.golden.checkpoint import DATA
from tests.golden.checks import check_vision
from tests.golden.goldens import Golden

pytestmark = pytest.mark.golden


@pytest.mark.slow_with("md2", "big_2400x1500", "gray_640x480", "wide_900x600")
@pytest.mark.parametrize("name", sorted(path.stem for path in (DATA / "images").iterdir()))
def test_every_stage(golden: Golden, pictures: dict[str, PreparedImage], name: str) -> None:
    check_vision(golden, name, pictures[name])


@pytest.mark.slow_with("md2")
def test_images_encoded_together_equal_images_encoded_alone(
    golden: Golden, pictures: dict[str, PreparedImage]
) -> None:
    vision = golden.runtime.model.vision
    some = ["small_120x90", "tall_420x980", "square_378"]
    inputs = [(torch.from_numpy(pictures[name].crops), pictures[name].tiling) for name in some]
    together = vision.encode_images(inputs)
    for embedding, single in zip(together, inputs, strict=True):
        torch.testing.assert_close(
            embedding, vision.encode_images([single])[0], atol=1e-5, rtol=1e-5
        )
