"""RequestImages: reads the images of a request, which the request holds or names by id, finds and stores them.

An image is stored after the engine has decoded it, so every image in the store is valid. With shared images, the images
that clients put are written to the shared store too, and an id that is unknown here is looked up there.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple

import numpy as np

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import (
    FieldPath,
    ImageFeatures,
    ImageTooLargeError,
    InCrops,
    InRegion,
    InvalidRequest,
    Mirrored,
    OnBackground,
    checked_adapter_name,
)

from ..edge.calls.current import current
from ..edge.failures.errors import ImageNotFound, ImagesFull, ImagesNotKept
from ..edge.messages.fields import inside, known_value, located, meant_float
from .shared.shared_images import SharedImages
from .store import ImageStore, StoredImage, shown, size_of

_COLOUR = re.compile(r"#[0-9a-fA-F]{6}")
_MAX_IMAGE_ID = 64
MAX_IMAGES = 64
"""The most that RuntimeConfig.max_images may be. The engine then applies the server's own limit."""

_BYTES_PER_PIXEL = {
    common_pb2.PIXEL_FORMAT_UNSPECIFIED: 3,
    common_pb2.PIXEL_FORMAT_RGB8: 3,
    common_pb2.PIXEL_FORMAT_RGBA8: 4,
    common_pb2.PIXEL_FORMAT_GRAY8: 1,
    common_pb2.PIXEL_FORMAT_BGR8: 3,
}


PIXEL_FORMATS = {
    1: common_pb2.PIXEL_FORMAT_GRAY8,
    3: common_pb2.PIXEL_FORMAT_RGB8,
    4: common_pb2.PIXEL_FORMAT_RGBA8,
}
"""By the number of bytes per pixel."""


def at_image(path: FieldPath) -> AbstractContextManager[None]:
    """Raises an error that is in the field ``image`` with the ``path`` of the image in the request."""
    return located(lambda field: (*path, *field[1:]) if field[:1] == ("image",) else field)


class RequestImage(NamedTuple):
    """An image of a request. ``path``: of its field in the request. A tuple is made in a third of the time of a frozen
    dataclass."""

    path: FieldPath
    source: bytes | np.ndarray | ImageFeatures
    """Encoded bytes; pixels as [height, width(, channels)] uint8 RGB(A), which share the message's memory; or what
    stands for the image, which is not stored."""
    image_id: str = ""
    """The id that the request names in place of a source."""
    background: tuple[int, int, int] | None = None
    """The background colour of this request. The store holds the image without it."""
    region: tuple[float, float, float, float] | None = None
    """The part of the image that this request sees. The store holds the whole image."""
    max_crops: int = 0
    """The budget of this request: the most tiles in which the model sees the image; 0: as many as it has."""
    kept: StoredImage | None = None
    """The store's entry for ``image_id``, once it is found; ``source`` is the entry's then."""

    @property
    def for_engine(self) -> Any:
        """The image in the form that the engine takes."""
        if not (self.background or self.region or self.max_crops):
            return self.source
        return self._seen(self._whole, self.region)

    @property
    def mirrored(self) -> Any:
        """As ``for_engine``, with left and right exchanged."""
        region = self.region
        if region is not None:
            x_min, y_min, x_max, y_max = region
            region = (1 - x_max, y_min, 1 - x_min, y_max)
        return self._seen(Mirrored(self._whole), region)

    @property
    def _whole(self) -> bytes | np.ndarray | ImageFeatures | OnBackground:
        return (
            self.source if self.background is None else OnBackground(self.source, self.background)
        )

    def _seen(self, image: Any, region: tuple[float, float, float, float] | None) -> Any:
        if self.max_crops:
            image = InCrops(image, self.max_crops)
        return image if region is None else InRegion(image, region)


def images_of(request: Any) -> list[RequestImage]:
    """The images of a request or a frame, in the order of the prompt. Raises InvalidRequest."""
    if isinstance(request, (pb.QueryRequest, pb.CountTokensRequest)):
        images = request.images
        if len(images) > MAX_IMAGES:
            raise InvalidRequest("images", f"are {len(images)}; the limit is {MAX_IMAGES}")
        return [_read(image, ("images", index)) for index, image in enumerate(images)]
    if isinstance(request, pb.RunSkillRequest) and not request.HasField("image"):
        return []
    return [required_image(request)]


def required_image(request: Any) -> RequestImage:
    """The image of a request with the field ``image``. Raises InvalidRequest."""
    path = ("frame", "image") if isinstance(request, pb.Frame) else ("image",)
    if not request.HasField("image"):
        raise InvalidRequest(path, "is required")
    return _read(request.image, path)


def checked_image_id(field: str | FieldPath, text: str) -> str:
    """Raises InvalidRequest, which names ``field``, if ``text`` cannot be an id."""
    if not 1 <= len(text) <= _MAX_IMAGE_ID:
        raise InvalidRequest(
            field, f"has {len(text)} characters; an image id has 1 to {_MAX_IMAGE_ID}"
        )
    return text


def _read(image: common_pb2.Image, path: FieldPath) -> RequestImage:
    match image.ListFields():
        case [(_, bytes() as encoded)]:  # Most images.
            return RequestImage(path, encoded)
    source: bytes | np.ndarray | ImageFeatures = b""
    image_id = ""
    with at_image(path):
        match image.WhichOneof("source"):
            case "encoded":
                source = image.encoded
            case "raw":
                source = _raw_pixels(image.raw)
            case "image_id":
                image_id = checked_image_id(("image", "image_id"), image.image_id)
            case "features":
                source = _features(image.features)
            case _:
                raise InvalidRequest(
                    "image", "holds no image: set encoded, raw, image_id or features"
                )
        background = _colour(image.background) if image.HasField("background") else None
        if image.HasField("max_crops") and image.max_crops < 1:
            raise InvalidRequest(
                ("image", "max_crops"), f"is {image.max_crops}; must be at least 1"
            )
    region = None
    if image.HasField("region"):
        edges = image.region
        x_min, y_min = meant_float(edges.x_min), meant_float(edges.y_min)
        region = (x_min, y_min, meant_float(edges.x_max), meant_float(edges.y_max))
    return RequestImage(path, source, image_id, background, region, image.max_crops)


def _features(message: common_pb2.ImageFeatures) -> ImageFeatures:
    adapter = message.adapter
    if message.HasField("adapter"):
        with inside("image", "features"):
            adapter = checked_adapter_name(adapter)
    return ImageFeatures(
        message.data, message.rows, message.dimensions, message.width, message.height, adapter
    )


def _colour(text: str) -> tuple[int, int, int]:
    if not _COLOUR.fullmatch(text):
        raise InvalidRequest(("image", "background"), f"{text!r} must be a colour like #ffffff")
    red, green, blue = bytes.fromhex(text[1:])
    return red, green, blue


def _raw_pixels(raw: common_pb2.RawImage) -> np.ndarray:
    depth = known_value(
        ("image", "raw", "format"), raw.format, common_pb2.PixelFormat, _BYTES_PER_PIXEL
    )
    for side, length in (("width", raw.width), ("height", raw.height)):
        if length < 1:
            raise InvalidRequest(("image", "raw", side), f"must be at least 1, got {length}")
    expected = raw.width * raw.height * depth
    data = raw.data
    if len(data) != expected:
        raise InvalidRequest(
            ("image", "raw", "data"),
            f"has {len(data)} bytes; {raw.width}x{raw.height} pixels of {depth} bytes need {expected}",
        )
    pixels = np.frombuffer(data, np.uint8).reshape(raw.height, raw.width, depth)
    return pixels[:, :, ::-1] if raw.format == common_pb2.PIXEL_FORMAT_BGR8 else pixels


class RequestImages:
    """Finds and stores the images of the current call's owner: the principal's name, or "" if callers need no
    credentials."""

    def __init__(self, store: ImageStore, shared: SharedImages | None = None) -> None:
        self.store, self._shared = store, shared

    async def find(self, image: RequestImage) -> RequestImage:
        """The image with its source, also if the request names its id. Raises ImageNotFound."""
        if not image.image_id:
            return image
        with at_image(image.path):
            kept = await self._stored(image.image_id)
        current.get().stored[image.image_id] = kept.source
        return image._replace(source=kept.source, kept=kept)

    def keep(self, image: RequestImage, size: tuple[int, int], digest: bytes) -> str:
        """Stores an image that the engine has decoded. Returns its id, or "" if the store has no room for it.

        ``size`` is (width, height) in pixels; ``digest`` is the engine's.
        """
        if image.kept is not None:
            # The image may have been deleted since. It must not return to the store.
            return image.kept.image_id
        if isinstance(image.source, ImageFeatures):
            return ""
        caller = current.get().principal
        try:
            kept = self.store.put(caller.name, digest, image.source, size, weight=caller.weight)
        except ImagesFull:
            return ""
        return "" if kept is None else kept.image_id

    async def put(
        self, source: bytes | np.ndarray, size: tuple[int, int], digest: bytes
    ) -> StoredImage:
        """Like ``keep``, but raises ImagesNotKept, ImageTooLargeError or ImagesFull if the image cannot be stored."""
        self.check_size(size_of(source))
        call = current.get()
        kept = self.store.put(call.owner, digest, source, size, weight=call.principal.weight)
        assert kept is not None, "check_size would have raised"
        if self._shared is not None:
            await self._shared.put(call.owner, kept, call.timeout_s)
        return kept

    async def delete(self, image_id: str) -> bool:
        """Deletes an image, in the shared store too. Returns whether the owner had an image with this id."""
        call = current.get()
        existed = self.store.delete(call.owner, image_id)
        if self._shared is None:
            return existed
        return await self._shared.delete(call.owner, image_id, call.timeout_s) or existed

    async def _stored(self, image_id: str) -> StoredImage:
        call = current.get()
        owner = call.owner
        if self._shared is None:
            return self.store.get(owner, image_id)
        if self.store.has(owner, image_id):
            self._shared.check(owner, image_id, lambda: self.store.delete(owner, image_id))
            return self.store.get(owner, image_id)
        found = await self._shared.fetch(owner, image_id)
        if found.image is None:
            if found.answered:
                raise ImageNotFound(("image", "image_id"), self.store.absent(image_id))
            raise ImageNotFound(
                ("image", "image_id"),
                f"image {shown(image_id)!r} is not stored on this server, and the shared image store does not answer; "
                "send the image again",
            )
        with suppress(ImagesFull):  # This call has the image all the same.
            self.store.adopt(owner, found.image, weight=call.principal.weight)
        return found.image

    def check_size(self, num_bytes: int) -> None:
        """Raises ImagesNotKept or ImageTooLargeError if the store can never hold an image of ``num_bytes`` bytes."""
        limit = self.store.max_bytes
        if limit == 0:
            raise ImagesNotKept("the server stores no images; send the image with each request")
        if num_bytes > limit:
            raise ImageTooLargeError(
                "image",
                f"has {num_bytes} bytes; the image store holds {limit} in all",
                value=num_bytes,
                limit=limit,
            )
