"""Starter: starts the engine's request for a call, and makes the response.

This module handles what the calls of all skills share: model, image, deadline, priority, salt and stored images.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import (
    EngineResult,
    EngineStream,
    InferenceEngine,
    PreparedImage,
    PreparedTiles,
    RequestError,
    Tiled,
    Tiles,
)

from ...edge.calls.current_call import current_call
from ...edge.failures.errors import LocatedError
from ...images.request_images import RequestImage, RequestImages
from ...served_model import ServedModels
from ..messages.calls import SkillCall
from ..messages.images import ImageSource, at_image
from ..messages.options import CallOptions
from ..messages.responses import seen_images
from .drawn_mask import add_mask

_IMAGE = re.compile(r"images\[(\d+)\]|image(?!s)")
"""The engine's names of an image: its place among several, or the only one."""

Response = TypeVar("Response")
Respond = Callable[[EngineResult, int], Response]
"""Makes the response, without image_id and mask, from a result and the number of positions that an image takes."""


@dataclass(frozen=True, slots=True, eq=False)
class Started:
    """A running request of the engine. The caller of ``start`` must close the stream."""

    engine: InferenceEngine
    stream: EngineStream
    call: SkillCall
    images: tuple[RequestImage, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SharedImage:
    """A prepared image for several requests of one call. ``size``: width and height in pixels. ``image_id``: as in
    their responses. ``num_looks``: the looks of each request at it."""

    prepared: PreparedImage | PreparedTiles
    size: tuple[int, int]
    image_id: str
    num_looks: int


class Starter:
    """Starts and finishes requests. Keeps no state of a request."""

    def __init__(self, served: ServedModels, images: RequestImages) -> None:
        self.served, self.images = served, images

    async def start(self, call: SkillCall) -> Started:
        """Raises the errors of the engine's ``submit``, and ImageNotFound, ModelNotReady, ModelNotFoundError."""
        engine = self.served.engine(call.options.model)
        owner = current_call().owner
        images: list[RequestImage] = []
        for path, source in call.images:
            with at_image(path):
                images.append(await self.images.find(owner, source))
        given: list[Any] = [image.given for image in images]
        if call.tiles is not None:
            given = [Tiled(each, call.tiles) for each in given]
        stream = await submit(engine, call, given)
        return Started(engine, stream, call, tuple(images))

    async def prepare(
        self,
        options: CallOptions,
        source: ImageSource,
        tiles: Tiles | None = None,
        *,
        keep: bool = True,
    ) -> SharedImage:
        """Prepares an image for several requests of the call, and stores it if ``keep``. Raises the errors of the
        engine's ``prepare_image``, and ImageNotFound, ModelNotReady, ModelNotFoundError."""
        call, engine = current_call(), self.served.engine(options.model)
        image = await self.images.find(call.owner, source)
        prepared: PreparedImage | PreparedTiles = await engine.prepare_image(
            image.given if tiles is None else Tiled(image.given, tiles),
            timeout_s=call.timeout_s,
            cache_salt=call.principal.namespace(options.cache_salt),
            request_id=call.request_id,
            priority=options.priority,
            principal=call.principal.name,
            weight=call.principal.weight,
        )
        looks = prepared.looks if isinstance(prepared, PreparedTiles) else (prepared,)
        size, digest = looks[0].image_size, looks[0].source_digest
        if not keep:
            return SharedImage(prepared, size, "", len(looks))
        assert digest is not None, "bytes and pixels have a digest"
        weight = call.principal.weight
        image_id = self.images.keep(call.owner, image, size, digest, weight=weight)
        return SharedImage(prepared, size, image_id, len(looks))

    async def finish(self, started: Started, respond: Respond[Response]) -> Response:
        """Waits for the result and makes the response. Stores the images, which the engine has found valid."""
        call = current_call()
        call.result = result = await started.stream.result()
        response = await responded(started.engine, started.call, result, respond)
        image_ids = [
            self.images.keep(
                call.owner,
                image,
                seen.size,
                bytes.fromhex(seen.digest),
                weight=call.principal.weight,
            )
            for image, seen in zip(started.images, result.images, strict=True)
        ]
        if image_ids:
            add_image_ids(response, started.call, result, image_ids)
        return response


def add_image_ids(
    response: Any, call: SkillCall, result: EngineResult, image_ids: Sequence[str]
) -> None:
    """Adds the ids of the stored images, in the order of the prompt. All responses have an ``image_id``."""
    response.image_id = image_ids[0]
    if call.more_images:
        response.images.extend(seen_images(result, image_ids))


async def submit(engine: InferenceEngine, call: SkillCall, images: Sequence[Any]) -> EngineStream:
    """Submits the call to the engine. If the deadline passes while the request waits, the engine computes nothing."""
    options, edge, settings = call.options, current_call(), call.settings
    if options.adapter is not None:
        settings = {**settings, "adapter": options.adapter}
    try:
        return await engine.submit(
            call.skill,
            images if len(images) > 1 else next(iter(images), None),
            call.arguments,
            settings,
            request_id=edge.request_id,
            priority=options.priority,
            timeout_s=edge.timeout_s,
            cache_salt=edge.principal.namespace(options.cache_salt),
            principal=edge.principal.name,
            weight=edge.principal.weight,
        )
    except RequestError as error:
        most = error.most_tokens
        if edge.caps_max_tokens and most is not None:
            capped = replace(call, settings={**call.settings, "max_tokens": most})
            return await submit(engine, capped, images)
        place = _IMAGE.match(error.field)
        if place is None or not call.more_images:
            raise
        path = call.images[int(place[1] or 0)].path + error.field[place.end() :]
        raise LocatedError(error, path) from error


async def responded(
    engine: InferenceEngine, call: SkillCall, result: EngineResult, respond: Respond[Response]
) -> Response:
    """The response, with its mask drawn if one is requested."""
    response = respond(result, engine.info.image_positions)
    if isinstance(response, pb.SegmentResponse):
        await add_mask(response, call.mask_format)
    return response
