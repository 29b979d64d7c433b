"""How many embeddings of images stay on the device."""

from kestrel_engine import RuntimeConfig
from kestrel_engine.building.room import KEPT_IMAGES, extra_bytes, kept_images
from kestrel_engine.sizing import fit
from tests.engine.models.small import small_config


def test_bytes_become_whole_images():
    model = small_config("moondream2")
    one = model.image_positions * model.text.dim * 2
    assert kept_images(RuntimeConfig(), model, 2) == KEPT_IMAGES
    assert extra_bytes(RuntimeConfig(), model, 2) == 0
    for given, images in ((0, 0), (one - 1, 0), (one, 1), (5 * one + 1, 5), (20 * one, 20)):
        config = RuntimeConfig(embedding_cache_bytes=given)
        assert kept_images(config, model, 2) == images
        assert extra_bytes(config, model, 2) == max(0, images - KEPT_IMAGES) * one


def test_the_memory_of_a_gpu_counts_them():
    none, some = (
        fit(
            RuntimeConfig(model="moondream2", random_weights=True, embedding_cache_bytes=size),
            24 << 30,
        )
        for size in (None, 1 << 30)
    )
    assert 0.9 * (1 << 30) < some.reserve_bytes - none.reserve_bytes < 1 << 30
    assert some.pool_bytes < none.pool_bytes
