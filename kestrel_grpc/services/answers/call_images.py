"""CallImages: the images of one call, from the request to the store.

The only request of a call gets the images as they are, so the engine prepares them. Several requests share images that
are prepared once for each way in which tasks cut them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_engine import (
    FieldPath,
    InferenceEngine,
    MeasuredImage,
    PreparedImage,
    PreparedTiles,
    SeenImage,
    Tiled,
    Tiles,
)

from ...edge.calls.call import Call
from ...edge.calls.current import current
from ...images.request_images import RequestImage, RequestImages, at_image

MIRRORED = "mirrored"


class CallImages:
    """``find`` comes first; ``prepare`` follows if the call has several requests. ``keeps``: stores the images."""

    def __init__(self, images: RequestImages, engine: InferenceEngine, *, keeps: bool) -> None:
        self._images, self._engine, self._keeps = images, engine, keeps
        self._found: list[RequestImage] = []
        self._prepared: dict[Tiles | str | None, list[PreparedImage | PreparedTiles]] = {}
        """By how the images are cut, or MIRRORED."""
        self._is_overview = False
        self._cutting: asyncio.Lock | None = None

    def __len__(self) -> int:
        return len(self._found)

    async def find(self, images: Sequence[RequestImage]) -> None:
        """Raises ImageNotFound."""
        self._found = list(images)
        for index, image in enumerate(images):
            if image.image_id:
                self._found[index] = await self._images.find(image)

    async def prepare(self, tiles: Tiles | str | None = None) -> None:
        """Prepares the images for several requests. Raises the errors of the engine's ``prepare_image``, which name
        one of several images by its index."""
        self._cutting = self._cutting or asyncio.Lock()
        prepared: list[PreparedImage | PreparedTiles] = []
        for index, image in enumerate(self._found):
            source: Any = image.mirrored if tiles == MIRRORED else image.for_engine
            if isinstance(tiles, Tiles):
                source = Tiled(source, tiles)
            with at_image(("images", index)):
                prepared.append(await self._prepare(source))
        self._prepared[tiles] = prepared

    async def measured(self, tiles: Tiles | None) -> list[MeasuredImage]:
        """Size and crops of each image. Raises as ``prepare``."""
        found: list[MeasuredImage] = []
        for index, image in enumerate(await self.of_task(tiles)):
            with at_image(("images", index)):
                found.append(
                    await self._engine.measure_image(image, **caller_options(current.get()))
                )
        return found

    async def _prepare(self, image: Any) -> PreparedImage | PreparedTiles:
        prepared: PreparedImage | PreparedTiles
        prepared = await self._engine.prepare_image(image, **caller_options(current.get()))
        return prepared

    async def of_task(self, tiles: Tiles | None) -> Sequence[Any]:
        """The images as the requests of a task get them. Raises as ``prepare``."""
        if self._cutting is None:
            sources = [image.for_engine for image in self._found]
            return sources if tiles is None else [Tiled(each, tiles) for each in sources]
        if self._is_overview:
            tiles = None
        return await self._prepared_as(tiles)

    async def mirrored(self) -> Sequence[Any]:
        """The images with left and right exchanged, after ``prepare``. Raises as that."""
        images = await self._prepared_as(MIRRORED)
        if not self._is_overview:
            return images
        return [image.overview() for image in images if isinstance(image, PreparedImage)]

    async def _prepared_as(
        self, way: Tiles | str | None
    ) -> Sequence[PreparedImage | PreparedTiles]:
        assert self._cutting is not None, "prepare() comes first"
        async with self._cutting:
            if way not in self._prepared:
                await self.prepare(way)
        return self._prepared[way]

    @property
    def region(self) -> tuple[float, float, float, float] | None:
        """The part of the only image that requests see; None: all of it."""
        (image,) = self._found
        return image.region

    def path_of(self, path: FieldPath) -> FieldPath:
        """The path in the call's message, if ``path`` is the engine's of an image."""
        match path:
            case ("image", *rest) if self._found:
                return (*self._found[0].path, *rest)
            case ("images", int(index), *rest):
                return (*self._found[index].path, *rest)
        return path

    @property
    def seen(self) -> list[SeenImage]:
        """What is known of each image, if they are prepared."""
        return [SeenImage.of(image.looks) for image in next(iter(self._prepared.values()))]

    def keep(self, seen: Sequence[SeenImage], info: common_pb2.RequestInfo) -> None:
        """Stores the images, which the engine has decoded, and adds them to ``info``. ``seen``: each of them."""
        for found, image in zip(self._found, seen, strict=True):
            added = info.images.add(num_crops=image.num_crops)
            added.size.width, added.size.height = image.size
            if self._keeps:
                added.image_id = self._images.keep(found, image.size, bytes.fromhex(image.digest))

    @property
    def only(self) -> PreparedImage:
        """The only image, prepared and not cut."""
        (image,) = self._prepared[None]
        assert isinstance(image, PreparedImage)
        return image

    @property
    def num_crops(self) -> int:
        """The crops that requests see, if the images are prepared."""
        every = itertools.chain.from_iterable(self._prepared.values())
        return sum(SeenImage.of(image.looks).num_crops for image in every)

    def take_overview(self) -> None:
        """Tasks then see the overview of the only image as its only crop, and no tiles."""
        self._prepared[None], self._is_overview = [self.only.overview()], True


def caller_options(call: Call) -> dict[str, Any]:
    """What a call says of a request ahead of its tasks: the keywords of CallerOptions."""
    options = call.options
    return {
        "timeout_s": call.timeout_s,
        "cache_salt": call.principal.namespace(options.cache_salt),
        "request_id": call.request_id,
        "priority": options.priority,
        "principal": call.principal.name,
        "weight": call.principal.weight,
    }
