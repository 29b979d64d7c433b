"""Embeddings that a step returns equal the plain model's tower output."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kestrel_engine.runtime.embedding import pooled
from kestrel_engine.types.embedding import EmbeddingSpec
from kestrel_engine.types.requests import ImageBlock
from kestrel_engine.types.step import EncodeSlice, ImageRead, StepPlan
from tests.engine.runtime.test_torch_runtime import new_runtime, picture, row, spec, step, whole

ALL = EmbeddingSpec(crops=True, patches=True)


@pytest.fixture(scope="module")
def runtime():
    return new_runtime("moondream3")


def kept(tiling=(1, 2), key="picture"):
    image = picture(key, tiling)
    if tiling == (1, 1):
        image.crops[1] = image.crops[0]
    return replace(image, keeps_features=True)


def plain(runtime, image):
    """The embeddings of the image and of each distinct crop alone, [1 + n, patches, dim], by the model itself."""
    crops = torch.from_numpy(image.crops)
    distinct = crops[:1] if image.tiling == (1, 1) else crops
    with torch.inference_mode():
        return torch.stack(
            runtime.model.vision.encode_images([(crops, image.tiling)])
            + [runtime.model.vision.encode_images([(c[None], (1, 1))])[0] for c in distinct]
        ).numpy()


@pytest.mark.parametrize("tiling", [(1, 2), (1, 1)], ids=str)
def test_image_and_crops_by_patch(runtime, tiling):
    image = kept(tiling)
    result = step(runtime, encode=(whole(image),), reads=(ImageRead(7, image, ALL),))
    found, wanted = result.readings[7], plain(runtime, image)
    np.testing.assert_array_equal(found.image, wanted[0])
    np.testing.assert_array_equal(found.crops, wanted[1:])
    assert found.crops.shape[0] == (1 if tiling == (1, 1) else 3)
    assert result.vision_s > 0


def test_a_later_step_and_several_requests_read_the_same(runtime):
    image = kept(key="twice")
    step(runtime, encode=(EncodeSlice(image, 0, 2),))
    step(runtime, encode=(EncodeSlice(image, 2, 3),))
    both = step(runtime, reads=(ImageRead(1, image, ALL), ImageRead(2, image, ALL))).readings
    wanted = plain(runtime, image)
    for found in both.values():
        np.testing.assert_array_equal(np.stack([found.image, *found.crops]), wanted)
    # The result is the caller's own: the runtime's embedding stays as it is.
    both[1].image[:] = 0
    assert step(runtime, reads=(ImageRead(3, image, ALL),)).readings[3].image.any()


def test_pooled_vectors_are_means_of_length_1(runtime):
    image = kept(key="pooled")
    reads = (ImageRead(1, image, EmbeddingSpec(crops=True)), ImageRead(2, image, ALL))
    result = step(runtime, encode=(whole(image),), reads=reads)
    found, patches = result.readings[1], result.readings[2]
    mean = patches.crops.astype(np.float64).mean(axis=1)
    wanted = mean / np.linalg.norm(mean, axis=1, keepdims=True)
    np.testing.assert_allclose(found.crops, wanted, atol=1e-6)
    assert found.image.shape == (runtime.model.config.text.dim,)
    np.testing.assert_allclose(np.linalg.norm(found.image), 1, atol=1e-6)


def test_half_rounds_and_parts_are_left_out(runtime):
    image = kept(key="half")
    half = EmbeddingSpec(image=False, crops=True, patches=True, half=True)
    reads = (ImageRead(1, image, half), ImageRead(2, image, ALL))
    found = step(runtime, encode=(whole(image),), reads=reads).readings
    assert found[1].image is None and found[1].crops.dtype == np.float16
    np.testing.assert_array_equal(found[1].crops, found[2].crops.astype(np.float16))


def test_an_embedding_that_is_not_finite_fails_alone():
    runtime = new_runtime("moondream2")
    image, good = kept(key="bad"), kept(key="good")
    step(runtime, encode=(whole(image), whole(good)))
    runtime.images["bad"] = torch.full((25, runtime.model.config.text.dim), torch.nan)
    reads = (ImageRead(1, image, EmbeddingSpec()), ImageRead(2, good, EmbeddingSpec()))
    tokens = (row([0, ImageBlock("good", 25), 30], sample=spec(), sequence_id=3),)
    result = step(runtime, reads=reads, prefill=tokens)
    assert result.non_finite == {1} and result.readings.keys() == {2}
    assert result.tokens.keys() == {3}


def test_what_a_failed_step_should_have_encoded_is_not_read():
    runtime = new_runtime("moondream2")
    image = kept(key="lost")
    broken = replace(image, crops=image.crops[:, :10])
    plans = [StepPlan(0, encode=(whole(broken),)), StepPlan(1, reads=(ImageRead(1, image, ALL),))]
    handles = [runtime.launch(plan) for plan in plans]
    with pytest.raises(RuntimeError):
        runtime.collect(handles[0])
    assert runtime.collect(handles[1]).readings == {}


def test_the_mean_of_half_precision_is_taken_in_float32():
    vectors = torch.full((1000, 4), 100.0, dtype=torch.float16)
    torch.testing.assert_close(pooled(vectors), torch.full((4,), 0.5))
    assert not pooled(torch.zeros(3, 4)).any()
