"""Typed Python client of the Kestrel vision service: see KestrelClient and AsyncKestrelClient; and of its
administration: KestrelAdmin and AsyncKestrelAdmin.

Importing it loads gRPC and protobuf, never numpy, Pillow or torch.
"""

from __future__ import annotations

from .admin import KestrelAdmin
from .administration import Captures, LogLevel, MethodStatistics, Profile, ServerStatistics
from .async_admin import AsyncKestrelAdmin
from .async_client import AsyncKestrelClient
from .client import KestrelClient
from .connection import Metadata, Tls
from .description import Model, ServerCapabilities, ServerInfo, ServerLimits, ServerLoad
from .errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    FieldViolation,
    IncompleteStreamError,
    InvalidArgumentError,
    InvalidImageError,
    InvalidRequestError,
    KestrelError,
    MissingDependencyError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    QuotaViolation,
    RequestCancelledError,
    RequestTooLargeError,
    RpcError,
    ServerError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)
from .events import Event, PathPiece, ReasoningDelta, TextDelta
from .geometry import Box, ImageSize, Point, SpatialRef
from .images import ImageHandle, ImageInput
from .marks import Marks, Mask, MaskFormat
from .requests import CallOptions, CaptionLength, HandlingOptions, Priority
from .results import (
    CaptionResult,
    DetectResult,
    FinishReason,
    GroundingSpan,
    PointResult,
    QueryResult,
    Reasoning,
    Result,
    SegmentResult,
    SkillResult,
    Timings,
    Usage,
)
from .streams import AsyncStream, Stream
from .tasks import (
    AnalyzeResult,
    CaptionTask,
    DetectTask,
    Outcome,
    PointTask,
    QueryTask,
    SegmentTask,
    Task,
    TaskDone,
    TaskEvent,
    TaskOf,
    Tasks,
)
from .version import __version__

__all__ = [
    "AnalyzeResult",
    "AsyncKestrelAdmin",
    "AsyncKestrelClient",
    "AsyncStream",
    "Box",
    "CallOptions",
    "CaptionLength",
    "CaptionResult",
    "CaptionTask",
    "Captures",
    "DeadlineExceededError",
    "DetectResult",
    "DetectTask",
    "Event",
    "FailedPreconditionError",
    "FieldViolation",
    "FinishReason",
    "GroundingSpan",
    "HandlingOptions",
    "ImageHandle",
    "ImageInput",
    "ImageSize",
    "IncompleteStreamError",
    "InvalidArgumentError",
    "InvalidImageError",
    "InvalidRequestError",
    "KestrelAdmin",
    "KestrelClient",
    "KestrelError",
    "LogLevel",
    "Marks",
    "Mask",
    "MaskFormat",
    "Metadata",
    "MethodStatistics",
    "MissingDependencyError",
    "Model",
    "NotFoundError",
    "Outcome",
    "OverloadedError",
    "PathPiece",
    "PermissionDeniedError",
    "Point",
    "PointResult",
    "PointTask",
    "Priority",
    "Profile",
    "QueryResult",
    "QueryTask",
    "QuotaViolation",
    "Reasoning",
    "ReasoningDelta",
    "RequestCancelledError",
    "RequestTooLargeError",
    "Result",
    "RpcError",
    "SegmentResult",
    "SegmentTask",
    "ServerCapabilities",
    "ServerError",
    "ServerInfo",
    "ServerLimits",
    "ServerLoad",
    "ServerStatistics",
    "SkillResult",
    "SpatialRef",
    "Stream",
    "Task",
    "TaskDone",
    "TaskEvent",
    "TaskOf",
    "Tasks",
    "TextDelta",
    "Timings",
    "Tls",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "Usage",
    "__version__",
]
