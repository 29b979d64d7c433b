"""The images of requests: the user's or made-up ones, and new ones that no cache of the server knows."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TypeAlias

from kestrel_client import ImageHandle, KestrelError, RequestTooLargeError
from kestrel_client.images.fetching import is_url
from kestrel_client.images.image_forms import loaded, to_pillow

from .. import DEMO_IMAGE
from ..parser import CommandError
from ..requests.inputs import open_inputs

Image: TypeAlias = bytes | ImageHandle

_MOST_BYTES = 1024**3
"""Limit of all images of a run together, which are in memory."""
_TOO_MANY = f"the images of a run together may have {_MOST_BYTES} bytes"
_QUALITY = 85
_GRAINS = 48
"""The pattern that makes an image new has this many grains in each direction, so every crop of the image is new."""


def open_images(names: Sequence[str]) -> list[Image]:
    """Reads the images that the words of the command line name. Raises CommandError."""
    images: list[Image] = []
    room = _MOST_BYTES
    for each in open_inputs(names):
        try:
            is_file = isinstance(each.source, str) and not is_url(each.source)
            with open(str(each.source), "rb") if is_file else nullcontext(each.source) as source:
                image = loaded(source, room)
        except OSError as error:
            raise CommandError(f"cannot read {each.name!r}: {error.strerror}") from None
        except KestrelError as error:
            too_many = isinstance(error, RequestTooLargeError)
            raise CommandError(f"{each.name}: {_TOO_MANY if too_many else error}") from None
        assert isinstance(image, bytes | ImageHandle)
        images.append(image)
        room -= len(image) if isinstance(image, bytes) else 0
    return images


def make_images(count: int, width: int, height: int, seed: int) -> list[Image]:
    """Makes different images of one size, the same for the same seed. Raises CommandError if they are too large."""
    images: list[Image] = []
    room, rng = _MOST_BYTES, random.Random(f"images {seed}")
    for i in range(count):
        image = new_image(DEMO_IMAGE.read_bytes(), rng, (width, height))
        room -= len(image)
        if room < 0:
            raise CommandError(f"made-up image {i + 1} of {count}: {_TOO_MANY}")
        images.append(image)
    return images


def new_image(image: bytes, rng: random.Random, size: tuple[int, int] | None = None) -> bytes:
    """The image with a faint random pattern: its bytes and all its crops differ from those of every other image.

    ``size``: width and height of the new image, if they change. Raises CommandError if Pillow cannot read the image.
    """
    from PIL import Image, ImageChops

    try:
        pixels = to_pillow(image)
    except KestrelError as error:
        raise CommandError(f"cannot make a new image from one of the images: {error}") from None
    if size is not None:
        pixels = pixels.resize(size)
    noise = bytes(byte % 8 for byte in rng.randbytes(_GRAINS * _GRAINS))
    grains = Image.frombytes("L", (_GRAINS, _GRAINS), noise)
    pattern = grains.resize(pixels.size, Image.Resampling.NEAREST).convert("RGB")
    written = io.BytesIO()
    ImageChops.add(pixels, pattern, offset=-4).save(written, "JPEG", quality=_QUALITY)
    return written.getvalue()


async def next_image(images: Sequence[Image], unique_share: float, rng: random.Random) -> Image:
    """Chooses the image of a request; for a share of them, makes a new one of it, in a thread."""
    image = rng.choice(images)
    if rng.random() >= unique_share:
        return image
    assert isinstance(image, bytes), "checked by the command"
    return await asyncio.to_thread(new_image, image, random.SystemRandom())
