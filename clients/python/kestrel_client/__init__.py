"""Typed Python client of the Kestrel vision service: see KestrelClient and AsyncKestrelClient.

Importing it loads gRPC and protobuf, never numpy, Pillow or torch.
"""

from __future__ import annotations

from .async_client import AsyncKestrelClient
from .client import KestrelClient
from .connection import Metadata, Tls
from .description import Model, ServerCapabilities, ServerInfo, ServerLimits
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
from .images import ImageInput
from .requests import CallOptions, CaptionLength, Priority
from .results import (
    CaptionResult,
    DetectResult,
    FinishReason,
    GroundingSpan,
    Mask,
    MaskFormat,
    PointResult,
    QueryResult,
    Reasoning,
    Result,
    SegmentResult,
    Timings,
    Usage,
)
from .streams import AsyncStream, Stream
from .version import __version__

__all__ = [
    "AsyncKestrelClient",
    "AsyncStream",
    "Box",
    "CallOptions",
    "CaptionLength",
    "CaptionResult",
    "DeadlineExceededError",
    "DetectResult",
    "Event",
    "FailedPreconditionError",
    "FieldViolation",
    "FinishReason",
    "GroundingSpan",
    "ImageInput",
    "ImageSize",
    "IncompleteStreamError",
    "InvalidArgumentError",
    "InvalidImageError",
    "InvalidRequestError",
    "KestrelClient",
    "KestrelError",
    "Mask",
    "MaskFormat",
    "Metadata",
    "MissingDependencyError",
    "Model",
    "NotFoundError",
    "OverloadedError",
    "PathPiece",
    "PermissionDeniedError",
    "Point",
    "PointResult",
    "Priority",
    "QueryResult",
    "Reasoning",
    "ReasoningDelta",
    "RequestCancelledError",
    "RequestTooLargeError",
    "Result",
    "RpcError",
    "SegmentResult",
    "ServerCapabilities",
    "ServerError",
    "ServerInfo",
    "ServerLimits",
    "SpatialRef",
    "Stream",
    "TextDelta",
    "Timings",
    "Tls",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "Usage",
    "__version__",
]
