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
    QueryOptions,
    TextOptions,
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
from .geometry import Box, DetectedBox, DetectedPoint, ImageSize, Point, SpatialRef, Tiles
from .images.images import ImageHandle, ImageInput
from .images.known import ImageSource
from .values.constraint import Constraint
from .values.description import Adapter, Model, ServerInfo, ServerLimits, ServerLoad, Skill
from .values.embeddings import Embedding, EmbedResult
from .values.events import Event, PathPiece, ReasoningDelta, TextDelta
from .values.frames import Dropped, FrameResult
from .values.results.base import FinishReason, Result, Timings, Usage
from .values.results.named_skill import SkillResult
from .values.results.objects import DetectResult, PointResult
from .values.results.outline import Segment, SegmentResult
from .values.results.searches import ObjectSearch
from .values.results.text import (
    Answer,
    CaptionResult,
    GroundingSpan,
    Logprobs,
    QueryResult,
    Reasoning,
    SeenImage,
    TokenLogprob,
)
from .values.tasks import (
    AnalyzeResult,
    CaptionTask,
    DetectTask,
    ObjectNames,
    Outcome,
    PointTask,
    QueryTask,
    SegmentTask,
    SkillTask,
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
    "Adapter",
    "AnalyzeResult",
    "Answer",
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
    "DetectedBox",
    "DetectedPoint",
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
    "ObjectNames",
    "ObjectSearch",
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
    "QueryOptions",
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
    "Segment",
    "SegmentResult",
    "SegmentTask",
    "ServerError",
    "ServerInfo",
    "ServerLimits",
    "ServerLoad",
    "ServerStatistics",
    "Skill",
    "SkillResult",
    "SkillTask",
    "SpatialRef",
    "Stream",
    "Task",
    "TaskDone",
    "TaskEvent",
    "TaskOf",
    "Tasks",
    "TextDelta",
    "TextOptions",
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
