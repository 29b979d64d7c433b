"""The descriptions of a server and its models, read from the messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from .._pb.kestrel.v1 import model_service_pb2

ModelState: TypeAlias = Literal["loading", "ready", "failed", "draining", "unknown"]

_STATES: dict[int, ModelState] = {
    model_service_pb2.MODEL_STATE_LOADING: "loading",
    model_service_pb2.MODEL_STATE_READY: "ready",
    model_service_pb2.MODEL_STATE_FAILED: "failed",
    model_service_pb2.MODEL_STATE_DRAINING: "draining",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model that the server serves."""

    name: str
    family: str
    """Architecture: "moondream2" or "moondream3"."""
    context_positions: int
    """Largest number of positions of one request: prompt and generated tokens together."""
    image_positions: int
    """Positions of the context that one image takes."""
    skills: tuple[str, ...]
    default_max_objects: int
    weights_fingerprint: str
    """Identifies the weights; empty until the model is ready."""
    parameter_count: int
    """0 until the model is ready."""
    license: str
    state: ModelState
    refines: bool = False
    """Whether it has a segmentation refiner; False until the model is ready."""
    calibrated_scores: tuple[str, ...] = ()
    """The skills whose scores are calibrated, and "absence"."""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for ``json.dumps``."""
        lists = {"skills": list(self.skills), "calibrated_scores": list(self.calibrated_scores)}
        return {**asdict(self), **lists}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits and defaults of a server; see the comments in model_service.proto."""

    max_message_bytes: int
    max_image_bytes: int
    max_image_pixels: int
    max_image_aspect_ratio: float
    max_text_bytes: int
    max_context_positions: int
    max_batch_size: int
    max_queue: int
    default_max_tokens: int
    default_max_objects: int
    default_temperature: float
    default_top_p: float
    image_store_bytes: int = 0
    """Limit of the stored images in bytes; 0 if the server stores none."""
    max_analyze_tasks: int = 0
    default_min_score: float = 0.0
    max_images: int = 1
    default_max_absence: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCapabilities:
    """The capabilities of a server."""

    skills: tuple[str, ...]
    image_formats: tuple[str, ...]
    """Formats of encoded images, in lower case."""
    reasoning: bool
    spatial_refs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """A server's description."""

    server_version: str
    api_version: str
    library_versions: Mapping[str, str]
    device: str
    device_name: str
    dtype: str
    default_model: str
    weights_fingerprint: str
    limits: ServerLimits
    capabilities: ServerCapabilities

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for ``json.dumps``."""
        plain = asdict(self)
        plain["capabilities"]["skills"] = list(self.capabilities.skills)
        plain["capabilities"]["image_formats"] = list(self.capabilities.image_formats)
        return plain


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """How busy a server is; see the comments at GetLoadResponse in model_service.proto."""

    ready: bool
    state: ModelState
    running_requests: int
    waiting_requests: int
    max_batch_size: int
    max_queue: int
    utilization: float
    """Requests divided by the size of the batch; above 1, requests wait."""
    pages: int
    free_pages: int
    cached_pages: int
    prefix_hit_rate: float
    output_tokens_per_second: float
    requests_per_second: float
    errors_per_second: float
    cpu_utilization: float
    memory_utilization: float

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for ``json.dumps``."""
        return asdict(self)


def read_load(message: model_service_pb2.GetLoadResponse) -> ServerLoad:
    plain = {name: getattr(message, name) for name in ServerLoad.__dataclass_fields__}
    return ServerLoad(**{**plain, "state": _STATES.get(message.state, "unknown")})


def read_model(message: model_service_pb2.Model) -> Model:
    return Model(
        name=message.name,
        family=message.family,
        context_positions=message.context_positions,
        image_positions=message.image_positions,
        skills=tuple(message.skills),
        default_max_objects=message.default_max_objects,
        weights_fingerprint=message.weights_fingerprint,
        parameter_count=message.parameter_count,
        license=message.license,
        state=_STATES.get(message.state, "unknown"),
        refines=message.refines,
        calibrated_scores=tuple(message.calibrated_scores),
    )


def read_server_info(message: model_service_pb2.GetServerInfoResponse) -> ServerInfo:
    limits = message.limits
    capabilities = message.capabilities
    return ServerInfo(
        server_version=message.server_version,
        api_version=message.api_version,
        library_versions=dict(message.library_versions),
        device=message.device,
        device_name=message.device_name,
        dtype=message.dtype,
        default_model=message.default_model,
        weights_fingerprint=message.weights_fingerprint,
        limits=ServerLimits(
            **{name: getattr(limits, name) for name in ServerLimits.__dataclass_fields__}
        ),
        capabilities=ServerCapabilities(
            skills=tuple(capabilities.skills),
            image_formats=tuple(capabilities.image_formats),
            reasoning=capabilities.reasoning,
            spatial_refs=capabilities.spatial_refs,
        ),
    )
