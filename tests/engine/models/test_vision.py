import math

import pytest
import torch

from kestrel_engine.models.vision import CROPS_PER_PASS, patches
from tests.engine.models.small import small_model


@pytest.fixture(scope="module")
def vision():
    return small_model("moondream2").vision


def test_patches_are_laid_out_channel_row_column():
    crops = torch.randint(0, 256, (2, 12, 12, 3), dtype=torch.uint8)
    cut = patches(crops, 4)
    assert cut.shape == (2, 9, 48)
    for crop in range(2):
        for i in range(9):
            row, column = divmod(i, 3)
            square = crops[crop, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4].float()
            expected = (square.permute(2, 0, 1).flatten() / 255 - 0.5) / 0.5
            assert torch.equal(cut[crop, i], expected)


@pytest.mark.parametrize("tiling", [(1, 1), (1, 4), (3, 2)])
def test_stitching_keeps_each_tile_inside_its_margins(vision, tiling):
    th, tw = tiling
    grid, margin = vision.config.grid, vision.config.overlap_margin
    window = grid - 2 * margin
    rows, columns = window * th + 2 * margin, window * tw + 2 * margin
    # A field over the whole image, seen by each tile through its own window, must come back unchanged.
    field = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns, 1)
    tiles = [
        field[window * i : window * i + grid, window * j : window * j + grid].reshape(-1, 1)
        for i in range(th)
        for j in range(tw)
    ]
    assert torch.equal(vision.stitch(torch.stack(tiles), tiling), field)


@pytest.mark.parametrize("shape", [(5, 5), (8, 14), (11, 5), (23, 7)])
def test_pooling_averages_from_floor_to_ceil(vision, shape):
    grid = vision.config.grid
    stitched = torch.randn(*shape, 3, generator=torch.Generator().manual_seed(1))
    pooled = vision.pool(stitched)
    assert pooled.shape == (grid * grid, 3)
    for i in range(grid):
        for j in range(grid):
            (top, bottom), (left, right) = (
                (math.floor(k * size / grid), math.ceil((k + 1) * size / grid))
                for k, size in zip((i, j), shape, strict=True)
            )
            expected = stitched[top:bottom, left:right].mean(dim=(0, 1))
            torch.testing.assert_close(pooled[grid * i + j], expected, atol=1e-5, rtol=1e-5)


def test_more_crops_than_a_pass_takes(vision):
    side = vision.config.crop_size
    crops = torch.randint(0, 256, (CROPS_PER_PASS + 3, side, side, 3), dtype=torch.uint8)
    together = vision.encode_crops(crops)
    alone = torch.cat([vision.encode_crops(crop[None]) for crop in crops])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_a_single_tile_is_the_whole_image_and_is_computed_once(vision):
    side = vision.config.crop_size
    crop = torch.randint(0, 256, (1, side, side, 3), dtype=torch.uint8)
    (embedding,) = vision.encode_images([(crop.repeat(2, 1, 1, 1), (1, 1))])
    whole, local = vision.encode_crops(crop.repeat(2, 1, 1, 1))
    expected = vision.project(whole, vision.pool(vision.stitch(local[None], (1, 1))))
    torch.testing.assert_close(embedding, expected, atol=1e-5, rtol=1e-5)
