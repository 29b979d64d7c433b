"""The descriptions of a server and its models, read from the messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .._pb.kestrel.v1 import model_service_pb2
from .plain import Plain
from .reading import read, words_by_value

ModelState: TypeAlias = Literal["loading", "ready", "failed", "draining", "unknown"]

_STATES: dict[int, ModelState] = words_by_value(model_service_pb2.ModelState)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skill:
    """A skill of a model."""

    name: str
    description: str
    """One sentence; may be empty."""
    arguments_schema: str
    """A JSON Schema of the arguments of ``run_skill``, as JSON text; empty if the skill has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(Plain):
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
    max_crops: int = 0
    """Limit on the tiles of an image, beside the overview; 0 until the model is ready."""

    @property
    def skill_names(self) -> tuple[str, ...]:
        """The names of the skills."""
        return tuple(skill.name for skill in self.skills)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter(Plain):
    """A fine-tune that the server knows."""

    name: str
    loaded: bool
    """Whether it is in memory."""
    size_bytes: int
    """The memory that it takes; 0 if it is not loaded."""


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
class ServerInfo(Plain):
    """A server's description."""

    server_version: str
    api_version: str
    library_versions: Mapping[str, str]
    default_model: str
    limits: ServerLimits
    image_formats: tuple[str, ...]
    """Formats of encoded images, in lower case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad(Plain):
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


def read_load(message: model_service_pb2.GetLoadResponse) -> ServerLoad:
    return read(ServerLoad, message, state=_STATES.get(message.state, "unknown"))


def read_model(message: model_service_pb2.Model) -> Model:
    return read(
        Model,
        message,
        skills=tuple(read(Skill, each) for each in message.skills),
        state=_STATES.get(message.state, "unknown"),
        calibrated_scores=tuple(message.calibrated_scores),
    )


def read_adapter(message: model_service_pb2.Adapter) -> Adapter:
    return read(Adapter, message)


def read_server_info(message: model_service_pb2.GetServerInfoResponse) -> ServerInfo:
    return read(
        ServerInfo,
        message,
        library_versions=dict(message.library_versions),
        limits=read(ServerLimits, message.limits),
        image_formats=tuple(message.image_formats),
    )
