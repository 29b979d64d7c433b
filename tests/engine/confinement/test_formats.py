"""Every format, and hostile files of each: a confined decoder gives what the functions give in an open process."""

import logging
from pathlib import Path

import numpy as np
import pytest

from kestrel_engine.config.image_limits import ImageLimits
from kestrel_engine.errors import RequestError
from kestrel_engine.preprocess.crops import cut_crops
from kestrel_engine.preprocess.decoding.heif_probes import HEIF_PROBES
from kestrel_engine.preprocess.decoding.open_image import open_image
from kestrel_engine.preprocess.pool import PreprocessPool
from kestrel_engine.types.model_config import VisionConfig
from tests.engine.preprocess.decoding.test_hostile_images import IMAGE, REFUSED, TAKEN, encoded
from tests.engine.preprocess.decoding.test_tiff import ACCEPTED

LIMITS, VISION = ImageLimits(), VisionConfig()
GOLDENS = Path(__file__).parents[2] / "data" / "goldens" / "images"
FILES = {path.name: path.read_bytes() for path in sorted(GOLDENS.iterdir())}


def others() -> dict[str, bytes]:
    return {
        "jpeg cmyk": encoded("JPEG", IMAGE.convert("CMYK")),
        "jpeg grey": encoded("JPEG", IMAGE.convert("L")),
        "png of 16 bits": encoded("PNG", IMAGE.convert("I;16")),
        "tiff lzw": encoded("TIFF", compression="tiff_lzw"),
        "tiff jpeg": encoded("TIFF", compression="jpeg"),
        "tiff lab": encoded("TIFF", IMAGE.convert("LAB")),
        "tiff cmyk": encoded("TIFF", IMAGE.convert("CMYK")),
        "webp lossless": encoded("WEBP", lossless=True),
        "webp large": encoded("WEBP", IMAGE.resize((1600, 1200))),
        "avif large": encoded("AVIF", IMAGE.resize((1600, 1200))),
        "gif animated": encoded("GIF", save_all=True, append_images=[IMAGE.rotate(180)]),
    } | HEIF_PROBES


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    made = bytearray(data)
    for _ in range(rng.integers(1, 8)):
        made[rng.integers(len(made))] = rng.integers(256)
    return bytes(made[: rng.integers(len(made) // 2, len(made) + 1)])


@pytest.mark.parametrize("rounds", [1, pytest.param(30, marks=pytest.mark.slow)])
async def test_all_files_end_as_in_an_open_process(caplog, rounds):
    rng = np.random.default_rng(36)
    whole = [*TAKEN.values(), *others().values(), *(data for data, _ in ACCEPTED.values())]
    broken = [damaged(data, rng) for data in whole for _ in range(rounds)]
    pool = PreprocessPool(2, LIMITS, VISION)

    with caplog.at_level(logging.WARNING):
        for data in (*whole, *FILES.values(), *REFUSED.values(), *broken):
            try:
                expected = cut_crops(open_image(data, LIMITS), VISION).key
            except RequestError as error:
                with pytest.raises(type(error)) as caught:
                    await pool.prepare(data)
                assert str(caught.value) == str(error)
            else:
                assert (await pool.prepare(data)).image.key == expected
    pool.close()
    assert not caplog.messages
