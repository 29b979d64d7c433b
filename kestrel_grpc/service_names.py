"""The services of this server by their full names, and the prefixes of their methods' paths."""

from __future__ import annotations

from kestrel_client._pb.inference import grpc_service_pb2
from kestrel_client._pb.kestrel.v1 import (
    admin_service_pb2,
    batch_service_pb2,
    image_service_pb2,
    model_service_pb2,
    vision_service_pb2,
)

VISION_SERVICE: str = vision_service_pb2.DESCRIPTOR.services_by_name["VisionService"].full_name
IMAGE_SERVICE: str = image_service_pb2.DESCRIPTOR.services_by_name["ImageService"].full_name
MODEL_SERVICE: str = model_service_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name
BATCH_SERVICE: str = batch_service_pb2.DESCRIPTOR.services_by_name["BatchService"].full_name
ADMIN_SERVICE: str = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
KSERVE_SERVICE: str = grpc_service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
SERVICES = (
    *(VISION_SERVICE, IMAGE_SERVICE, MODEL_SERVICE),
    *(BATCH_SERVICE, ADMIN_SERVICE, KSERVE_SERVICE),
)

VISION_METHODS = f"/{VISION_SERVICE}/"
IMAGE_METHODS = f"/{IMAGE_SERVICE}/"
MODEL_METHODS = f"/{MODEL_SERVICE}/"
ADMIN_METHODS = f"/{ADMIN_SERVICE}/"
KSERVE_METHODS = f"/{KSERVE_SERVICE}/"
INFERENCE_METHODS = (
    VISION_METHODS,
    f"{KSERVE_METHODS}ModelInfer",
    f"{KSERVE_METHODS}ModelStreamInfer",
)
"""Prefixes of the methods whose calls become requests of the engine."""
HEALTH_METHODS = "/grpc.health."
"""Of every version of the health service, as the next of the reflection service."""
LOAD_REPORT_SERVICE = "xds.service.orca.v3.OpenRcaService"
"""Sends load reports to balancers, beside the calls."""
LOAD_REPORT_METHODS = f"/{LOAD_REPORT_SERVICE}/"
CHANNELZ_METHODS = "/grpc.channelz."
REFLECTION_METHODS = "/grpc.reflection."
