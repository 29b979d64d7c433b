"""Typed Python client of the Kestrel vision service: KestrelClient and AsyncKestrelClient, and for administration
KestrelAdmin and AsyncKestrelAdmin.

Importing this package loads gRPC and protobuf, but not numpy, Pillow or torch.
"""

from __future__ import annotations

from .administration.admin import KestrelAdmin
from .administration.async_admin import AsyncKestrelAdmin
from .administration.messages import (
    Captures,
    LoadedModel,
    LoadingProgress,
    LogLevel,
    MethodStatistics,
    Profile,
    ServerStatistics,
)
from .calls.async_client import AsyncKestrelClient
from .calls.client import KestrelClient
from .calls.frames import AsyncFrames, AsyncFrameSource, Frames, FrameSource
from .calls.requests.options import (
    CallOptions,
    CaptionLength,
    HandlingOptions,
    LateFrames,
    Priority,
)
from .calls.streams import AsyncStream, Stream
from .connection import Metadata, Tls
from .drawing.marks import Marks, Mask, MaskFormat
from .errors import (
    ConnectionLostError,
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
from .geometry import Box, ImageSize, Point, SpatialRef, Tiles
from .images.images import ImageHandle, ImageInput
from .images.known import ImageSource
from .values.constraint import Constraint
from .values.description import Model, ServerCapabilities, ServerInfo, ServerLimits, ServerLoad
from .values.embeddings import Embedding, EmbedResult
from .values.events import Event, PathPiece, ReasoningDelta, TextDelta
from .values.frames import Dropped, FrameResult
from .values.results.base import FinishReason, Result, Timings, Usage
from .values.results.named_skill import SkillResult
from .values.results.objects import DetectResult, PointResult
from .values.results.outline import SegmentResult
from .values.results.text import (
    CaptionResult,
    GroundingSpan,
    Logprobs,
    ObjectAbsence,
    QueryResult,
    Reasoning,
    SeenImage,
    TokenLogprob,
)
from .values.tasks import (
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
    Turn,
)
from .values.tracking import ObjectTracker
from .version import __version__

__all__ = [
    "AnalyzeResult",
    "AsyncFrameSource",
    "AsyncFrames",
    "AsyncKestrelAdmin",
    "AsyncKestrelClient",
    "AsyncStream",
    "Box",
    "CallOptions",
    "CaptionLength",
    "CaptionResult",
    "CaptionTask",
    "Captures",
    "ConnectionLostError",
    "Constraint",
    "DeadlineExceededError",
    "DetectResult",
    "DetectTask",
    "Dropped",
    "EmbedResult",
    "Embedding",
    "Event",
    "FailedPreconditionError",
    "FieldViolation",
    "FinishReason",
    "FrameResult",
    "FrameSource",
    "Frames",
    "GroundingSpan",
    "HandlingOptions",
    "ImageHandle",
    "ImageInput",
    "ImageSize",
    "ImageSource",
    "IncompleteStreamError",
    "InvalidArgumentError",
    "InvalidImageError",
    "InvalidRequestError",
    "KestrelAdmin",
    "KestrelClient",
    "KestrelError",
    "LateFrames",
    "LoadedModel",
    "LoadingProgress",
    "LogLevel",
    "Logprobs",
    "Marks",
    "Mask",
    "MaskFormat",
    "Metadata",
    "MethodStatistics",
    "MissingDependencyError",
    "Model",
    "NotFoundError",
    "ObjectAbsence",
    "ObjectTracker",
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
    "SeenImage",
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
    "Tiles",
    "Timings",
    "Tls",
    "TokenLogprob",
    "Turn",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "Usage",
    "__version__",
]
