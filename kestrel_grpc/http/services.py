"""HttpServices: what answers the requests of the HTTP port."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kestrel_client._pb.kestrel.v1 import (
    batch_service_pb2,
    image_service_pb2,
    model_service_pb2,
    vision_service_pb2,
)

from ..batches.service import BatchService
from ..kserve.service import InferenceService
from ..served_model import ServedModels
from ..services.image import ImageService
from ..services.model import ModelService
from ..services.vision import VisionService


class HttpServices(NamedTuple):
    vision: VisionService
    images: ImageService
    models: ModelService
    inference: InferenceService
    batches: BatchService
    served: ServedModels

    @property
    def names(self) -> Sequence[str]:
        """Those of the served models, the default first."""
        return self.served.names

    def methods(self) -> Iterator[tuple[str, Any, Any]]:
        """The methods of kestrel.v1 for callers: the path, the descriptor, and the service's method."""
        for file, service in (
            (vision_service_pb2, self.vision),
            (image_service_pb2, self.images),
            (model_service_pb2, self.models),
            (batch_service_pb2, self.batches),
        ):
            (described,) = file.DESCRIPTOR.services_by_name.values()
            for method in described.methods:
                path = f"/{described.full_name}/{method.name}"
                yield path, method, getattr(service, method.name)
