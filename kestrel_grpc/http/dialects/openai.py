"""OpenAI's interface: /v1/chat/completions, /v1/models and /v1/models/NAME.

A conversation becomes one Query: system text goes before the first question, and earlier turns become its history. A
user message may hold images, which go before its text. A request for boxes or points (grounding.py) becomes one Detect
or Point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from kestrel_client._pb.kestrel.v1 import common_pb2, model_service_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import InvalidRequest, clock

from ...service_names import MODEL_METHODS
from ...services.messages.json_values import finish_reason, num_crops
from ...services.messages.task_fields import holder
from ..context import Scope
from ..edge import Endpoint, Endpoints, ServiceCall
from ..fields import Fields, choice, positive
from ..forms import sent_event
from ..services import HttpServices
from .asking import ask, query_endpoint, reasons
from .conversation import MESSAGE, MessageImage, conversation, read_message
from .known_fields import CHAT, CHAT_MESSAGE, CHAT_PARTS
from .models import listing, served_name

UNSUPPORTED_PATHS = {"/v1/embeddings": "the models make no embeddings of texts"}
"""Paths of OpenAI's interface that this one does not have, and what to do instead."""
_MOST_TOP = 20
_DETAILS = {"low": 1, "high": None, "auto": None, "original": None}
"""The values of ``detail``, and the budget of the image: low is the overview alone."""


def endpoints(services: HttpServices) -> Endpoints:
    models = services.models

    def described(scope: Scope, body: bytes | bytearray) -> ServiceCall:
        name = served_name(scope["path_params"]["model"], services.names)
        request = model_service_pb2.GetModelRequest(model=name)
        return ServiceCall(request, models.GetModel, lambda response: _model_json(response.model))

    return {
        ("POST", "/v1/chat/completions"): query_endpoint(partial(_chat, services), CHAT),
        ("GET", "/v1/models"): listing(models, _models_json),
        ("GET", "/v1/models/{model:path}"): Endpoint(
            f"{MODEL_METHODS}GetModel", described, takes_body=False, is_raw=True
        ),
    }


def _chat(services: HttpServices, fields: Fields) -> ServiceCall:
    """Raises InvalidRequest, UnsupportedImageError."""
    CHAT.check(fields)
    messages = fields.objects("messages", MESSAGE)
    talk = conversation(read_message(each, CHAT_MESSAGE, message_content) for each in messages)
    form = fields.inner("response_format")
    asked = ask(fields, talk, form, services, reasoning=reasons(fields))
    _fill_logprobs(asked.task, fields)
    if asked.places is None:
        asked.task.num_samples = samples(fields)
    elif fields.whole("n") not in (None, 1):
        raise InvalidRequest("n", f"must be 1 for boxes and points, got {fields.values['n']}")
    usage = fields.inner("stream_options").flag("include_usage")
    return asked.call(fields, _completion, _chunks(usage))


def samples(fields: Fields) -> int:
    """How many answers to give. Raises InvalidRequest."""
    return positive(fields, "n") or 1


def message_content(message: Fields) -> tuple[str, list[MessageImage]]:
    """The text of a message, and its images. Raises InvalidRequest, UnsupportedImageError."""
    content = message.values.get("content")
    if content is None or isinstance(content, str):
        return content or "", []
    if not isinstance(content, list):
        raise InvalidRequest(message.at("content"), "must be a string or a list of parts")
    texts: list[str] = []
    images: list[MessageImage] = []
    for part in message.objects("content", "an object with a type"):
        kind = part.text("type")
        if kind not in CHAT_PARTS:
            raise InvalidRequest(part.at("type"), f"must be text or image_url, got {kind[:50]!r}")
        CHAT_PARTS[kind].check(part)
        if kind in ("text", "input_text", "output_text"):
            texts.append(part.text("text"))
        else:
            given = part.values.get("image_url")
            image = part if isinstance(given, str) else part.inner("image_url")
            url = image.text("image_url" if image is part else "url")
            budget = choice(image, "detail", "auto", _DETAILS)
            encoded = part.image(url, "image_url")
            images.append(MessageImage(encoded, part.at("image_url"), budget))
    return "\n".join(texts), images


def _fill_logprobs(task: Any, fields: Fields) -> None:
    """Raises InvalidRequest."""
    if fields.flag("logprobs"):
        holder(task, "logprobs", "logprobs").logprobs = True
    fill_top_logprobs(task, fields, "top_logprobs")


def fill_top_logprobs(task: Any, fields: Fields, key: str) -> None:
    """Raises InvalidRequest."""
    wanted = fields.whole(key)
    if wanted is not None:
        if not 0 <= wanted <= _MOST_TOP:
            raise InvalidRequest(key, f"must be from 0 to {_MOST_TOP}, got {wanted}")
        holder(task, "top_logprobs", key).top_logprobs = wanted


def _completion(response: pb.QueryResponse) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    for answer in response.answers:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.HasField("reasoning"):
            message["reasoning_content"] = answer.reasoning.text
        logprobs = _logprobs(answer.logprobs.tokens) if answer.HasField("logprobs") else None
        choices.append(
            {
                "index": len(choices),
                "message": message,
                "logprobs": logprobs,
                "finish_reason": reason_of(answer),
            }
        )
    return {
        **head(response.info, "chatcmpl", "chat.completion"),
        "choices": choices,
        "usage": usage_json(response),
    }


def head(info: common_pb2.RequestInfo, prefix: str, kind: str) -> dict[str, Any]:
    """What all answers begin with."""
    return {
        "id": f"{prefix}-{info.request_id}",
        "object": kind,
        "created": int(clock.wall()),
        "model": info.model,
    }


def _logprobs(tokens: Sequence[common_pb2.TokenLogprob]) -> dict[str, Any]:
    content = [
        {**_token(token), "top_logprobs": [_token(each) for each in token.top]} for token in tokens
    ]
    return {"content": content, "refusal": None}


def _token(token: common_pb2.TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.utf8)}


def _chunks(usage: bool) -> Callable[[Any], Iterable[bytes]]:
    """The events of a streamed Query; ``usage``: whether a last chunk has the number of tokens."""
    begun: Any = None

    def events(message: Any) -> Iterable[bytes]:
        nonlocal begun
        kind = message.WhichOneof("event")
        if kind == "started":
            begun = message.started
            yield _chunk(begun, {"role": "assistant", "content": ""})
        elif kind == "text_delta":
            delta = message.text_delta
            yield _chunk(begun, {"content": delta.text}, tokens=delta.tokens)
        elif kind == "reasoning_delta":
            yield _chunk(begun, {"reasoning_content": message.reasoning_delta.text})
        elif kind == "final":
            last = message.final
            yield _chunk(last.info, {}, reason=finish_reason(last))
            if usage:
                yield _chunk(last.info, None, usage=usage_json(last))
            yield b"data: [DONE]\n\n"

    return events


def _chunk(
    info: common_pb2.RequestInfo,
    delta: dict[str, Any] | None,
    reason: str | None = None,
    usage: dict[str, Any] | None = None,
    tokens: Sequence[common_pb2.TokenLogprob] = (),
) -> bytes:
    """``delta`` None: no choices."""
    choice = {
        "index": 0,
        "delta": delta,
        "logprobs": _logprobs(tokens) if tokens else None,
        "finish_reason": reason,
    }
    body = {
        **head(info, "chatcmpl", "chat.completion.chunk"),
        "choices": [] if delta is None else [choice],
        **({} if usage is None else {"usage": usage}),
    }
    return sent_event(body)


def reason_of(answer: pb.Answer) -> str:
    return "length" if answer.finish_reason == common_pb2.FINISH_REASON_LENGTH else "stop"


def usage_json(response: Any) -> dict[str, Any]:
    used = response.usage
    return {
        "prompt_tokens": used.input_tokens,
        "completion_tokens": used.output_tokens,
        "total_tokens": used.input_tokens + used.output_tokens,
        "prompt_tokens_details": {
            "cached_tokens": used.cached_tokens,
            "image_tokens": used.image_tokens,
            "num_crops": num_crops(response.info),
        },
        "completion_tokens_details": {"reasoning_tokens": used.reasoning_tokens},
    }


def _models_json(response: model_service_pb2.ListModelsResponse) -> dict[str, Any]:
    return {"object": "list", "data": [_model_json(model) for model in response.models]}


def _model_json(model: model_service_pb2.Model) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": 0, "owned_by": "kestrel"}
