"""Which images are taken, and what pixels they give. Broken and hostile ones: test_hostile_images.py."""

import io
import struct
import zlib

import numpy as np
import pytest
import pyvips
from PIL import Image, ImageCms, ImageOps

from kestrel_engine.config.image_limits import ImageLimits
from kestrel_engine.errors import (
    ImageDecodeError,
    ImageTooLargeError,
    InvalidRequest,
    UnsupportedImageError,
)
from kestrel_engine.preprocess.crops import cut_crops
from kestrel_engine.preprocess.decoding import plain_jpeg
from kestrel_engine.preprocess.decoding.heif_probes import HEIF_PROBES
from kestrel_engine.preprocess.decoding.open_image import IMAGE_FORMATS, open_image
from kestrel_engine.types.model_config import VisionConfig
from tests.engine.preprocess.encoded import encoded

LIMITS = ImageLimits()


def smooth(height: int = 48, width: int = 64, channels: int = 3) -> np.ndarray:
    """Soft gradients, different in each channel: lossy codecs come close, and no two orientations are alike."""
    y, x = np.mgrid[0:height, 0:width]
    planes = [3 * x + y, 2 * y + x, 255 - 2 * x - y, 4 * x]
    return np.stack([np.clip(plane, 0, 255) for plane in planes[:channels]], axis=2).astype(
        np.uint8
    )


def decode(source) -> np.ndarray:
    image = open_image(source, LIMITS)
    assert image.pixels.dtype == np.uint8
    assert image.pixels.flags.c_contiguous
    assert image.pixels.shape == (image.height, image.width, 3)
    return image.pixels


def key(source) -> str:
    return cut_crops(open_image(source, LIMITS), VisionConfig()).key


LOSSLESS = {
    "png": lambda a: encoded(a, "PNG"),
    "png-interlaced": lambda a: pyvips.Image.new_from_array(a).pngsave_buffer(interlace=True),
    "webp": lambda a: encoded(a, "WEBP", lossless=True),
    "tiff": lambda a: encoded(a, "TIFF"),
    "tiff-lzw": lambda a: encoded(a, "TIFF", compression="tiff_lzw"),
    "tiff-tiled": lambda a: pyvips.Image.new_from_array(a).tiffsave_buffer(
        tile=True, tile_width=16, tile_height=16, compression="deflate"
    ),
    "tiff-big": lambda a: pyvips.Image.new_from_array(a).tiffsave_buffer(bigtiff=True),
}


@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_formats_give_the_pixels(name):
    data = LOSSLESS[name](smooth())
    assert np.array_equal(decode(data), smooth())


def test_lossless_avif_gives_nearly_the_pixels():
    data = pyvips.Image.new_from_array(smooth()).heifsave_buffer(compression="av1", lossless=True)
    assert np.abs(decode(data).astype(int) - smooth()).max() <= 2


@pytest.mark.parametrize(
    ("fmt", "options"),
    [
        ("JPEG", {"quality": 95}),
        ("JPEG", {"quality": 90, "progressive": True}),
        ("JPEG", {"quality": 90, "subsampling": 2}),
        ("WEBP", {"quality": 95}),
        ("AVIF", {"quality": 95}),
        ("TIFF", {"compression": "jpeg", "quality": 95}),
    ],
)
def test_lossy_formats_come_close(fmt, options):
    error = np.abs(decode(encoded(smooth(), fmt, **options)).astype(int) - smooth())
    assert error.mean() < 4, error.mean()


def test_jpeg_equals_pillows_decoder():
    """Both use libjpeg-turbo on the full image: no shrink-on-load."""
    data = encoded(smooth(600, 800), "JPEG", quality=90)
    assert np.array_equal(decode(data), np.asarray(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize("sampling", ["444", "422", "420", "440", "411", "Gray"])
def test_libjpeg_turbo_gives_the_pixels_of_libvips(sampling, monkeypatch):
    simplejpeg = pytest.importorskip("simplejpeg")
    rng = np.random.default_rng(int(sampling, 36))
    for height, width in ((1, 1), (7, 9), (16, 16), (33, 50), (129, 255), (200, 31)):
        noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        noise[: height // 2] = smooth(height // 2 or 1, width)[: height // 2]
        for quality in (30, 95):
            if sampling == "Gray":
                data = encoded(Image.fromarray(noise).convert("L"), "JPEG", quality=quality)
            else:
                data = simplejpeg.encode_jpeg(noise, quality, "RGB", sampling)
            found = decode(data)
            with monkeypatch.context() as patch:
                patch.setattr(plain_jpeg, "AVAILABLE", False)
                assert np.array_equal(decode(data), found), (height, width, quality)


def test_jpegs_with_oddities_are_left_to_libvips(monkeypatch):
    """libjpeg warns of them; libvips accepts some of them and refuses others."""
    plain = encoded(smooth(), "JPEG")
    spoilt = bytearray(plain)
    spoilt[-200:-190] = b"\xff\xd0" * 5
    for data in (plain + b"behind", plain[:-2], bytes(spoilt), plain[: len(plain) // 2]):
        results = []
        for available in (True, False):
            monkeypatch.setattr(plain_jpeg, "AVAILABLE", available)
            try:
                results.append(decode(data).tobytes())
            except ImageDecodeError as error:
                results.append(str(error))
        assert results[0] == results[1]


def test_ultra_hdr_jpegs_give_their_base_image():
    """Phones add a gain map; libvips has a loader of its own for such files, which is not on the allow-list."""
    if not pyvips.type_find("VipsForeignSave", "uhdrsave_buffer"):
        pytest.skip("this libvips writes no Ultra HDR")
    linear = np.tile(np.linspace(0, 2, 64, dtype=np.float32)[None, :, None], (48, 1, 3))
    data = pyvips.Image.new_from_array(linear).copy(interpretation="scrgb").uhdrsave_buffer()
    assert np.array_equal(decode(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def test_first_frame_of_animations():
    first, second = smooth(), smooth()[::-1].copy()
    for fmt, options in (("WEBP", {"lossless": True}), ("PNG", {}), ("TIFF", {})):
        data = encoded(
            Image.fromarray(first),
            fmt,
            save_all=True,
            append_images=[Image.fromarray(second)],
            **options,
        )
        assert np.array_equal(decode(data), first), fmt


def test_first_frame_of_a_gif():
    red, blue = (Image.new("RGB", (40, 30), colour) for colour in ("red", "blue"))
    for frames in ([red], [red, blue, red]):
        data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=100)
        assert np.array_equal(decode(data), np.asarray(red))


def test_palettes_and_bits():
    coloured = Image.fromarray(smooth()).quantize(16)
    for fmt in ("PNG", "TIFF", "GIF"):
        assert np.array_equal(
            decode(encoded(coloured, fmt)), np.asarray(coloured.convert("RGB"))
        ), fmt
    bits = Image.fromarray(smooth()).convert("1")
    for fmt in ("PNG", "TIFF"):
        assert np.array_equal(decode(encoded(bits, fmt)), np.asarray(bits.convert("RGB"))), fmt


def test_grey_is_replicated():
    grey = Image.fromarray(smooth()).convert("L")
    expected = np.repeat(np.asarray(grey)[:, :, None], 3, axis=2)
    for fmt, options in (("PNG", {}), ("TIFF", {}), ("WEBP", {"lossless": True})):
        assert np.array_equal(decode(encoded(grey, fmt, **options)), expected), fmt
    assert np.array_equal(
        decode(encoded(grey, "JPEG")),
        np.asarray(Image.open(io.BytesIO(encoded(grey, "JPEG"))).convert("RGB")),
    )


@pytest.mark.parametrize("alpha", [0, 1, 128, 255])
def test_alpha_is_dropped_not_composited(alpha):
    rgba = smooth(channels=4)
    rgba[:, :, 3] = alpha
    assert np.array_equal(decode(encoded(rgba, "PNG")), smooth())
    assert np.array_equal(decode(encoded(rgba, "TIFF")), smooth())
    assert np.array_equal(decode(encoded(rgba, "WEBP", lossless=True, exact=True)), smooth())
    grey_alpha = Image.fromarray(rgba).convert("LA")
    expected = np.repeat(np.asarray(grey_alpha)[:, :, :1], 3, axis=2)
    assert np.array_equal(decode(encoded(grey_alpha, "PNG")), expected)


def test_sixteen_bits_keep_the_upper_eight():
    deep = smooth().astype(np.uint16) * 256 + 200
    for suffix in (".png", ".tif"):
        data = (
            pyvips.Image.new_from_array(deep).copy(interpretation="rgb16").write_to_buffer(suffix)
        )
        assert np.array_equal(decode(data), smooth()), suffix
    grey = pyvips.Image.new_from_array(deep[:, :, 0].copy()).copy(interpretation="grey16")
    expected = np.repeat(smooth()[:, :, :1], 3, axis=2)
    for suffix in (".png", ".tif"):
        assert np.array_equal(decode(grey.write_to_buffer(suffix)), expected), suffix
    with_alpha = np.dstack([deep, np.full(deep.shape[:2], 9, np.uint16)])
    image = pyvips.Image.new_from_array(with_alpha).copy(interpretation="rgb16")
    assert np.array_equal(decode(image.write_to_buffer(".png")), smooth())


def test_other_number_types_of_vips_images_are_clipped_to_bytes():
    values = np.array([[-5.0, 0.0, 17.6, 255.0, 300.0, np.nan]] * 6, np.float32)
    assert decode(pyvips.Image.new_from_array(values))[0, :, 1].tolist()[:5] == [0, 0, 17, 255, 255]
    whole = pyvips.Image.new_from_array(np.array([[-5, 0, 17, 255, 70000]] * 5, np.int32))
    assert decode(whole)[0, :, 2].tolist() == [0, 0, 17, 255, 255]
    linear = pyvips.Image.new_from_array(np.array([[[0.0, 1.0, 0.2140]] * 4] * 4, np.float32))
    red, green, blue = decode(linear.copy(interpretation="scrgb"))[0, 0]
    assert (red, green) == (0, 255) and abs(int(blue) - 127) <= 1


def test_cmyk_becomes_rgb():
    patches = {
        (0, 0, 0, 0): (255, 255, 255),
        (0, 255, 255, 0): (235, 30, 40),
        (0, 0, 0, 255): (30, 30, 30),
    }
    for cmyk, rgb in patches.items():
        picture = Image.new("CMYK", (32, 32), cmyk)
        for fmt, options in (("JPEG", {"quality": 95}), ("TIFF", {})):
            got = decode(encoded(picture, fmt, **options))[16, 16].astype(int)
            assert np.abs(got - rgb).max() <= 16, (cmyk, fmt, got)


def test_each_coding_of_colours_in_a_jpeg():
    """libjpeg learns from Adobe's marker, or from the components' names, that they are not YCbCr."""
    image = Image.new("RGB", (32, 32), (200, 30, 40))
    rgb = encoded(image, "JPEG", keep_rgb=True)
    at = rgb.index(b"\xff\xee")
    for data in (encoded(image, "JPEG"), rgb, rgb[:at] + rgb[at + 16 :]):
        assert np.abs(decode(data)[16, 16].astype(int) - (200, 30, 40)).max() <= 2
    cmyk = encoded(Image.new("CMYK", (32, 32), (55, 225, 215, 0)), "JPEG", quality=95)
    luma, blue, red = Image.new("RGB", (1, 1), (55, 225, 215)).convert("YCbCr").getpixel((0, 0))
    ycc = Image.new("CMYK", (32, 32), (255 - luma, 255 - blue, 255 - red, 0))
    ycck = bytearray(encoded(ycc, "JPEG", quality=95))
    ycck[ycck.index(b"\xff\xee") + 15] = 2
    for data in (cmyk, bytes(ycck)):
        assert np.abs(decode(data)[16, 16].astype(int) - (190, 64, 64)).max() <= 4


def test_png_values_are_used_as_stored():
    data = encoded(Image.new("RGB", (16, 16), (200, 30, 40)), "PNG")
    for kind, body in (
        (b"gAMA", struct.pack(">I", 100_000)),
        (b"cICP", bytes([9, 16, 0, 1])),  # BT.2020, PQ
        (b"cHRM", struct.pack(">8I", 31270, 32900, 70800, 29200, 17000, 79700, 13100, 4600)),
    ):
        checksum = struct.pack(">I", zlib.crc32(kind + body))
        chunk = struct.pack(">I", len(body)) + kind + body + checksum
        assert decode(data[:33] + chunk + data[33:])[8, 8].tolist() == [200, 30, 40]


@pytest.mark.parametrize("bits", [8, 10, 12])
def test_avif_of_each_depth(bits):
    red = np.full((64, 64, 3), (200, 30, 40), np.uint8)
    image = pyvips.Image.new_from_array(red)
    if bits > 8:
        image = (image.cast("ushort") * 257).cast("ushort").copy(interpretation="rgb16")
    data = image.heifsave_buffer(compression="av1", bitdepth=bits, lossless=True)
    assert np.abs(decode(data).astype(int) - red).max() <= 1


@pytest.mark.parametrize("full_range", [True, False])
@pytest.mark.parametrize("matrix", [0, 1, 2, 5, 6, 9])
def test_avif_of_each_matrix_and_range(matrix, full_range):
    """Pillow's libavif reads the same values from the container: GBR, BT.709, unspecified, BT.601, BT.2020."""
    image = Image.new("RGB", (64, 64), (200, 30, 40))
    data = bytearray(encoded(image, "AVIF", range="full", subsampling="4:4:4"))
    at = data.index(b"colrnclx")
    data[at + 12 : at + 15] = struct.pack(">HB", matrix, 0x80 * full_range)
    expected = Image.open(io.BytesIO(data)).convert("RGB").getpixel((32, 32))
    assert np.abs(decode(bytes(data))[32, 32].astype(int) - expected).max() <= 4


def test_lab_becomes_rgb():
    lab = pyvips.Image.new_from_array(np.full((8, 8, 3), (50, 20, 20), np.float32))
    assert decode(lab.copy(interpretation="lab"))[4, 4].tolist() == [161, 105, 86]


def test_embedded_rgb_profiles_are_ignored():
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB", 5000)).tobytes()
    assert np.array_equal(decode(encoded(smooth(), "PNG", icc_profile=profile)), smooth())
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    assert np.array_equal(decode(encoded(smooth(), "PNG", icc_profile=srgb)), smooth())


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("fmt", ["PNG", "TIFF", "WEBP", "JPEG"])
def test_exif_orientation_is_applied(fmt, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if fmt == "WEBP" else {}
    data = encoded(smooth(), fmt, exif=exif, **options)
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    assert upright.shape == ((48, 64, 3) if orientation < 5 else (64, 48, 3))
    assert np.array_equal(decode(data), upright)


@pytest.mark.parametrize("orientation", [0, 9, 4711])
def test_unknown_orientations_are_ignored(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(decode(encoded(smooth(), "PNG", exif=exif)), smooth())


@pytest.mark.parametrize("name", HEIF_PROBES)
def test_heif_is_decoded_if_this_libvips_can_and_named_if_not(name):
    """Builds of libvips without the HEVC licence read the container only."""
    if name in IMAGE_FORMATS:
        pixels = decode(HEIF_PROBES[name])
        assert pixels.shape == (64, 64, 3)
        assert np.abs(pixels[24, 32].astype(int) - (200, 30, 30)).max() < 16
    else:
        with pytest.raises(
            UnsupportedImageError, match=f"is {name}, which .* can't decode; supported are JPEG"
        ):
            open_image(HEIF_PROBES[name], LIMITS)


def test_the_formats_of_the_bundled_libvips_and_pillow():
    assert IMAGE_FORMATS[:5] == ("JPEG", "PNG", "WebP", "TIFF", "GIF")
    assert set(IMAGE_FORMATS[5:]) <= {"AVIF", "HEIC", "BMP"}
    assert {"AVIF", "BMP"} <= set(IMAGE_FORMATS)


@pytest.mark.parametrize(
    "wrap", [bytes, bytearray, memoryview, lambda b: memoryview(b + b"x")[:-1]]
)
def test_bytes_of_every_kind(wrap):
    assert np.array_equal(decode(wrap(encoded(smooth(), "PNG"))), smooth())
    every_other = np.repeat(np.frombuffer(encoded(smooth(), "PNG"), np.uint8), 2).tobytes()
    assert np.array_equal(decode(memoryview(every_other)[::2]), smooth())


ARRAYS = {
    "rgb": lambda a: a,
    "read-only": lambda a: np.frombuffer(a.tobytes(), np.uint8).reshape(a.shape),
    "column-major": np.asfortranarray,
    "reversed channels of BGR": lambda a: a[:, :, ::-1].copy()[:, :, ::-1],
    "every second row": lambda a: np.repeat(a, 2, axis=0)[::2],
    "rgba": lambda a: np.dstack([a, np.zeros(a.shape[:2], np.uint8)]),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(name):
    array = ARRAYS[name](smooth())
    assert np.array_equal(decode(array), smooth())
    assert key(array) == key(smooth())


def test_grey_arrays():
    grey = smooth()[:, :, 0].copy()
    expected = np.repeat(grey[:, :, None], 3, axis=2)
    assert np.array_equal(decode(grey), expected)
    assert np.array_equal(decode(grey[:, :, None]), expected)


def test_an_rgb_array_is_not_copied():
    array = smooth()
    assert np.shares_memory(decode(array), array)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (smooth().astype(np.float32), "float32"),
        (smooth().astype(np.uint16), "uint16"),
        (smooth() > 9, "bool"),
        (smooth()[:, :, :2].copy(), "[48, 64, 2]"),
        (smooth()[None], "[1, 48, 64, 3]"),
        (np.moveaxis(smooth(), 2, 0).copy(), "[3, 48, 64]"),
        (smooth()[0, :, 0].copy(), "[64]"),
    ],
)
def test_other_arrays_are_refused(array, words):
    with pytest.raises(InvalidRequest) as caught:
        open_image(array, LIMITS)
    assert caught.value.field == "image" and words in caught.value.message


def test_vips_images():
    image = pyvips.Image.new_from_array(smooth())
    assert np.array_equal(decode(image), smooth())
    assert key(image) == key(smooth())
    assert np.array_equal(decode(image.bandjoin(3)), smooth())
    sequential = pyvips.Image.new_from_buffer(encoded(smooth(), "PNG"), "", access="sequential")
    assert np.array_equal(decode(sequential), smooth())
    assert np.array_equal(decode(image.extract_band(0)), decode(smooth()[:, :, 0].copy()))
    assert np.array_equal(decode(image.cast("float")), smooth())
    deep = pyvips.Image.new_from_array(smooth().astype(np.uint16) * 256)
    assert np.array_equal(decode(deep), smooth())


def test_all_pages_of_a_vips_image_count_as_the_first():
    pages = [smooth(), smooth()[::-1].copy()]
    data = encoded(
        Image.fromarray(pages[0]), "TIFF", save_all=True, append_images=[Image.fromarray(pages[1])]
    )
    image = pyvips.Image.new_from_buffer(data, "n=-1")
    assert image.height == 2 * 48
    assert np.array_equal(decode(image), pages[0])


@pytest.mark.parametrize("source", [None, 7, [1, 2], object()])
def test_other_types_are_refused(source):
    with pytest.raises(InvalidRequest, match="must be encoded bytes, a path") as caught:
        open_image(source, LIMITS)
    assert caught.value.field == "image"


def test_paths(tmp_path):
    path = tmp_path / "picture.png"
    path.write_bytes(encoded(smooth(), "PNG"))
    assert np.array_equal(decode(path), smooth())
    assert np.array_equal(decode(str(path)), smooth())
    link = tmp_path / "link"
    link.symlink_to(path)
    assert np.array_equal(decode(link), smooth())


@pytest.mark.parametrize(
    "name",
    [
        "[access=random].png", "a[page=3]", "no ending", "lies.svg", "-rf", "ünï 中.png",
        "%s%n.jpg", "a\nb.png", "x" * 250,
    ],
)  # fmt: skip
def test_names_mean_nothing(tmp_path, name):
    """libvips would read options out of such names; the content alone decides."""
    path = tmp_path / name
    path.write_bytes(encoded(smooth(), "PNG"))
    assert np.array_equal(decode(str(path)), smooth())


def test_limits_on_a_path(tmp_path):
    path = tmp_path / "big.png"
    with open(path, "wb") as file:
        file.truncate(LIMITS.max_bytes + 1)
    with pytest.raises(ImageTooLargeError, match=str(LIMITS.max_bytes)):
        open_image(path, LIMITS)
