"""Adds all services to the methods of the gRPC ports."""

from __future__ import annotations

from kestrel_client._pb.inference.grpc_service_pb2_grpc import (
    add_GRPCInferenceServiceServicer_to_server,
)
from kestrel_client._pb.kestrel.v1.admin_service_pb2_grpc import (
    add_AdminServiceServicer_to_server,
)
from kestrel_client._pb.kestrel.v1.image_service_pb2_grpc import (
    add_ImageServiceServicer_to_server,
)
from kestrel_client._pb.kestrel.v1.model_service_pb2_grpc import (
    add_ModelServiceServicer_to_server,
)
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import (
    add_VisionServiceServicer_to_server,
)

from ..edge.methods import Methods
from ..http.services import HttpServices
from ..monitoring.orca import LoadReports
from ..service_names import SERVICES
from ..services import health
from ..services.admin import AdminService
from ..services.load_reports import add_load_reports
from ..services.reflection import add_reflection


def add_services(
    methods: Methods,
    both: HttpServices,
    admin: AdminService,
    own_health: health.Health,
    load_reports: LoadReports | None,
) -> None:
    """``both``: the services that the HTTP port has too. ``load_reports``: None if the server sends none."""
    server = methods.as_server
    add_VisionServiceServicer_to_server(both.vision, server)
    add_GRPCInferenceServiceServicer_to_server(both.inference, server)
    add_ImageServiceServicer_to_server(both.images, server)
    add_ModelServiceServicer_to_server(both.models, server)
    add_AdminServiceServicer_to_server(admin, server)
    own_health.add_to(server)
    if load_reports is not None:
        add_load_reports(methods, load_reports.current)
    add_reflection(methods, (*SERVICES, health.SERVICE_NAME))
