"""Crops that equal crops of an earlier image skip the tower, and nothing else changes: bit for bit."""

import dataclasses

import numpy as np
import pytest
import torch

from kestrel_engine import InferenceEngine, RuntimeConfig, StepEvent
from kestrel_engine.preprocess.crop_keys import crop_keys
from kestrel_engine.preprocess.crops import cut_crops
from kestrel_engine.preprocess.decoding.decoded_image import DecodedImage
from kestrel_engine.preprocess.prepared_cache import in_namespace
from kestrel_engine.types.model_config import VisionConfig
from kestrel_engine.types.requests import PreparedImage
from kestrel_engine.types.step import EncodeSlice
from tests.engine.fakes import Listener
from tests.engine.runtime.gpu import small_models
from tests.engine.runtime.test_torch_runtime import new_runtime, picture, step
from tests.tiny import TINY

FRAME = np.random.default_rng(5).integers(0, 255, (300, 600, 3), dtype=np.uint8)
NEXT = FRAME.copy()
NEXT[:20, :20] = 0
"""A change in one corner: the overview and one tile differ."""
VISION = VisionConfig()
SIZES = {"num_pages": 30, "page_size": 17, "max_batch_size": 3, "max_seq_length": 200}


def keyed(image: PreparedImage, vision: VisionConfig = VISION) -> PreparedImage:
    return dataclasses.replace(image, crop_keys=crop_keys(image, vision))


def test_equal_crops_have_equal_keys():
    image = keyed(picture(tiling=(1, 3)))
    assert len(set(image.crop_keys)) == 4
    crops = image.crops.copy()
    crops[2, 0, 0, 0] ^= 1
    other = keyed(dataclasses.replace(image, crops=crops))
    assert [a == b for a, b in zip(image.crop_keys, other.crop_keys, strict=True)] == [
        *(True, True, False, True)
    ]
    assert not set(in_namespace(image, "salt").crop_keys) & set(image.crop_keys)
    assert len(keyed(picture(tiling=(1, 1))).crop_keys) == 1


def test_the_overview_of_an_image_is_one_crop():
    image = keyed(picture(tiling=(1, 3)))
    overview = image.overview()
    assert (overview.tiling, overview.num_distinct, overview.crop_keys) == (
        *((1, 1), 1),
        image.crop_keys[:1],
    )
    assert overview.key != image.key and (overview.width, overview.height) == (60, 30)
    np.testing.assert_array_equal(overview.crops, image.crops[[0, 0]])
    assert overview.overview() is overview


def two_frames(first: PreparedImage) -> tuple[PreparedImage, PreparedImage]:
    """Two images with keys; crops 0 and 2 of the second are others."""
    first = keyed(first)
    crops = first.crops.copy()
    crops[[0, 2]] ^= 255
    return first, keyed(dataclasses.replace(first, key="second", crops=crops))


@pytest.mark.parametrize("family", ["moondream2", "moondream3"])
def test_the_runtime_reuses_features_bit_for_bit(family):
    """25 patches a crop: rows of a product of matrices that do not fill its blocks."""
    runtime = new_runtime(family)
    first, second = two_frames(picture("first", (1, 3)))
    step(runtime, encode=(EncodeSlice(first, 0, 4, kept=(1, 3)),))
    step(runtime, encode=(EncodeSlice(second, 0, 4, reused=(1, 3)),))
    fresh = dataclasses.replace(second, key="fresh")
    step(runtime, encode=(EncodeSlice(fresh, 0, 4),))
    assert runtime.images["second"].equal(runtime.images["fresh"])
    assert not runtime.images["second"].equal(runtime.images["first"])
    assert runtime.crops.num_bytes == 2 * 25 * runtime.model.config.vision.enc_dim * 4
    step(runtime, drop_crops=(first.crop_keys[1], "unknown"))
    assert len(runtime.crops) == 1


@pytest.mark.slow_with("moondream2")
@pytest.mark.parametrize("family", ["moondream2", "moondream3"])
@torch.inference_mode()
def test_the_gpu_runtime_reuses_features_bit_for_bit(family):
    """The features of a reused crop are those of the step that encoded it, also when that step had other crops. The
    others are those that the tower gives for the same pass."""
    config, tensors = small_models.small_model(family)
    runtime = small_models.gpu_runtime(config, tensors, **SIZES)
    first, second = two_frames(small_models.picture("first", (1, 3), config, seed=1))
    step(runtime, encode=(EncodeSlice(first, 0, 2, kept=(1,)),))
    step(runtime, encode=(EncodeSlice(first, 2, 4, kept=(3,)),))
    step(runtime, encode=(EncodeSlice(second, 0, 4, reused=(1, 3)),))
    encode = runtime.encode_crops

    def crops(image: PreparedImage, *indices: int) -> torch.Tensor:
        return encode(torch.from_numpy(image.crops[list(indices)]).to(small_models.DEVICE))

    new = crops(second, 0, 2)
    kept = crops(first, 0, 1)[1], crops(first, 2, 3)[1]
    features = torch.stack([new[0], kept[0], new[1], kept[1]])
    (wanted,) = runtime.vision.embed_many([(features, (1, 3))])
    assert runtime.parts.images.prefix("second")[1:].equal(wanted)
    fresh = dataclasses.replace(second, key="fresh", crop_keys=None)
    step(runtime, encode=(EncodeSlice(fresh, 0, 4),))
    torch.testing.assert_close(
        runtime.parts.images.prefix("fresh"),
        runtime.parts.images.prefix("second"),
        atol=1e-5,
        rtol=1e-5,
    )
    step(runtime, drop_crops=first.crop_keys)
    assert not len(runtime.parts.images._kept)
    runtime.close()


@torch.inference_mode()
def test_crops_that_the_gpu_makes_are_reused_bit_for_bit():
    """Frames arrive as pixels: crops are known by the pixels that they are made from, and made on the device. Crop for
    crop, the features are those of the same passes over the crops of libvips."""
    config, tensors = small_models.small_model("moondream2")
    vision = config.vision
    runtime = small_models.gpu_runtime(config, tensors, **SIZES)
    before = np.random.default_rng(6).integers(0, 255, (70, 150, 3), dtype=np.uint8)
    after = before.copy()
    after[30:34, 2:6] = 0
    frames = [
        keyed(cut_crops(DecodedImage(pixels), vision, device_pixels=10**6), vision)
        for pixels in (before, after)
    ]
    first, second = frames
    assert first.crops is None and first.tiling == second.tiling
    count = first.num_distinct
    reused = tuple(i for i in range(count) if first.crop_keys[i] == second.crop_keys[i])
    assert 0 < len(reused) < count - 1 and 0 not in reused
    step(runtime, encode=(EncodeSlice(first, 0, count, kept=reused),))
    step(runtime, encode=(EncodeSlice(second, 0, count, reused=reused),))
    crops = [
        torch.from_numpy(cut_crops(DecodedImage(pixels), vision).crops).to(small_models.DEVICE)
        for pixels in (before, after)
    ]
    new = [index for index in range(count) if index not in reused]
    features = runtime.encode_crops(crops[0]).clone()
    features[new] = runtime.encode_crops(crops[1][new])
    (wanted,) = runtime.vision.embed_many([(features, second.tiling)])
    assert runtime.parts.images.prefix(second.key)[1:].equal(wanted)
    # An image all of whose crops are kept.
    again = dataclasses.replace(first, key="again")
    step(runtime, encode=(EncodeSlice(first, 0, count, reused=reused, kept=tuple(new)),))
    step(runtime, encode=(EncodeSlice(again, 0, count, reused=tuple(range(count))),))
    assert runtime.parts.images.prefix("again").equal(runtime.parts.images.prefix(first.key))
    runtime.close()


@pytest.mark.slow
async def test_frames_of_a_fixed_camera():
    """The second frame encodes the two crops that changed, and all results stay as they were."""
    results, encoded, reused = [], [], []
    for cache in (0, 64 * 2**20):
        listener = Listener()
        config = RuntimeConfig(model_path=TINY, device="cpu", crop_cache_bytes=cache)
        async with await InferenceEngine.create(config, observer=listener) as engine:
            begun = len(listener.steps)
            found = []
            for frame in (FRAME, NEXT):
                embedded = await engine.embed(frame, crops=True, pooling="none")
                boxes = await engine.detect(frame, "circle", settings={"max_objects": 3})
                found.append((embedded.output, boxes.output, boxes.token_ids))
                last = boxes.metrics
            results.append(found)
            steps: list[StepEvent] = listener.steps[begun:]
            encoded.append(sum(event.num_crops for event in steps))
            reused.append(sum(event.num_reused_crops for event in steps))
    for plain, kept in zip(*results, strict=True):
        np.testing.assert_array_equal(plain[0]["image"], kept[0]["image"])
        np.testing.assert_array_equal(plain[0]["crops"], kept[0]["crops"])
        assert plain[1:] == kept[1:]
    count = len(results[0][0][0]["crops"])
    # Without the cache: each frame once for its crops, and once for its answer.
    assert (encoded[0], reused[0]) == (4 * count, 0)
    assert (encoded[1], reused[1]) == (count + 2, 3 * count - 2)
    assert (last.encoded_crops, last.reused_crops) == (0, count)
