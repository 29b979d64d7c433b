"""Crops, encoder, stitching, pooling and projector against the stored rows of every golden picture."""

from __future__ import annotations

import pytest
import torch

from tests.golden.goldens import Golden

PICTURES = (
    "alpha_512x512",
    "big_2400x1500",
    "gray_640x480",
    "small_120x90",
    "square_378",
    "tall_420x980",
    "wide_900x600",
)

pytestmark = pytest.mark.golden


@pytest.mark.parametrize("name", PICTURES)
def test_every_stage_equals_the_reference(golden: Golden, pictures, name):
    picture, rows = pictures[name], golden.expected["rows"]
    vision = golden.runtime.model.vision
    tiling = tuple(golden.expected["vision"][name]["tiling"])
    assert picture.tiling == tiling
    features = vision.encode_crops(torch.from_numpy(picture.crops))
    kept = features[rows["crop_features_crops"]][:, rows["crop_features_rows"]]
    golden.check("crop_features", kept, f"vision.{name}.crop_features_rows")
    stitched = vision.stitch(features[1:], tiling)
    assert list(stitched.shape[:2]) == golden.expected["vision"][name]["reconstructed_hw"]
    samples = golden.expected["vision"][name]["reconstructed_sample_yx"]
    sampled = torch.stack([stitched[y, x] for y, x in samples])
    golden.check("crop_features", sampled, f"vision.{name}.reconstructed_samples")
    pooled = vision.pool(stitched)
    golden.check("pooled", pooled[rows["pooled_rows"]], f"vision.{name}.pooled_rows")
    (embedding,) = vision.encode_images([(torch.from_numpy(picture.crops), tiling)])
    golden.check("image_emb", embedding[rows["image_emb_rows"]], f"vision.{name}.image_emb_rows")


def test_pictures_encoded_together_equal_pictures_encoded_alone(golden: Golden, pictures):
    vision = golden.runtime.model.vision
    some = ["small_120x90", "tall_420x980", "square_378"]
    inputs = [(torch.from_numpy(pictures[name].crops), pictures[name].tiling) for name in some]
    together = vision.encode_images(inputs)
    for embedding, single in zip(together, inputs, strict=True):
        torch.testing.assert_close(
            embedding, vision.encode_images([single])[0], atol=1e-5, rtol=1e-5
        )
