"""The images of requests: the user's or made-up ones, and new ones that no cache of the server knows."""

from __future__ import annotations

import asyncio
import io
import random
import secrets
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeAlias

from kestrel_client import ImageHandle, KestrelError, RequestTooLargeError
from kestrel_client.images.fetching import is_url
from kestrel_client.images.image_forms import loaded, to_pillow

from ...parser import CommandError
from ...requests.inputs import open_inputs

if TYPE_CHECKING:
    import PIL.Image

Image: TypeAlias = bytes | ImageHandle

_MOST_BYTES = 1024**3
"""Limit of all images of a run together: each client process holds them."""
_TOO_MANY = f"the images of a run together may have {_MOST_BYTES} bytes"
_AHEAD = 16
"""New images that are made before they are needed."""
_QUALITY = 85
_COLOURS = ((220, 40, 40), (40, 160, 60), (50, 80, 210), (235, 200, 50), (150, 70, 170))
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
    """JPEGs of coloured circles and squares, the same for the same seed. Raises CommandError if they are too large."""
    images: list[Image] = []
    room = _MOST_BYTES
    for i in range(count):
        image = _scene(width, height, random.Random(f"image {seed} {i}"))
        room -= len(image)
        if room < 0:
            raise CommandError(f"made-up image {i + 1} of {count}: {_TOO_MANY}")
        images.append(image)
    return images


def _scene(width: int, height: int, rng: random.Random) -> bytes:
    from PIL import Image, ImageDraw

    ground = (rng.randrange(200, 256), rng.randrange(200, 256), rng.randrange(200, 256))
    image = Image.new("RGB", (width, height), ground)
    pen = ImageDraw.Draw(image)
    side = min(width, height)
    for _ in range(rng.randrange(3, 9)):
        ink = rng.choice(_COLOURS)
        size = rng.randrange(max(1, side // 16), max(2, side // 6))
        x, y = rng.randrange(width), rng.randrange(height)
        fill = pen.ellipse if rng.random() < 0.5 else pen.rectangle
        fill((x - size, y - size, x + size, y + size), fill=ink)
    return _jpeg(image)


def new_image(image: bytes) -> bytes:
    """The image with a faint random pattern: its bytes and all its crops differ from those of every other image.

    Raises CommandError if Pillow cannot read the image.
    """
    from PIL import Image, ImageChops

    try:
        pixels = to_pillow(image)
    except KestrelError as error:
        raise CommandError(f"cannot make a new image from one of the images: {error}") from None
    noise = bytes(byte % 8 for byte in secrets.token_bytes(_GRAINS * _GRAINS))
    grains = Image.frombytes("L", (_GRAINS, _GRAINS), noise)
    pattern = grains.resize(pixels.size, Image.Resampling.NEAREST).convert("RGB")
    return _jpeg(ImageChops.add(pixels, pattern, offset=-4))


def _jpeg(image: PIL.Image.Image) -> bytes:
    written = io.BytesIO()
    image.save(written, "JPEG", quality=_QUALITY)
    return written.getvalue()


class ImageSource:
    """The images of one client process, until ``close``.

    ``unique_share``: the share of requests with an image that is new, made from one of ``images``. They are made
    ahead, in a thread.
    """

    def __init__(self, images: Sequence[Image], unique_share: float) -> None:
        self._images, self._unique_share = images, unique_share
        self._thread = ThreadPoolExecutor(1, "new-images")
        self._ready: deque[asyncio.Future[bytes]] = deque()
        self._base = random.Random()

    async def next(self, rng: random.Random) -> Image:
        """Returns the image of the next request. ``rng`` chooses it. Waits only if new images are made too slowly."""
        if not rng.random() < self._unique_share:
            return rng.choice(self._images)
        self.make_ahead()
        return await self._ready.popleft()

    def make_ahead(self) -> None:
        """Begins to make new images, so that the first requests need not wait."""
        loop = asyncio.get_running_loop()
        while self._unique_share and len(self._ready) < _AHEAD:
            image = self._base.choice(self._images)
            assert isinstance(image, bytes), "checked by the command"
            self._ready.append(loop.run_in_executor(self._thread, new_image, image))

    def close(self) -> None:
        for each in self._ready:
            each.cancel()
        self._thread.shutdown(cancel_futures=True)
