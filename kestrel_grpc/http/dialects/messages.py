"""Anthropic's Messages: /v1/messages and /v1/messages/count_tokens.

The messages are a conversation, which asks what it asks in chat completions (asking.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import EngineOverloaded, FieldPath, InvalidRequest

from ...edge.calls.call import Call
from ...edge.failures.statuses import complaint
from ...edge.messages.fields import located
from ...service_names import VISION_METHODS
from ...services.messages.json_values import num_crops
from ..edge import Endpoint, Endpoints, ServiceCall
from ..fields import Fields, choice, positive
from ..forms import JSON, ByteResponse, ErrorResponse, sent_event
from ..refusals import Rename, refusal, renamed
from ..services import HttpServices
from .asking import Asked, ask, count, query_endpoint
from .conversation import MESSAGE, Message, MessageImage, conversation, read_message
from .known_fields import CHAT_MESSAGE, OPENAI_SAMPLING, known_fields
from .sampling import NO_SAMPLING, SamplingFields

_OTHER_NAMES = ("max_completion_tokens", "max_reasoning_tokens", "stop", "repeat_penalty")
SAMPLING = SamplingFields(
    {
        **{key: name for key, name in OPENAI_SAMPLING.names.items() if key not in _OTHER_NAMES},
        "stop_sequences": "stop",
    },
    hottest=1.0,
)
MESSAGES = known_fields("messages", SAMPLING.names)
_COUNTED = known_fields("messages_counted")
BLOCKS = {
    kind: known_fields("messages_block", {name})
    for kind, name in (("text", "text"), ("image", "source"))
}
"""By type."""
_EARLIER_THINKING = ("thinking", "redacted_thinking")
_SOURCES = {"base64": "data", "url": "url"}
"""Where an image is, by the type of its source."""
SOURCES = {kind: known_fields("messages_source", {key}) for kind, key in _SOURCES.items()}
THINKING = known_fields("messages_thinking")
_THINKING = {"enabled": True, "adaptive": True, "disabled": False, "between_tools": False}
_DISPLAYS = {"summarized": True, "omitted": False}
OUTPUT = known_fields("messages_output")
FORMAT = known_fields("messages_format")
_NAMES: dict[FieldPath, FieldPath] = {
    ("max_reasoning_tokens",): ("thinking", "budget_tokens"),
    ("response_format",): ("output_config", "format"),
    ("response_format", "json_schema"): ("output_config", "format"),
}
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""The types of errors by status. Others are an invalid_request_error below 500, and an api_error from there on."""


def endpoints(services: HttpServices) -> Endpoints:

    def asked(fields: Fields, sampling: SamplingFields) -> Asked:
        thinks = choice(THINKING.inner(fields, "thinking"), "type", "disabled", _THINKING)
        with located(_renamed):
            talk = conversation([*_system(fields), *_messages(fields)])
            form = _form(fields)
            return ask(fields, talk, form, services, reasoning=thinks, sampling=sampling)

    def answer(fields: Fields) -> ServiceCall:
        MESSAGES.check(fields)
        found = asked(fields, SAMPLING)
        thinking = fields.inner("thinking")
        budget = positive(thinking, "budget_tokens")
        if budget is not None and found.places is None and found.task.reasoning:
            found.task.max_reasoning_tokens = budget
        stops = [text for text in fields.texts("stop_sequences") if text]
        if stops:
            found.task.text.logprobs = True  # The tokens tell which text has ended the answer.
        parts = _Parts(stops, choice(thinking, "display", "summarized", _DISPLAYS))
        return found.call(fields, parts.whole, parts.events, _renamed)

    def counted(fields: Fields) -> ServiceCall:
        _COUNTED.check(fields)
        return count(asked(fields, NO_SAMPLING), services, dict, _renamed)

    form = _Errors()
    return {
        ("POST", "/v1/messages"): query_endpoint(answer, MESSAGES, form),
        ("POST", "/v1/messages/count_tokens"): Endpoint(
            f"{VISION_METHODS}CountTokens", counted, fields=_COUNTED, form=form
        ),
    }


class _Errors:
    """Errors as Anthropic's clients parse them."""

    stream_type = b"text/event-stream"
    ending = b""

    def error_response(self, error: Exception, call: Call, rename: Rename) -> ErrorResponse:
        status, refused, headers = refusal(error, complaint(error, call.request_id), rename)
        is_servers = isinstance(error, EngineOverloaded) and error.quota is None
        if status == 503 or (status == 429 and is_servers):
            status = 529  # The server starts, or is busy, whatever this caller has sent before.
        kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
        body = {
            "type": "error",
            "error": {"type": kind, "message": refused["error"]["message"]},
            "request_id": call.request_id,
        }
        ids = (b"request-id", call.request_id.encode())
        whole = ByteResponse(orjson.dumps(body), JSON, (*headers, ids))
        return ErrorResponse(status, whole, sent_event(body, "error"))


def _renamed(path: FieldPath) -> FieldPath:
    """The path in this dialect for one of chat completions."""
    return renamed(path, _NAMES)


def _system(fields: Fields) -> Iterator[Message]:
    text, images = _content(fields, "system")
    if images:
        raise InvalidRequest("system", "only user messages may hold images")
    if text:
        yield Message("system", text, (), ("system",))


def _messages(fields: Fields) -> Iterator[Message]:
    """Raises InvalidRequest, UnsupportedImageError."""
    for message in fields.objects("messages", MESSAGE):
        yield read_message(message, CHAT_MESSAGE, _content)


def _content(fields: Fields, key: str = "content") -> tuple[str, list[MessageImage]]:
    """A text, or a list of texts and images. Earlier thinking is left out. Raises InvalidRequest,
    UnsupportedImageError."""
    given = fields.values.get(key)
    if given is None or isinstance(given, str):
        return given or "", []
    texts: list[str] = []
    images: list[MessageImage] = []
    for block in fields.objects(key, "an object with a type"):
        kind = block.text("type")
        if kind in _EARLIER_THINKING:
            continue
        if kind not in BLOCKS:
            raise InvalidRequest(block.at("type"), f"must be text or image, got {kind[:50]!r}")
        BLOCKS[kind].check(block)
        if kind == "text":
            texts.append(block.text("text"))
            continue
        source = block.inner("source")
        where = source.text("type")
        if where not in SOURCES:
            raise InvalidRequest(source.at("type"), f"must be base64 or url, got {where[:50]!r}")
        SOURCES[where].check(source)
        encoded = source.image(source.text(_SOURCES[where]), _SOURCES[where])
        images.append(MessageImage(encoded, source.at(_SOURCES[where])))
    return "\n".join(texts), images


def _form(fields: Fields) -> Fields:
    """``output_config.format`` as ``response_format`` of chat completions. Raises InvalidRequest."""
    form = OUTPUT.inner(fields, "output_config").inner("format")
    if not form.values:
        return form
    FORMAT.check(form)
    if (kind := form.text("type")) != "json_schema":
        raise InvalidRequest(form.at("type"), f"must be json_schema, got {kind[:50]!r}")
    return Fields({"type": kind, "json_schema": form.values}, ("response_format",))


class _Parts:
    """The parts of one answer: its blocks and events. ``stops``: its stop sequences. ``shows``: whether it has the text
    of the thinking. Owns which block of a stream is open."""

    def __init__(self, stops: Sequence[str], shows: bool) -> None:
        self._stops, self._shows = stops, shows
        self._open = ""
        self._index = -1

    def whole(self, response: pb.QueryResponse) -> ByteResponse:
        (answer,) = response.answers
        content = [_block("text", answer.text)]
        if answer.HasField("reasoning"):
            content.insert(0, _block("thinking", answer.reasoning.text if self._shows else ""))
        reason, stop = self._end(answer)
        body = _message(response.info, content, reason, stop, _usage(response.usage, response.info))
        ids = (b"request-id", response.info.request_id.encode())
        return ByteResponse(orjson.dumps(body), JSON, (ids,))

    def events(self, message: pb.StreamQueryResponse) -> Iterable[bytes]:
        kind = message.WhichOneof("event")
        if kind == "started":
            begun = _message(
                message.started, [], None, None, _usage(common_pb2.Usage(), message.started)
            )
            yield _event("message_start", message=begun)
        elif kind == "reasoning_delta":
            yield from self._text("thinking", message.reasoning_delta.text if self._shows else "")
        elif kind == "text_delta":
            yield from self._text("text", message.text_delta.text)
        elif kind == "final":
            (answer,) = message.final.answers
            yield from self._text("text", "")
            yield from self._stop_block()
            reason, stop = self._end(answer)
            delta = {"stop_reason": reason, "stop_sequence": stop}
            usage = _usage(message.final.usage, message.final.info)
            yield _event("message_delta", delta=delta, usage=usage)
            yield _event("message_stop")

    def _text(self, kind: str, text: str) -> Iterator[bytes]:
        if self._open != kind:
            yield from self._stop_block()
            self._open, self._index = kind, self._index + 1
            block = _block(kind, "")
            yield _event("content_block_start", index=self._index, content_block=block)
        if text:
            delta = {"type": f"{kind}_delta", kind: text}
            yield _event("content_block_delta", index=self._index, delta=delta)

    def _stop_block(self) -> Iterator[bytes]:
        if self._open:
            yield _event("content_block_stop", index=self._index)

    def _end(self, answer: pb.Answer) -> tuple[str, str | None]:
        """Why the answer ended, and the stop sequence that ended it."""
        if answer.finish_reason == common_pb2.FINISH_REASON_LENGTH:
            return "max_tokens", None
        written = b"".join(token.utf8 for token in answer.logprobs.tokens).decode(errors="replace")
        rest = written[len(answer.text) :]
        # Of several that begin there, the shortest came to its end first.
        stop = min((each for each in self._stops if rest.startswith(each)), key=len, default=None)
        return ("end_turn" if stop is None else "stop_sequence"), stop


def _block(kind: str, text: str) -> dict[str, Any]:
    signature = {"signature": ""} if kind == "thinking" else {}
    return {"type": kind, kind: text, **signature}


def _message(
    info: common_pb2.RequestInfo,
    content: list[dict[str, Any]],
    reason: str | None,
    stop: str | None,
    usage: dict[str, Any],
) -> dict[str, Any]:
    return {
        "id": f"msg_{info.request_id}",
        "type": "message",
        "role": "assistant",
        "model": info.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": stop,
        "usage": usage,
    }


def _usage(used: common_pb2.Usage, info: common_pb2.RequestInfo) -> dict[str, Any]:
    """Cached tokens do not count as ``input_tokens`` in this dialect."""
    return {
        "input_tokens": used.input_tokens - used.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": used.cached_tokens,
        "output_tokens": used.output_tokens,
        "num_crops": num_crops(info),
        "output_tokens_details": {"thinking_tokens": used.reasoning_tokens},
    }


def _event(name: str, **values: Any) -> bytes:
    return sent_event({"type": name, **values}, name)
