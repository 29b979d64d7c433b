"""GrpcServices: what answers the calls of the gRPC ports."""

from __future__ import annotations

from typing import NamedTuple

import grpc

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

from ..edge.generic_methods import GenericMethods
from ..http.services import HttpServices
from ..monitoring.orca import LoadReports
from ..service_names import SERVICES
from ..services import health
from ..services.admin import AdminService
from ..services.load_reports import add_load_reports
from ..services.reflection import add_reflection


class GrpcServices(NamedTuple):
    """``both``: the services that the HTTP port has too. ``load_reports``: None if the server sends none."""

    both: HttpServices
    admin: AdminService
    health: health.Health
    load_reports: LoadReports | None

    def add_to(self, server: grpc.aio.Server) -> None:
        methods, both = GenericMethods(server).as_server, self.both
        add_VisionServiceServicer_to_server(both.vision, methods)
        add_GRPCInferenceServiceServicer_to_server(both.inference, methods)
        add_ImageServiceServicer_to_server(both.images, methods)
        add_ModelServiceServicer_to_server(both.models, methods)
        add_AdminServiceServicer_to_server(self.admin, methods)
        self.health.add_to(methods)
        if self.load_reports is not None:
            add_load_reports(methods, self.load_reports.current)
        add_reflection(methods, (*SERVICES, health.SERVICE_NAME))
