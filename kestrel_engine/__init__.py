"""Kestrel's inference engine for Moondream vision-language models.

    engine = await InferenceEngine.create(RuntimeConfig())
    result = await engine.query("photo.jpg", "How many red circles are there?")
    print(result.output["answer"])

Importing this package loads no torch; creating an engine does.
"""

from . import clock, errors, maintenance, processes, teaching
from .adapters.lora import LoRA, TextLoRAConfig
from .adapters.references import checked_adapter_name
from .callers.profiling import ProfileRequest
from .config.adapters import AdapterSources
from .config.image_limits import ImageLimits
from .config.runtime import RuntimeConfig
from .config.setting import Setting, SettingGroup, check_settings, checked, default_of, settings_of
from .engine import InferenceEngine
from .errors import (
    AdapterNotFound,
    AdapterRefused,
    AdaptersFull,
    AdapterUnavailable,
    AdapterUnfit,
    CheckpointError,
    ConfigError,
    ConstraintsCostly,
    ContextLengthError,
    DeadlineExceeded,
    Displaced,
    DownloadError,
    EngineClosed,
    EngineOverloaded,
    FieldPath,
    ImageDecodeError,
    ImageError,
    ImageTooLargeError,
    ImageTooSlowError,
    InsufficientMemoryError,
    InvalidRequest,
    KestrelError,
    ModelLoadError,
    ModelNotFoundError,
    PixelsWaiting,
    ProfileError,
    QueueTimeout,
    Quota,
    RequestError,
    RuntimeFailure,
    SkillFault,
    SkillUnavailable,
    UnsupportedImageError,
    path_text,
)
from .fair_shares import FairShares, Member
from .preprocess.decoding.open_image import FORMATS as IMAGE_FORMATS
from .preprocess.decoding.open_image import OnBackground
from .preprocess.features import ImageFeatures
from .preprocess.looks import InCrops, InRegion, Mirrored, Tiled, Tiles
from .preprocess.measuring import MeasuredImage
from .processes import end_with_parent
from .requests.merging import best_boxes
from .requests.request import Request, Reservation, TokenEstimate
from .runtime.profile import Profile
from .skills.base import SkillSpec
from .skills.gaze import NUM_LOOKS, eyes_in, mean_gaze
from .skills.registry import SkillRegistry
from .small_files import read_small_file
from .types.events import (
    EngineMetrics,
    EngineResult,
    FinishReason,
    ObjectAbsence,
    SeenImage,
    StreamUpdate,
    TokenLogprob,
)
from .types.info import EngineInfo, LoadTimes, SchedulerStats
from .types.observer import ImageEvent, Observer, RequestEvent, StepEvent
from .types.requests import PreparedImage, PreparedTiles
from .types.stream import EngineStream

__all__ = [
    "IMAGE_FORMATS",
    "NUM_LOOKS",
    "AdapterNotFound",
    "AdapterRefused",
    "AdapterSources",
    "AdapterUnavailable",
    "AdapterUnfit",
    "AdaptersFull",
    "CheckpointError",
    "ConfigError",
    "ConstraintsCostly",
    "ContextLengthError",
    "DeadlineExceeded",
    "Displaced",
    "DownloadError",
    "EngineClosed",
    "EngineInfo",
    "EngineMetrics",
    "EngineOverloaded",
    "EngineResult",
    "EngineStream",
    "FairShares",
    "FieldPath",
    "FinishReason",
    "ImageDecodeError",
    "ImageError",
    "ImageEvent",
    "ImageFeatures",
    "ImageLimits",
    "ImageTooLargeError",
    "ImageTooSlowError",
    "InCrops",
    "InRegion",
    "InferenceEngine",
    "InsufficientMemoryError",
    "InvalidRequest",
    "KestrelError",
    "LoRA",
    "LoadTimes",
    "MeasuredImage",
    "Member",
    "Mirrored",
    "ModelLoadError",
    "ModelNotFoundError",
    "ObjectAbsence",
    "Observer",
    "OnBackground",
    "PixelsWaiting",
    "PreparedImage",
    "PreparedTiles",
    "Profile",
    "ProfileError",
    "ProfileRequest",
    "QueueTimeout",
    "Quota",
    "Request",
    "RequestError",
    "RequestEvent",
    "Reservation",
    "RuntimeConfig",
    "RuntimeFailure",
    "SchedulerStats",
    "SeenImage",
    "Setting",
    "SettingGroup",
    "SkillFault",
    "SkillRegistry",
    "SkillSpec",
    "SkillUnavailable",
    "StepEvent",
    "StreamUpdate",
    "TextLoRAConfig",
    "Tiled",
    "Tiles",
    "TokenEstimate",
    "TokenLogprob",
    "UnsupportedImageError",
    "best_boxes",
    "check_settings",
    "checked",
    "checked_adapter_name",
    "clock",
    "default_of",
    "end_with_parent",
    "errors",
    "eyes_in",
    "maintenance",
    "mean_gaze",
    "path_text",
    "processes",
    "read_small_file",
    "settings_of",
    "teaching",
]
