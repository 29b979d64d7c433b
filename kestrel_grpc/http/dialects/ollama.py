"""Ollama's interface: /api/generate, /api/chat, /api/tags, /api/ps, /api/show and /api/version.

Images are plain base64. A stream is one JSON object a line, and is the default, as Ollama's clients expect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

import orjson

from kestrel_client._pb.kestrel.v1 import model_service_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import FieldPath, InvalidRequest, clock

from ...service_names import MODEL_METHODS
from ...services.messages.json_values import finish_reason, num_crops
from ...services.messages.task_fields import short_path
from ..edge import Endpoint, Endpoints, ServiceCall
from ..fields import ANY_OBJECT, Fields, json_text, positive
from ..forms import JsonForm
from ..refusals import Rename, renamed
from ..services import HttpServices
from .asking import query_endpoint
from .conversation import FIELDS, MESSAGE, Message, MessageImage, conversation
from .known_fields import GENERATE, OLLAMA_CHAT, OLLAMA_MESSAGE, OLLAMA_OPTIONS, OLLAMA_SAMPLING
from .models import listing, served_name, set_model

_VERSION = "0.12.0"
"""The version of Ollama whose interface this is. Clients query it to learn which fields they may send."""
_NS_PER_MS = 1_000_000
_LEVELS = ("low", "medium", "high")
_NAMES: dict[FieldPath, FieldPath] = {
    ("question",): ("prompt",),
    ("constraint", "json_schema"): ("format",),
    ("options", "model"): ("model",),
    ("options", "adapter"): ("model",),
}


def _line(body: dict[str, Any]) -> bytes:
    return orjson.dumps(body) + b"\n"


FORM = JsonForm(
    stream_type=b"application/x-ndjson",
    error=lambda body: {"error": body["error"]["message"]},
    error_event=lambda body: _line({"error": body["error"]["message"]}),
)


def endpoints(services: HttpServices) -> Endpoints:
    models = services.models

    def generate(fields: Fields) -> ServiceCall:
        GENERATE.check(fields)
        prompt, system = fields.text("prompt", ""), fields.text("system", "")
        images = _images(fields)
        if not prompt.strip() and not images:
            return _loaded(services, {"response": ""})
        messages = [Message("user", prompt, images, ("prompt",))]
        if system:
            messages.insert(0, Message("system", system, (), ("system",)))

        def answer(text: str, thinking: str) -> dict[str, Any]:
            return {"response": text, **({"thinking": thinking} if thinking else {})}

        return _ask(fields, services, messages, answer, lambda path: path)

    def chat(fields: Fields) -> ServiceCall:
        OLLAMA_CHAT.check(fields)

        def part(text: str, thinking: str = "") -> dict[str, Any]:
            message = {"role": "assistant", "content": text}
            return {"message": {**message, **({"thinking": thinking} if thinking else {})}}

        messages = [_message(each) for each in fields.objects("messages", MESSAGE)]
        if not messages:
            return _loaded(services, part(""))
        return _ask(fields, services, messages, part, _in_messages)

    def show(fields: Fields) -> ServiceCall:
        name = fields.values.get("model") or fields.values.get("name") or services.names[0]
        if not isinstance(name, str):
            raise InvalidRequest("model", "must be a string")
        request = model_service_pb2.GetModelRequest(model=served_name(name, services.names))
        return ServiceCall(request, models.GetModel, lambda response: _SHOW)

    return {
        ("POST", "/api/generate"): query_endpoint(generate, GENERATE, FORM),
        ("POST", "/api/chat"): query_endpoint(chat, OLLAMA_CHAT, FORM),
        ("GET", "/api/tags"): listing(models, _tags, FORM),
        ("GET", "/api/ps"): listing(models, _loaded_tags, FORM),
        ("POST", "/api/show"): Endpoint(f"{MODEL_METHODS}GetModel", show, form=FORM),
    }


def version() -> dict[str, str]:
    """The answer of /api/version, which needs no model."""
    return {"version": _VERSION}


def _in_messages(path: FieldPath) -> FieldPath:
    return ("messages",) if path[0] in FIELDS else path


def _message(message: Fields) -> Message:
    OLLAMA_MESSAGE.check(message)
    role, text = message.text("role"), message.text("content", "")
    return Message(role, text, _images(message), message.path)


def _images(fields: Fields) -> list[MessageImage]:
    images: list[MessageImage] = []
    for index, item in enumerate(fields.items("images")):
        if not isinstance(item, str):
            raise InvalidRequest(fields.at("images", index), "must be base64 text")
        encoded = fields.image(item, "images", index)
        images.append(MessageImage(encoded, fields.at("images", index)))
    return images


def _schema(fields: Fields) -> str | None:
    """The JSON Schema that ``format`` asks for: "json", or a schema. Raises InvalidRequest."""
    form = fields.values.get("format")
    if not form:
        return None
    if isinstance(form, dict):
        return json_text(fields.inner("format"))
    if form == "json":
        return ANY_OBJECT
    raise InvalidRequest("format", 'must be "json" or a JSON Schema')


def _ask(
    fields: Fields,
    services: HttpServices,
    messages: list[Message],
    part: Callable[[str, str], dict[str, Any]],
    own: Rename,
) -> ServiceCall:
    """``part`` converts text and thinking to the form of the path. ``own`` gives the fields that only this path has, of
    those that a task has. Raises InvalidRequest."""
    options = OLLAMA_OPTIONS.inner(fields, "options")
    vision, names = services.vision, services.names
    talk = conversation(messages)
    request = talk.request(reasoning=_thinks(fields), max_crops=positive(options, "max_crops"))
    known = _NAMES | OLLAMA_SAMPLING.fill(request.query, options)
    schema = _schema(fields)
    if schema is not None:
        request.query.text.constraint.json_schema = schema
    if fields.values.get("model") is not None:
        set_model(request.options, fields.text("model"), names)

    def final(response: pb.QueryResponse, text: str, thinking: str) -> dict[str, Any]:
        timings, usage = response.timings, response.usage
        return {
            **_begin(response.info.model),
            **part(text, thinking),
            "done": True,
            "done_reason": finish_reason(response),
            "total_duration": round(timings.total_ms * _NS_PER_MS),
            "load_duration": 0,
            "prompt_eval_count": usage.input_tokens,
            "prompt_eval_duration": round(timings.prefill_ms * _NS_PER_MS),
            "num_crops": num_crops(response.info),
            "eval_count": usage.output_tokens,
            "eval_duration": round(timings.decode_ms * _NS_PER_MS),
        }

    def events(message: Any) -> Iterable[bytes]:
        kind = message.WhichOneof("event")
        if kind in ("text_delta", "reasoning_delta"):
            text, thinking = message.text_delta.text, message.reasoning_delta.text
            model = request.options.model or names[0]
            yield _line({**_begin(model), **part(text, thinking), "done": False})
        elif kind == "final":
            yield _line(final(message.final, "", ""))

    def whole(response: pb.QueryResponse) -> dict[str, Any]:
        (answer,) = response.answers
        return final(response, answer.text, answer.reasoning.text)

    def rename(path: FieldPath) -> FieldPath:
        if path[-1] == "max_crops":
            return ("options", "max_crops")
        return talk.image_path(short := short_path(path)) or renamed(own(short), known)

    if fields.values.get("stream") is False:
        return ServiceCall(request, vision.Query, whole, rename=rename)
    return ServiceCall(request, vision.StreamQuery, whole, events, rename)


def _thinks(fields: Fields) -> bool:
    """Whether the model reasons before it answers. It does so in one way only. Raises InvalidRequest."""
    think = fields.values.get("think")
    if think is None or isinstance(think, bool):
        return bool(think)
    if think not in _LEVELS:
        raise InvalidRequest("think", f"must be true, false or one of {', '.join(_LEVELS)}")
    return True


def _loaded(services: HttpServices, part: dict[str, Any]) -> ServiceCall:
    """Answers a request without a prompt, which asks the server to load the model. The model is already loaded."""
    request = model_service_pb2.ListModelsRequest()
    body = {**_begin(services.names[0]), **part, "done": True, "done_reason": "load"}
    return ServiceCall(request, services.models.ListModels, lambda response: body)


def _begin(model: str) -> dict[str, Any]:
    now = datetime.fromtimestamp(clock.wall(), UTC).isoformat().replace("+00:00", "Z")
    return {"model": model, "created_at": now}


_SHOWN = {
    "modified_at": "1970-01-01T00:00:00Z",
    "details": {
        "parent_model": "",
        "format": "safetensors",
        "family": "moondream",
        "families": ["moondream"],
        "parameter_size": "",
        "quantization_level": "",
    },
}
_SHOW = {
    **_SHOWN,
    "modelfile": "",
    "parameters": "",
    "template": "",
    "model_info": {"general.architecture": "moondream"},
    "capabilities": ["completion", "vision", "thinking"],
}
"""The answer of /api/show, which is the same for all models."""


def _tags(response: model_service_pb2.ListModelsResponse) -> dict[str, Any]:
    return {
        "models": [
            {"name": each.name, "model": each.name, "size": 0, "digest": "", **_SHOWN}
            for each in response.models
        ]
    }


def _loaded_tags(response: model_service_pb2.ListModelsResponse) -> dict[str, Any]:
    """The model is never unloaded, which Ollama's own programs show as a time far away."""
    never = {"expires_at": "2318-01-01T00:00:00Z", "size_vram": 0}
    return {"models": [{**tag, **never} for tag in _tags(response)["models"]]}
