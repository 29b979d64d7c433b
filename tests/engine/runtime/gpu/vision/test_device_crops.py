"""Crops made on the device against those of the CPU path, which libvips resizes: every byte."""

import json
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kestrel_engine.config.image_limits import ImageLimits
from kestrel_engine.models.vision import num_distinct
from kestrel_engine.preprocess.crops import cut_crops, select_tiling
from kestrel_engine.preprocess.decoding.decoded_image import DecodedImage
from kestrel_engine.preprocess.decoding.open_image import open_image
from kestrel_engine.runtime.gpu.capture import record_graph
from kestrel_engine.runtime.gpu.state.staging import ImageUploader, Uploader
from kestrel_engine.runtime.gpu.vision import crop_graphs, device_crops
from kestrel_engine.runtime.gpu.vision.crop_graphs import CropGraphs
from kestrel_engine.runtime.gpu.vision.device_crops import DeviceCrops
from kestrel_engine.types.model_config import VisionConfig
from kestrel_engine.types.requests import PreparedImage

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK = (8, 256) if DEVICE.type == "cuda" else (64, 512)
"""Interpreted, each operation of a program takes some microseconds, and 5 ns for each element."""
GOLDENS = Path(__file__).parents[4] / "data" / "goldens"
IMAGES = json.loads((GOLDENS / "preprocess" / "preprocess.json").read_text())["images"]
FULL = VisionConfig()
TINY = VisionConfig(crop_size=252, max_crops=6, overlap_margin=4)
SMALL = VisionConfig(crop_size=56, max_crops=6, overlap_margin=1)


def noise(width: int, height: int) -> DecodedImage:
    rng = np.random.default_rng(width * 100_000 + height)
    return DecodedImage(rng.integers(0, 256, (height, width, 3), np.uint8))


def maker(
    vision: VisionConfig, block: tuple[int, int] = BLOCK, graphs: CropGraphs | None = None
) -> DeviceCrops:
    upload, upload_pixels = Uploader(DEVICE), ImageUploader(DEVICE)
    return DeviceCrops(vision, upload, upload_pixels, DEVICE, graphs=graphs, block=block)


def as_pixels(image: DecodedImage, vision: VisionConfig) -> PreparedImage:
    tiling = select_tiling(image.width, image.height, vision)
    return PreparedImage("", None, tiling, image.width, image.height, image.pixels)


def assert_equal_crops(images: list[DecodedImage], vision: VisionConfig) -> None:
    found = maker(vision)([as_pixels(image, vision) for image in images])
    for image, crops in zip(images, found, strict=True):
        wanted = cut_crops(image, vision)
        assert wanted.crops is not None
        distinct = num_distinct(wanted.num_crops, wanted.tiling)
        assert np.array_equal(crops.cpu().numpy(), wanted.crops[:distinct]), (
            image.width,
            image.height,
        )


def golden(name: str) -> DecodedImage:
    return open_image(GOLDENS / IMAGES[name]["file"], ImageLimits())


@pytest.mark.golden
def test_golden_images_of_both_kinds():
    assert_equal_crops([golden("small_120x90"), golden("square_378")], FULL)


@pytest.mark.golden
@pytest.mark.slow
def test_golden_images():
    assert_equal_crops([golden(name) for name in IMAGES], FULL)


SIZES = [
    (850, 600),  # Both ways larger, for the tiles; both smaller, for the whole.
    (378, 378),  # Nothing to do.
    (378, 500),
    (500, 378),
    (644, 910),  # Tiles are cut out of the image itself.
    (1, 1),
    (1, 20),
    (37, 700),  # One way larger, the other smaller.
    (2000, 130),
    (1600, 2300),  # Means of two, three and more pixels come first.
    (200, 4000),
]


@pytest.mark.parametrize("size", SIZES)
def test_sizes_of_every_kind(size):
    if DEVICE.type == "cuda":
        assert_equal_crops([noise(*size)], FULL)
    width, height = (max(1, round(side * SMALL.crop_size / FULL.crop_size)) for side in size)
    assert_equal_crops([noise(width, height)], SMALL)


@pytest.mark.parametrize(("vision", "count"), [(TINY, 1), (SMALL, 8)])
def test_random_sizes(vision, count):
    check_random_sizes(np.random.default_rng(count), vision, count=count)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_random_sizes():
    """On a GPU a thousand of all shapes; interpreted, some of the small one. The formulas have their thousand in
    test_exact_resize.py."""
    rng = np.random.default_rng(1)
    full, tiny, small = (800, 100, 100) if DEVICE.type == "cuda" else (0, 0, 200)
    check_random_sizes(rng, FULL, count=full)
    check_random_sizes(rng, TINY, count=tiny)
    check_random_sizes(rng, SMALL, count=small)


def check_random_sizes(rng: np.random.Generator, vision: VisionConfig, *, count: int) -> None:
    largest = 4 * vision.crop_size
    while count:
        width, height = (int(side) for side in rng.integers(1, largest, 2))
        if max(width, height) <= 20 * min(width, height):
            assert_equal_crops([noise(width, height)], vision)
            count -= 1


def test_images_of_all_kinds_together(monkeypatch):
    """In one group, and in groups of what little fits."""
    images = [noise(*size) for size in [(100, 60), (56, 56), (30, 200), (500, 400), (98, 98)]]
    assert_equal_crops(images, SMALL)
    monkeypatch.setattr(device_crops, "ARENA_BYTES", 100_000)
    groups = list(maker(SMALL).groups([as_pixels(image, SMALL) for image in images]))
    assert 1 < len(groups) < len(images)
    assert_equal_crops(images, SMALL)


def test_blocks_give_the_same_crops():
    image = as_pixels(noise(40, 90), SMALL)
    (wanted,) = maker(SMALL)([image])
    (found,) = maker(SMALL, (16, 128))([image])
    assert torch.equal(wanted, found)


class Recorder:
    """Captures as a runtime does. On a CPU, it calls the launches again. ``replays``: how often."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, body):
        again = body
        if DEVICE.type == "cuda":
            again = record_graph(body, torch.cuda.graph_pool_handle()).replay

        def replay():
            self.replays += 1
            again()

        return replay


def shifted(image: DecodedImage, by: int) -> DecodedImage:
    """Another image of the same size."""
    return DecodedImage(np.roll(image.pixels, by, axis=0))


@contextmanager
def own_stream():
    with nullcontext() if DEVICE.type == "cpu" else torch.cuda.stream(torch.cuda.Stream()):
        yield


def test_images_that_come_alone_are_made_by_graphs(monkeypatch):
    """From the third one of a size on; sizes take turns, and the crops of an image stay when the next one comes."""
    monkeypatch.setattr(crop_graphs, "GRAPHS_KEPT", 2)
    record = Recorder()
    with own_stream():
        make = maker(SMALL, graphs=CropGraphs(7, SMALL.crop_size, DEVICE, record))
        found = []
        for size in [(100, 60), (100, 60), (40, 90), (100, 60), (40, 90), (100, 60), (40, 90)]:
            image = shifted(noise(*size), len(found))
            found.append((image, make([as_pixels(image, SMALL)])[0]))
            make.capture()
        assert record.replays == 3
        # A third size takes the place of the one that was used the longest time ago.
        for size in [(70, 70), (70, 70), (40, 90), (70, 70), (100, 60)]:
            image = shifted(noise(*size), len(found))
            found.append((image, make([as_pixels(image, SMALL)])[0]))
            make.capture()
        assert record.replays == 5
        for image, crops in found:
            wanted = cut_crops(image, SMALL)
            assert np.array_equal(crops.cpu().numpy(), wanted.crops[: len(crops)])


def test_images_that_no_graph_makes(monkeypatch):
    """Large ones, ones with many crops, and ones that come together."""
    monkeypatch.setattr(crop_graphs, "ARENA_BYTES", 60_000)
    record = Recorder()
    with own_stream():
        make = maker(SMALL, graphs=CropGraphs(3, SMALL.crop_size, DEVICE, record))
        for size in ((200, 200), (30, 30), (100, 60)):
            for count in (2, 1, 1, 1):
                images = [noise(*size)] * count
                for crops in make([as_pixels(image, SMALL) for image in images]):
                    wanted = cut_crops(images[0], SMALL)
                    assert np.array_equal(crops.cpu().numpy(), wanted.crops[: len(crops)])
                make.capture()
        assert record.replays == 1
        make.clear()
        make([as_pixels(noise(30, 30), SMALL)])
        assert record.replays == 1


def test_no_images():
    assert maker(SMALL)([]) == []
