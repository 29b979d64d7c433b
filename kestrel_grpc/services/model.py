"""ModelService: the served models, the server's limits, versions and load.

It answers also while the model loads, with some fields unset. Lists have pages, of which the server stores nothing: a
token holds the place at which its page begins.
"""

from __future__ import annotations

import base64
import binascii
import platform
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from kestrel_client._pb.kestrel.v1 import model_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.model_service_pb2_grpc import ModelServiceServicer
from kestrel_engine import IMAGE_FORMATS, InvalidRequest

from .. import __version__
from ..edge.calls.call import Context
from ..edge.messages.fields import checked_model_name, in_range
from ..monitoring.load import LoadMeter
from ..served_model import ServedModel, ServedModels, State
from .answers.analysis import MAX_TASKS

API_VERSION = "kestrel.v1"

_LIBRARIES = "torch numpy grpcio protobuf tokenizers safetensors pyvips kestrel-client".split()
_LICENSES = {"kestrel-small": "Apache-2.0"}
"""Of this project's own weights. For other weights, and for a path, the field stays empty."""
_STATES = {state: pb.ModelState.Value(f"MODEL_STATE_{state.name}") for state in State}
_FORMATS = {
    "JPEG": "jpeg",
    "PNG": "png",
    "WebP": "webp",
    "TIFF": "tiff",
    "GIF": "gif",
    # Every build that reads this container decodes AVIF. Only decoding an image shows whether HEIC works.
    "AVIF and HEIC": "avif",
}

_Item = TypeVar("_Item")

MOST, _USUAL = 1000, 100
_MOST_CHARACTERS = 1024
_BETWEEN = "\n"


class ModelService(ModelServiceServicer):
    """Reads the models' states for every call. Limits are those of the default model."""

    def __init__(
        self,
        served: ServedModels,
        load: LoadMeter,
        *,
        max_message_bytes: int,
        image_store_bytes: int,
    ) -> None:
        self._served, self._load = served, load
        self._image_store_bytes = image_store_bytes
        self._max_message_bytes = max_message_bytes
        self._versions = {name: version for name in _LIBRARIES if (version := _version(name))}

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        default, *others = self._served
        items = [("", default), *sorted((each.name, each) for each in others)]
        shown, token = page_of(request, items, "models")
        return pb.ListModelsResponse(models=map(_model, shown), next_page_token=token)

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        return pb.GetModelResponse(model=_model(named_model(self._served, request)))

    async def ListAdapters(
        self, request: pb.ListAdaptersRequest, context: Context
    ) -> pb.ListAdaptersResponse:
        model = named_model(self._served, request)
        known = {} if model.loaded is None else await model.loaded.list_adapters()
        adapters = [(name, adapter_message(name, size)) for name, size in known.items()]
        shown, token = page_of(request, adapters, f"adapters of {model.name}")
        return pb.ListAdaptersResponse(adapters=shown, next_page_token=token)

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            server_version=__version__,
            api_version=API_VERSION,
            library_versions=self._versions,
            default_model=self._served.default.name,
            limits=self._limits(),
            image_formats=[_FORMATS.get(name, name.lower()) for name in IMAGE_FORMATS],
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        load = self._load.read()
        return pb.GetLoadResponse(
            ready=load.state is State.READY,
            state=_STATES[load.state],
            running_requests=load.stats.running,
            waiting_requests=load.waiting,
            max_batch_size=load.max_running,
            max_queue=load.max_waiting,
            utilization=load.utilization,
            pages=load.stats.pages_total,
            free_pages=load.stats.pages_free,
            cached_pages=load.stats.pages_cached,
            prefix_hit_rate=load.stats.prefix_hit_rate,
            output_tokens_per_second=load.tokens_per_s,
            requests_per_second=load.requests_per_s,
            errors_per_second=load.errors_per_s,
            cpu_utilization=load.cpu,
            memory_utilization=load.memory,
        )

    def _limits(self) -> pb.ServerLimits:
        config = self._served.default.config
        images = config.image_limits
        return pb.ServerLimits(
            max_message_bytes=self._max_message_bytes,
            max_image_bytes=images.max_bytes,
            max_image_pixels=images.max_pixels,
            max_image_aspect_ratio=images.max_aspect_ratio,
            max_text_bytes=config.max_text_bytes,
            max_queue=config.max_queue,
            default_max_tokens=min(
                config.default_max_tokens, config.max_new_tokens or config.default_max_tokens
            ),
            default_max_objects=config.default_max_objects,
            default_temperature=config.default_temperature,
            default_top_p=config.default_top_p,
            image_store_bytes=self._image_store_bytes,
            max_analyze_tasks=MAX_TASKS,
            default_min_score=config.min_score,
            max_images=config.max_images,
            default_max_absence=config.max_absence,
        )


def named_model(served: ServedModels, request: Any) -> ServedModel:
    """The model that a request names; the default one if it names none. Raises InvalidRequest, ModelNotFoundError."""
    if not request.HasField("model"):
        return served.default
    return served.model(checked_model_name(request.model))


def adapter_message(name: str, size_bytes: int) -> pb.Adapter:
    """``size_bytes``: 0 for an adapter that is not loaded."""
    return pb.Adapter(name=name, loaded=size_bytes > 0, size_bytes=size_bytes)


def _model(served: ServedModel) -> pb.Model:
    config, engine = served.config, served.loaded
    device = config.device if engine is None else engine.info.device
    model = pb.Model(
        name=served.name,
        license=_LICENSES.get(served.name, ""),
        state=_STATES[served.state],
        device="" if device == "auto" else device,
        device_name=_cpu_name() if device == "cpu" else "",
        max_batch_size=config.max_batch_size or 0,
    )
    if engine is None:
        return model
    info = engine.info
    model.MergeFrom(
        pb.Model(
            family=info.family,
            context_positions=info.max_context,
            image_positions=info.image_positions,
            max_crops=info.max_crops,
            skills=[
                pb.Skill(name=each.name, description=each.description, arguments_schema=each.schema)
                for each in engine.skills
            ],
            device_name=info.device_name,
            dtype=info.precision,
            max_batch_size=info.max_batch_size,
            weights_fingerprint=info.weights_fingerprint,
            num_parameters=info.num_parameters,
            refines=info.refines,
            calibrated_scores=info.calibrated,
        )
    )
    return model


@cache
def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


@cache
def _cpu_name() -> str:
    """The processor's model name on Linux, its architecture on other systems."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def page_of(
    request: Any, items: Iterable[tuple[str, _Item]], scope: str
) -> tuple[list[_Item], str]:
    """The items of the page that ``request`` asks for, and the token of the next page, which is empty on the last one.

    ``request``: has ``page_size`` and ``page_token``. ``items``: all, in order of their keys, which differ. ``scope``:
    names the list. Raises InvalidRequest for an invalid size, and for an invalid token or that of another list.
    """
    size = in_range(request, "page_size", 1, MOST, _USUAL)
    after = _key_in(request.page_token, scope) if request.page_token else None
    left = [(key, item) for key, item in items if after is None or key > after]
    shown = left[:size]
    token = _token(scope, shown[-1][0]) if len(left) > size else ""
    return [item for _, item in shown], token


def _token(scope: str, key: str) -> str:
    return base64.urlsafe_b64encode(f"{scope}{_BETWEEN}{key}".encode()).decode()


def _key_in(token: str, scope: str) -> str:
    """The key of the last item of the page before. Raises InvalidRequest."""
    if len(token) > _MOST_CHARACTERS:
        raise InvalidRequest(
            "page_token",
            f"has {len(token)} characters; the limit is {_MOST_CHARACTERS}",
            value=len(token),
            limit=_MOST_CHARACTERS,
        )
    try:
        text = base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        text = ""
    found, between, key = text.partition(_BETWEEN)
    if not between or found != scope:
        raise InvalidRequest(
            "page_token",
            "is not the next_page_token of this list; leave it empty for the first page",
        )
    return key
