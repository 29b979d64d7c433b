"""Starter: from a call to a running request of the engine. Owns what every skill's call shares.

That is model, picture, deadline, priority and salt, and the id under which the picture is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import EngineResult, EngineStream, InferenceEngine

from ..edge.current_call import current_call
from ..images.pictures import Picture, Pictures
from ..served_model import ServedModel
from .convert import SkillCall
from .drawn_mask import add_mask

Response = TypeVar("Response")
Respond = Callable[[EngineResult, int], Response]
"""From a result and the positions that a picture takes to the response, but for its image_id and mask."""


@dataclass(frozen=True, slots=True, eq=False)
class Started:
    """A request of the engine; whoever has it closes its stream."""

    engine: InferenceEngine
    stream: EngineStream
    call: SkillCall
    picture: Picture | None


class Starter:
    """Holds nothing about a request."""

    def __init__(self, served: ServedModel, pictures: Pictures) -> None:
        self.served, self.pictures = served, pictures

    async def start(self, call: SkillCall) -> Started:
        """Raises what the engine's ``submit`` raises, and ImageNotFound, ModelNotReady, ModelNotFoundError."""
        engine = self.served.engine(call.options.model)
        owner = current_call().owner
        picture = None if call.image is None else self.pictures.find(owner, call.image)
        stream = await submit(engine, call, None if picture is None else picture.given)
        if picture is not None:
            picture = self.pictures.hashed(picture)
        return Started(engine, stream, call, picture)

    async def finish(self, started: Started, respond: Respond[Response]) -> Response:
        """Waits for the result and makes the response of it; the picture, now known to be valid, is kept."""
        call = current_call()
        call.result = result = await started.stream.result()
        response = await responded(started.engine, started.call, result, respond)
        if started.picture is not None:
            assert result.image_size is not None, "a picture has a size"
            kept = await self.pictures.keep(
                call.owner, started.picture, result.image_size, weight=call.principal.weight
            )
            response.image_id = kept  # type: ignore[attr-defined]  # all responses have it
        return response


async def submit(engine: InferenceEngine, call: SkillCall, image: Any) -> EngineStream:
    """Starts the engine's request; a deadline that passes while it waits ends it before any computation."""
    options, edge = call.options, current_call()
    return await engine.submit(
        call.skill,
        image,
        call.arguments,
        call.settings,
        request_id=edge.request_id,
        priority=options.priority,
        timeout_s=edge.timeout_s,
        cache_salt=edge.principal.namespace(options.cache_salt),
        principal=edge.principal.name,
        weight=edge.principal.weight,
    )


async def responded(
    engine: InferenceEngine, call: SkillCall, result: EngineResult, respond: Respond[Response]
) -> Response:
    """The response with its mask drawn, if one is asked for."""
    response = respond(result, engine.info.image_positions)
    if isinstance(response, pb.SegmentResponse):
        await add_mask(response, call.mask_format)
    return response
