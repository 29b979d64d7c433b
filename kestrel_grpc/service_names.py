"""The services of this server by their full names, and the prefixes of their methods' paths."""

from __future__ import annotations

VISION_SERVICE = "kestrel.v1.VisionService"
IMAGE_SERVICE = "kestrel.v1.ImageService"
MODEL_SERVICE = "kestrel.v1.ModelService"
BATCH_SERVICE = "kestrel.v1.BatchService"
ADMIN_SERVICE = "kestrel.v1.AdminService"
KSERVE_SERVICE = "inference.GRPCInferenceService"
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
