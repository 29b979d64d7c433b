"""EmbeddedModel: the KServe service with a separate engine, inside another server such as Triton.

That server owns the network, its callers and their limits. Requests and responses are the messages of ``inference``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

from kestrel_client._pb.inference import grpc_service_pb2 as pb
from kestrel_engine import InferenceEngine, RuntimeConfig

from ..edge.calls.call import Call, Context, OwnContext, new_id
from ..edge.calls.current import current
from ..edge.failures.statuses import complaint
from ..edge.messages.fields import own_id
from ..images.request_images import RequestImages
from ..images.store import ImageStore
from ..monitoring.call_statistics import CallStatistics
from ..served_model import ServedModel, ServedModels
from ..services.vision import VisionService
from .service import InferenceService, refuse

_METHOD = "embedded"
"""The calls have no method, because nothing records them here."""

Write = Callable[[pb.ModelStreamInferResponse], Awaitable[None]]


class EmbeddedModel:
    """Call its methods only on the event loop that created it."""

    def __init__(self, engine: InferenceEngine, config: RuntimeConfig) -> None:
        self._engine = engine
        model = ServedModel(config)
        model.ready(engine)
        served = ServedModels(model)
        vision = VisionService(served, RequestImages(ImageStore(0)))
        self._service = InferenceService(served, vision, CallStatistics())

    @classmethod
    async def create(cls, config: RuntimeConfig) -> EmbeddedModel:
        """Loads the model. Raises ConfigError, ModelLoadError."""
        return cls(await InferenceEngine.create(config), config)

    async def answer(self, request: pb.ModelInferRequest, write: Write) -> None:
        """Writes the responses, the last of which is final. That of a failed request has an ``error_message``. If the
        task is cancelled, so is the request."""
        request_id = own_id(request) or new_id()
        context = cast(Context, _Context(write))
        current.set(Call(_METHOD, peer="", context=context, request_id=request_id))
        try:
            await self._service.ModelStreamInfer(request, context)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # The edge: here errors become responses.
            told = refuse(request, complaint(error, request_id), ())
            assert told is not None, "no metadata asks for a status"
            await write(told)

    async def close(self) -> None:
        """Ends all requests and frees the model."""
        await self._engine.shutdown(grace_s=0)


class _Context(OwnContext):
    """The other server has the deadline, and cancels the call."""

    def __init__(self, write: Write) -> None:
        self.write = write
