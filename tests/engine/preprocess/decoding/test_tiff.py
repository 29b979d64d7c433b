"""Colours of TIFFs: red stays red in each kind that is accepted, and the other kinds are refused by name."""

import io

import numpy as np
import pytest
import pyvips
from PIL import Image, ImageOps

from kestrel_engine.config.image_limits import ImageLimits
from kestrel_engine.errors import ImageDecodeError, UnsupportedImageError
from kestrel_engine.preprocess.decoding.open_image import OnBackground, open_image
from tests.engine.preprocess.decoding.tiffs import HEIGHT, WIDTH, tiff, tiff_of

RED = (200, 30, 40)
RED_YCC = [82, 104, 212]
"""RED by ITU-R BT.601 in the full range."""
FULL = [(0, 1), (255, 1), (128, 1), (255, 1), (128, 1), (255, 1)]
LIMITED = [(16, 1), (235, 1), (128, 1), (240, 1), (128, 1), (240, 1)]
BT709 = [(2126, 10000), (7152, 10000), (722, 10000)]


def colour_map(bits: int) -> list[int]:
    return [value * 257 * (i == 1) for value in RED for i in range(2**bits)]


def subsampled(across: int, down: int) -> bytes:
    unit = bytes([RED_YCC[0]] * across * down + RED_YCC[1:])
    return tiff_of(
        unit * (WIDTH * HEIGHT // (across * down)),
        t258=[8, 8, 8],
        t277=3,
        t262=6,
        t530=[across, down],
    )


YCC = {"t262": 6, "t530": [1, 1]}
ACCEPTED = {
    "white is zero": (tiff([30], t262=0), (225, 225, 225)),
    "white is zero, 16 bits": (tiff([30 * 257], "u2", t262=0), (225, 225, 225)),
    "white is zero, alpha": (tiff([30, 9], t262=0, t338=2), (225, 225, 225)),
    "black is zero, big-endian": (tiff([30 * 257], "u2", ">", t262=1), (30, 30, 30)),
    "grey with two more samples": (tiff([30, 8, 9], t262=1, t338=[0, 0]), (30, 30, 30)),
    "4 bits": (tiff_of(b"\x33" * 96, t258=4, t277=1, t262=1), (51, 51, 51)),
    "RGB": (tiff([*RED], t262=2), RED),
    "RGB, 16 bits": (tiff([v * 257 for v in RED], "u2", t262=2), RED),
    "RGB of no declared type": (tiff([*RED], t262=2, t339=[4, 4, 4]), RED),
    "RGB and alpha": (tiff([*RED, 99], t262=2, t338=2), RED),
    "RGB, premultiplied": (tiff([100, 15, 20, 128], t262=2, t338=1), (199, 30, 40)),
    "RGB and two more": (tiff([*RED, 99, 98], t262=2, t338=[0, 0]), RED),
    "palette": (tiff([1], t262=3, t320=colour_map(8)), RED),
    "palette and alpha": (tiff([1, 99], t262=3, t338=2, t320=colour_map(8)), RED),
    "palette, 4 bits": (tiff_of(b"\x11" * 96, t258=4, t277=1, t262=3, t320=colour_map(4)), RED),
    "palette, 1 bit": (tiff_of(b"\xff" * 24, t258=1, t277=1, t262=3, t320=colour_map(1)), RED),
    # By the profile that libvips has for CMYK without one.
    "CMYK": (tiff([55, 225, 215, 0], t262=5), (190, 64, 64)),
    "CMYK, 16 bits, alpha": (tiff([14135, 57825, 55255, 0, 9], "u2", t262=5), (190, 64, 64)),
    "YCbCr": (tiff(RED_YCC, **YCC), RED),
    "YCbCr, big-endian, full range": (tiff(RED_YCC, order=">", **YCC, t532=FULL), RED),
    # The same values by BT.709, and by BT.601 in the limited range: computed by hand.
    "YCbCr, BT.709": (tiff(RED_YCC, **YCC, t529=BT709), (214, 47, 37)),
    "YCbCr, limited range": (tiff(RED_YCC, **YCC, t532=LIMITED), (210, 18, 29)),
    "YCbCr, subsampled": (subsampled(2, 2), RED),
    "YCbCr, one subsampled direction": (subsampled(2, 1), RED),
    # L* 43, a* 67, b* 42.
    "CIELab, 16 bits": (tiff([28270, 67 * 256, 42 * 256], "i2", t262=8), (203, 12, 36)),
}


def centre(data: bytes, background=None) -> np.ndarray:
    source = data if background is None else OnBackground(data, background)
    pixels = open_image(source, ImageLimits()).pixels
    assert pixels.shape == (HEIGHT, WIDTH, 3) and (pixels == pixels[0, 0]).all()
    return pixels[0, 0].astype(int)


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_colour_stays(name):
    data, colour = ACCEPTED[name]
    assert np.abs(centre(data) - colour).max() <= 1


@pytest.mark.parametrize("compression", [None, "tiff_lzw", "packbits", "tiff_deflate", "jpeg"])
def test_ycbcr_as_pillow_writes_it(compression):
    image = Image.new("RGB", (64, 48), RED)
    image.paste((20, 200, 60), (32, 0, 64, 48))
    buffer = io.BytesIO()
    image.convert("YCbCr").save(buffer, "TIFF", compression=compression)
    pixels = open_image(buffer.getvalue(), ImageLimits()).pixels.astype(int)
    assert np.abs(pixels - np.asarray(image)).max() <= 4


@pytest.mark.parametrize("orientation", range(1, 9))
def test_ycbcr_stands_upright(orientation):
    stored = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    stored[:4, :6], stored[8:, :4] = (200, 30, 40), (20, 30, 210)
    samples = np.asarray(Image.fromarray(stored).convert("YCbCr"))
    blocks = samples.reshape(HEIGHT // 2, 2, WIDTH // 2, 2, 3).transpose(0, 2, 1, 3, 4)
    units = b"".join(bytes(b[..., 0].ravel()) + bytes(b[0, 0, 1:]) for r in blocks for b in r)
    exif = Image.Exif()
    exif[0x0112] = orientation
    png = io.BytesIO()
    Image.fromarray(stored).save(png, "PNG", exif=exif)
    upright = np.asarray(ImageOps.exif_transpose(Image.open(png))).astype(int)
    colour = {"t258": [8, 8, 8], "t277": 3, "t262": 6, "t274": orientation}
    for data, sampling in ((samples.tobytes(), [1, 1]), (units, [2, 2])):
        pixels = open_image(tiff_of(data, **colour, t530=sampling), ImageLimits()).pixels
        assert pixels.shape == upright.shape and np.abs(pixels - upright).max() <= 3


REFUSED = {
    "PhotometricInterpretation 4": tiff([1], t262=4),
    "PhotometricInterpretation 9": tiff([110, 195, 170], t262=9),
    "PhotometricInterpretation 32803": tiff([100], t262=32803),
    "PhotometricInterpretation 32844": tiff([100], "i2", t262=32844),
    "PhotometricInterpretation 34892": tiff([*RED], t262=34892),
    "CIELab TIFF with samples of 8 bits": tiff([110, 195, 170], t262=8),
    "YCbCr TIFF with samples of 16 bits": tiff([1, 2, 3], "u2", **YCC),
    "YCbCr TIFF with 1 extra samples": tiff([*RED_YCC, 1], **YCC, t338=2),
    r"not CMYK \(InkSet 2, 3 samples\)": tiff([55, 225, 215], t262=5, t332=2),
    r"not CMYK \(InkSet 2, 5 samples\)": tiff([55, 225, 215, 0, 1], t262=5, t332=2),
    "floating-point samples of 16 bits": tiff([0.5], "f2", t262=1, t339=3),
    "floating-point samples of 32 bits": tiff([0.8, 0.1, 0.2], "f4", t262=2, t339=[3, 3, 3]),
    "floating-point samples of 64 bits": tiff([0.8, 0.1, 0.2], "f8", t262=2, t339=[3, 3, 3]),
    "signed samples of 8 bits": tiff([30], "i1", t262=1, t339=2),
    "signed samples of 16 bits": tiff([300, 20, 1], "i2", t262=2, t339=[2, 2, 2]),
    "complex samples": tiff([1], "c8", t262=1, t339=6),
    r"grey \(BlackIsZero\) TIFF with samples of 32 bits": tiff([2**31], "u4", t262=1),
    "RGB TIFF with samples of 12 bits": tiff_of(bytes(864), t258=[12] * 3, t277=3, t262=2),
    "RGB TIFF with samples of 5, 6 bits": tiff_of(bytes(384), t258=[5, 6, 5], t277=3, t262=2),
    "tiled RGB TIFF with separate": tiff([*RED], t262=2, t284=2, t322=16, t323=16),
    "YCbCr TIFF with separate planes": tiff(RED_YCC, **YCC, t284=2),
    "first page is a reduced copy": tiff([*RED], t262=2, t254=1),
    "first page is a mask": tiff([1], t262=1, t254=6),
    "compression 6": tiff([*RED], t262=2, t259=6),
    "compression 34925": tiff([*RED], t262=2, t259=34925),
    "compression 50000": tiff([*RED], t262=2, t259=50000),
}


@pytest.mark.parametrize("words", REFUSED)
def test_other_kinds_are_refused_by_name(words):
    words_of = words if "\\" in words else words.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(UnsupportedImageError, match=f"is a .*{words_of}.*can't be decoded; save"):
        open_image(REFUSED[words], ImageLimits())


def test_planes_of_rgb():
    planes = b"".join(bytes([value]) * (WIDTH * HEIGHT) for value in RED)
    image = pyvips.Image.new_from_memory(planes, WIDTH, HEIGHT * 3, 1, "uchar")
    bands = [image.crop(0, HEIGHT * i, WIDTH, HEIGHT) for i in range(3)]
    whole = bands[0].bandjoin(bands[1:]).copy(interpretation="srgb")
    assert centre(whole.tiffsave_buffer()).tolist() == list(RED)


def test_samples_that_are_not_alpha_are_laid_on_no_colour():
    assert centre(tiff([*RED, 0], t262=2, t338=0), (0, 0, 255)).tolist() == list(RED)
    assert centre(tiff([*RED, 0], t262=2, t338=2), (0, 0, 255)).tolist() == [0, 0, 255]
    assert centre(tiff([*RED, 0, 255], t262=2, t338=[2, 0]), (0, 0, 255)).tolist() == [0, 0, 255]


@pytest.mark.parametrize(
    "tags", [{"t529": [(0, 0)] * 3}, {"t529": [(1, 1), (0, 1), (0, 1)]}, {"t532": [(7, 1)] * 6}]
)
def test_impossible_coefficients_are_broken(tags):
    with pytest.raises(ImageDecodeError, match="broken or truncated TIFF"):
        open_image(tiff(RED_YCC, **YCC, **tags), ImageLimits())


@pytest.mark.parametrize("tag", [254, 259, 262, 277, 284, 332])
def test_a_whole_number_that_is_0_by_0_is_broken(tag):
    with pytest.raises(ImageDecodeError, match="broken or truncated TIFF"):
        open_image(tiff([*RED], **{"t262": 2, f"t{tag}": [(0, 0)]}), ImageLimits())


def test_truncated_data_of_each_kind_is_broken_not_unsupported():
    for data, _ in ACCEPTED.values():
        for end in (len(data) // 2, len(data) - 1, 9, 12):
            with pytest.raises(ImageDecodeError) as caught:
                open_image(data[:end], ImageLimits())
            assert not isinstance(caught.value, UnsupportedImageError)
