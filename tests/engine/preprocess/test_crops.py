"""Tiling, resizing and keys against the stored reference (moondream.md section 4)."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pyvips
from hypothesis import strategies as st

from kestrel_engine.config.image_limits import ImageLimits
from kestrel_engine.preprocess.crops import cut_crops, select_tiling
from kestrel_engine.preprocess.decoding.decoded_image import DecodedImage
from kestrel_engine.preprocess.decoding.open_image import open_image
from kestrel_engine.types.model_config import VisionConfig
from tests.examples import given_examples

GOLDENS = Path(__file__).parents[2] / "data" / "goldens"
EXPECTED = json.loads((GOLDENS / "preprocess" / "preprocess.json").read_text())
VISION = VisionConfig()


def sha256(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


@pytest.mark.golden
@pytest.mark.parametrize("name", sorted(EXPECTED["images"]))
def test_crops_equal_the_reference(name):
    golden = EXPECTED["images"][name]
    image = open_image(GOLDENS / golden["file"], ImageLimits())
    assert (image.width, image.height) == (golden["width"], golden["height"])
    assert sha256(image.pixels) == golden["decoded_rgb_sha256"]
    prepared = cut_crops(image, VISION)
    assert prepared.tiling == tuple(golden["tiling"])
    assert list(prepared.crops.shape) == golden["crops_shape"]
    assert prepared.crops.dtype == np.uint8 and prepared.crops.flags.c_contiguous
    assert prepared.num_crops == golden["n_crops"]
    assert [int(crop.sum(dtype=np.int64)) for crop in prepared.crops] == golden["crop_sums"]
    for crop, y, x, rgb in golden["samples"]:
        assert prepared.crops[crop, y, x].tolist() == rgb
    assert sha256(prepared.crops) == golden["crops_sha256"]
    assert (prepared.width, prepared.height) == (golden["width"], golden["height"])


@pytest.mark.golden
def test_tiling_equals_the_reference_table():
    rows = EXPECTED["tiling_table"]["rows"]
    assert len(rows) == 257
    for height, width, tiles_h, tiles_w in rows:
        assert select_tiling(width, height, VISION) == (tiles_h, tiles_w), (width, height)


@pytest.mark.parametrize(
    ("sizes", "tiling"),
    [
        ([(100, 100), (378, 378), (3000, 300)], (1, 1)),
        ([(379, 379), (1536, 1536)], (3, 3)),
        ([(640, 480), (800, 600), (1280, 720), (1920, 1080), (4000, 3000)], (2, 4)),
        ([(1024, 768)], (3, 4)),
        ([(768, 1024)], (4, 3)),
        ([(1200, 630)], (2, 5)),
        ([(5000, 500)], (1, 10)),
        ([(600, 10000)], (15, 1)),
    ],
)
def test_tiling_vectors_of_the_specification(sizes, tiling):
    assert {select_tiling(width, height, VISION) for width, height in sizes} == {tiling}


SMALL = VisionConfig(crop_size=252, max_crops=6, overlap_margin=4)
VISIONS = st.sampled_from([VISION, SMALL])


@given_examples(6, 40, width=st.integers(1, 1500), height=st.integers(1, 1500), vision=VISIONS)
def test_crops_equal_those_cut_out_of_the_whole_resized_image(width, height, vision):
    """As libvips' own writer resizes it, in one go and with threads of its own."""
    rng = np.random.default_rng(width * 1000 + height)
    image = DecodedImage(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    prepared = cut_crops(image, vision)
    rows, columns = prepared.tiling
    side, margins = vision.crop_size, 2 * vision.overlap_margin * vision.enc_patch_size
    window = side - margins
    assert np.array_equal(prepared.crops[0], whole(image.pixels, side, side))
    grid = whole(image.pixels, columns * window + margins, rows * window + margins)
    for index, crop in enumerate(prepared.crops[1:]):
        top, left = window * (index // columns), window * (index % columns)
        assert np.array_equal(crop, grid[top : top + side, left : left + side])


def whole(pixels: np.ndarray, width: int, height: int) -> np.ndarray:
    image = pyvips.Image.new_from_array(pixels)
    image = image.resize(width / image.width, vscale=height / image.height).copy()
    image.set_type(pyvips.GValue.gint_type, "concurrency", 3)
    return np.frombuffer(image.write_to_memory(), np.uint8).reshape(height, width, 3)


@given_examples(
    8, 25, width=st.integers(1, 1500), height=st.integers(1, 1500), rows_at_once=st.integers(1, 400)
)
def test_threads_beside_the_decoder_give_the_same_crops(width, height, rows_at_once):
    rng = np.random.default_rng(width * 1000 + height)
    true = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    pixels = np.zeros_like(true)

    def decoding():
        for top in range(0, height, rows_at_once):
            part = slice(top, min(top + rows_at_once, height))
            pixels[part] = true[part]
            yield part.stop

    def split(pieces):
        with ThreadPoolExecutor(4) as threads:
            for future in [threads.submit(piece) for piece in pieces]:
                future.result()

    alone = cut_crops(DecodedImage(true), VISION)
    shared = cut_crops(DecodedImage(pixels, decoding()), VISION, run=split)
    assert np.array_equal(alone.crops, shared.crops)
    assert (alone.key, alone.tiling) == (shared.key, shared.tiling)


class Grudging(DecodedImage):
    """Has only the rows that were waited for; the others are another image's."""

    def __init__(self, true: np.ndarray) -> None:
        super().__init__(255 - true)
        self.true = true

    def wait_for(self, rows: int) -> None:
        assert rows <= self.height
        self.pixels[rows:] = 255 - self.true[rows:]
        self.pixels[:rows] = self.true[:rows]


@given_examples(6, 60, width=st.integers(1, 1200), height=st.integers(1, 6000), vision=VISIONS)
def test_a_piece_waits_for_all_the_rows_it_reads(width, height, vision):
    rng = np.random.default_rng(width * 1000 + height)
    true = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)

    def in_turn(pieces):
        for piece in pieces:
            piece()

    wanted = cut_crops(DecodedImage(true), vision)
    found = cut_crops(Grudging(true), vision, run=in_turn)
    assert np.array_equal(wanted.crops, found.crops)
    assert wanted.key == found.key


@pytest.mark.parametrize("size", [(1, 1), (1, 20), (2000, 100), (100, 2000), (378, 1), (379, 379)])
def test_extreme_sizes(size):
    width, height = size
    prepared = cut_crops(DecodedImage(np.full((height, width, 3), 77, np.uint8)), VISION)
    assert (prepared.width, prepared.height) == size
    assert (prepared.crops == 77).all()


def test_the_key_of_pixels_depends_on_them_and_the_geometry_only():
    pixels = np.arange(40 * 60 * 3, dtype=np.uint32).astype(np.uint8).reshape(40, 60, 3)
    key = cut_crops(DecodedImage(pixels), VISION).key
    assert key == cut_crops(DecodedImage(pixels.copy()), VISION).key
    changed = pixels.copy()
    changed[39, 59, 2] ^= 1
    others = [
        cut_crops(DecodedImage(changed), VISION).key,
        cut_crops(DecodedImage(pixels.reshape(60, 40, 3)), VISION).key,
        cut_crops(DecodedImage(pixels), SMALL).key,
        cut_crops(DecodedImage(pixels), replace(VISION, max_crops=11)).key,
    ]
    assert len({key, *others}) == 5


def test_the_key_of_an_encoded_image_depends_on_its_bytes_and_the_geometry_only():
    def key(*identity: bytes, vision=VISION, value=0):
        return cut_crops(
            DecodedImage(np.full((40, 60, 3), value, np.uint8), None, identity), vision
        ).key

    found = key(b"image", b"")
    assert found == key(b"image", b"", value=1)
    others = [
        key(b"imagf", b""),
        key(b"image", b"\0\0\0"),
        key(b"imag", b"e"),
        key(b"image", b"", vision=SMALL),
        cut_crops(DecodedImage(np.zeros((40, 60, 3), np.uint8)), VISION).key,
    ]
    assert len({found, *others}) == 6
