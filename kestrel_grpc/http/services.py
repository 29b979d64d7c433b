"""HttpServices: what answers the requests of the HTTP port."""

from __future__ import annotations

from typing import NamedTuple

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
    served: ServedModels
