"""The fused tower against the plain one on the CPU. Without a GPU its kernels are interpreted."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kestrel_engine.kernels.images.patchify import patchify
from kestrel_engine.kernels.images.pool_tiles import pool_tiles
from kestrel_engine.models.moondream import Moondream
from kestrel_engine.models.vision import VisionModel, patches
from kestrel_engine.runtime.gpu.attention.patches import BATCHES
from kestrel_engine.runtime.gpu.state.staging import Uploader
from kestrel_engine.runtime.gpu.vision import tower as fused_vision
from kestrel_engine.runtime.gpu.vision.encoded_images import EncodedImages
from kestrel_engine.runtime.gpu.vision.tower import FusedVision
from kestrel_engine.runtime.gpu.weights import pack_weights
from kestrel_engine.types.requests import PreparedImage
from kestrel_engine.types.step import EncodeSlice
from tests.checkpoint_loading import load_checkpoint
from tests.engine.models.small import random_tensors, small_config

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CLOSE = 1e-5 if DEVICE.type == "cpu" else 5e-5
"""exp and tanh of a GPU are units off in the last place."""


def on_device(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(DEVICE, copy=True) for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def towers() -> tuple[VisionModel, FusedVision]:
    config = small_config("moondream2")
    tensors = random_tensors(config)
    packed = pack_weights(config, on_device(tensors))
    return Moondream(config, tensors).vision, FusedVision(config.vision, packed)


def random_crops(count: int, side: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, side, side, 3), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("count", "side", "size", "padded"), [(3, 30, 6, 112), (1, 28, 14, 592)])
def test_patches_are_cut_normalised_and_padded(dtype, count, side, size, padded):
    crops = random_crops(count, side)
    rows = patchify(crops.to(DEVICE), size, padded, dtype).cpu()
    expected = patches(crops, size).flatten(0, 1)
    torch.testing.assert_close(rows[:, : expected.shape[1]], expected.to(dtype))
    assert torch.count_nonzero(rows[:, expected.shape[1] :]) == 0


@pytest.mark.parametrize("tiling", [(1, 1), (1, 4), (3, 2), (2, 6)])
def test_pooling_equals_stitching_then_averaging(towers, tiling):
    plain, _ = towers
    config = plain.config
    tiles = 0 if tiling == (1, 1) else tiling[0] * tiling[1]
    features = torch.randn(1 + tiles, config.grid**2, 70)
    out = torch.empty(config.grid**2, 140, device=DEVICE)
    there = features.to(DEVICE)
    assert pool_tiles(there, tiling, config.grid, config.overlap_margin, out=out) is out
    out = out.cpu()
    assert torch.equal(out[:, :70], features[0])
    local = features if tiling == (1, 1) else features[1:]
    torch.testing.assert_close(out[:, 70:], plain.pool(plain.stitch(local, tiling)))


def test_features_must_fit_their_tiling():
    with pytest.raises(AssertionError):
        pool_tiles(torch.zeros(3, 25, 8), (1, 3), 5, 1, out=torch.empty(25, 16))


def test_crops_are_encoded_as_by_the_plain_tower(towers):
    plain, fused = towers
    crops = random_crops(3, 30)
    torch.testing.assert_close(
        fused.encode_crops(crops.to(DEVICE)).cpu(),
        plain.encode_crops(crops),
        atol=CLOSE,
        rtol=CLOSE,
    )


def test_passes_are_bounded_and_make_no_difference(towers, monkeypatch):
    _, fused = towers
    crops = random_crops(3, 30).to(DEVICE)
    together = fused.encode_crops(crops)
    monkeypatch.setattr(fused_vision, "MAX_CROPS", 2)
    torch.testing.assert_close(fused.encode_crops(crops), together, atol=CLOSE, rtol=CLOSE)


def test_images_are_embedded_together(towers, monkeypatch):
    plain, fused = towers
    tilings = [(1, 1), (2, 3), (1, 2)]
    generator = torch.Generator().manual_seed(2)
    features = [
        torch.randn(1 if t == (1, 1) else 1 + t[0] * t[1], 25, 24, generator=generator)
        for t in tilings
    ]
    expected = [plain.embed(f, t) for f, t in zip(features, tilings, strict=True)]
    pictures = [(f.to(DEVICE), t) for f, t in zip(features, tilings, strict=True)]
    assert fused.embed_many([]) == []
    for limit in (16, 2):
        monkeypatch.setattr(fused_vision, "MAX_IMAGES", limit)
        for embedding, wanted in zip(fused.embed_many(pictures), expected, strict=True):
            torch.testing.assert_close(embedding.cpu(), wanted, atol=CLOSE, rtol=CLOSE)


@pytest.mark.golden
def test_golden_weights_on_smaller_crops(golden_folder):
    """Interpreted, each row of a LayerNorm takes milliseconds: a ninth of the patches and two layers say enough."""
    loaded = load_checkpoint(golden_folder("md2"))
    config = replace(loaded.config.vision, enc_n_layers=2, crop_size=126)
    tensors = loaded.tensors
    tensors["vision.pos_emb"] = tensors["vision.pos_emb"][:, : config.grid**2]
    packed = pack_weights(loaded.config, on_device(tensors))
    plain, fused = VisionModel(config, tensors), FusedVision(config, packed)
    crops = random_crops(1, config.crop_size)
    with torch.inference_mode():
        features, expected = fused.encode_crops(crops.to(DEVICE)), plain.encode_crops(crops)
        torch.testing.assert_close(features.cpu(), expected, atol=2 * CLOSE, rtol=2 * CLOSE)
        tiles = torch.cat([expected, expected.flip(1), expected.flip(2)])
        [embedding] = fused.embed_many([(tiles.to(DEVICE), (1, 2))])
        wanted = plain.embed(tiles, (1, 2))
    torch.testing.assert_close(embedding.cpu(), wanted, atol=2 * CLOSE, rtol=2 * CLOSE)


def test_every_pass_fits_a_batch_that_cudnn_is_asked_for():
    assert list(BATCHES) == sorted(set(BATCHES)) and BATCHES[-1] == fused_vision.MAX_CROPS == 64
    # What is computed for nothing stays below a seventh of the attention.
    for crops in range(1, 65):
        size = next(size for size in BATCHES if size >= crops)
        assert size - crops <= crops / 7


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_features_that_a_caller_sends_are_the_images_prefix(towers, dtype):
    fused, features = towers[1], np.random.default_rng(0).standard_normal((4, 6)).astype(dtype)
    bos = torch.arange(6.0, device=DEVICE)
    images = EncodedImages(fused, None, bos, Uploader(DEVICE))
    image = PreparedImage("key", None, (1, 1), 3, 2, features=features)
    images.encode([EncodeSlice(image, 0, 1)])
    expected = np.concatenate([[np.arange(6.0)], features.astype(np.float32)])
    np.testing.assert_array_equal(images.prefix("key").cpu().numpy(), expected)
