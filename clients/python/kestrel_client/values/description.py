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
class Skill:
    """A skill of a model."""

    name: str
    description: str
    """One sentence; may be empty."""
    arguments_schema: str
    """A JSON Schema of the arguments of ``run_skill``, as JSON text; empty if the skill has none."""


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
    skills: tuple[Skill, ...]
    device: str
    """"cpu", or for example "cuda:0"."""
    device_name: str
    """The manufacturer's name of the device; may be empty."""
    dtype: str
    """Data type of the computation, like "bfloat16"."""
    max_batch_size: int
    """Limit on the requests that are computed together."""
    weights_fingerprint: str
    """Identifies the weights; empty until the model is ready."""
    num_parameters: int
    """0 until the model is ready."""
    license: str
    state: ModelState
    refines: bool = False
    """Whether it has a segmentation refiner; False until the model is ready."""
    calibrated_scores: tuple[str, ...] = ()
    """The skills whose scores are calibrated, and "absence"."""

    @property
    def skill_names(self) -> tuple[str, ...]:
        """The names of the skills."""
        return tuple(skill.name for skill in self.skills)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for ``json.dumps``."""
        lists = {"calibrated_scores": list(self.calibrated_scores)}
        return {**asdict(self), "skills": [asdict(each) for each in self.skills], **lists}


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A fine-tune that the server knows."""

    name: str
    loaded: bool
    """Whether it is in memory."""
    size_bytes: int
    """The memory that it takes; 0 if it is not loaded."""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for ``json.dumps``."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits and defaults of a server; see the comments in model_service.proto."""

    max_message_bytes: int
    max_image_bytes: int
    max_image_pixels: int
    max_image_aspect_ratio: float
    max_text_bytes: int
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
class ServerInfo:
    """A server's description."""

    server_version: str
    api_version: str
    library_versions: Mapping[str, str]
    default_model: str
    limits: ServerLimits
    image_formats: tuple[str, ...]
    """Formats of encoded images, in lower case."""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for ``json.dumps``."""
        return {**asdict(self), "image_formats": list(self.image_formats)}


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
    plain = {name: getattr(message, name) for name in Model.__dataclass_fields__}
    read = {
        "skills": tuple(
            Skill(
                name=each.name,
                description=each.description,
                arguments_schema=each.arguments_schema,
            )
            for each in message.skills
        ),
        "state": _STATES.get(message.state, "unknown"),
        "calibrated_scores": tuple(message.calibrated_scores),
    }
    return Model(**{**plain, **read})


def read_adapter(message: model_service_pb2.Adapter) -> Adapter:
    return Adapter(name=message.name, loaded=message.loaded, size_bytes=message.size_bytes)


def read_server_info(message: model_service_pb2.GetServerInfoResponse) -> ServerInfo:
    limits = message.limits
    return ServerInfo(
        server_version=message.server_version,
        api_version=message.api_version,
        library_versions=dict(message.library_versions),
        default_model=message.default_model,
        limits=ServerLimits(
            **{name: getattr(limits, name) for name in ServerLimits.__dataclass_fields__}
        ),
        image_formats=tuple(message.image_formats),
    )
