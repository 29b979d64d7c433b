"""Several images in one prompt on a GPU: token for token as on the CPU, in float32, with graphs and without.

The golden models are small, but their images have as many positions as those of the released models.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.equality.mixes import ASKS, SEVERAL, Alone, Mix, Model, Seen, assert_equal, run_mix


def model_of(name: str, folder: Path, **config: object) -> Model:
    return Model(name, {"model_path": folder, **config}, 730, (1, 5, 10, 73), ASKS)


@pytest.mark.parametrize("name", ["md2", "md3"])
@pytest.mark.parametrize("beside", ["on", "off"])
async def test_several_images_beside_others_are_as_on_the_cpu(
    name: str, beside: str, golden_folder: Callable[[str], Path], golden_images: Path
) -> None:
    folder = golden_folder(name)
    on_cpu = model_of(name, folder)
    asks = [*SEVERAL, *ASKS[:6], *reversed(SEVERAL)]
    expected = await Alone(golden_images).of(on_cpu, asks)
    on_gpu = model_of(name, folder, device="cuda", decode_beside=beside)
    for page_size, room in ((10, 6000), (1, 2 * 730 + 60)):
        settings = {"max_batch_size": 8, "page_size": page_size}
        settings |= {"kv_cache_pages": room // page_size, "step_crops": 4}
        mix = Mix(asks, [0.01 * index for index in range(len(asks))])
        seen = Seen()
        together = await run_mix(on_gpu, settings, mix, golden_images, seen)
        assert_equal(mix, together, expected, {"model": name, **settings})
        assert seen.cached_positions > 730


@pytest.mark.parametrize("name", ["md2", "md3"])
async def test_without_graphs(
    name: str, golden_folder: Callable[[str], Path], golden_images: Path
) -> None:
    folder = golden_folder(name)
    expected = await Alone(golden_images).of(model_of(name, folder), SEVERAL)
    tested = model_of(name, folder, device="cuda", cuda_graphs=False)
    settings = {"max_batch_size": 4, "page_size": 10, "kv_cache_pages": 600}
    mix = Mix(SEVERAL, [0.0] * len(SEVERAL))
    together = await run_mix(tested, settings, mix, golden_images)
    assert_equal(mix, together, expected, {"model": name, **settings})
