"""OpenAI's Responses: /v1/responses and /v1/responses/input_tokens.

The items of ``input`` are a conversation, which asks what it asks in chat completions (asking.py). The server stores no
responses, so each request has its whole conversation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import FieldPath, InvalidRequest, clock

from ...edge.messages.fields import located
from ...service_names import VISION_METHODS
from ...services.messages.json_values import num_crops
from ..edge import Endpoint, Endpoints, ServiceCall
from ..fields import Fields
from ..forms import sent_event
from ..refusals import renamed
from ..services import HttpServices
from .asking import Asked, ask, count, query_endpoint, reasons
from .conversation import MESSAGE, Message, conversation, read_message
from .known_fields import OPENAI_SAMPLING, known_fields
from .openai import message_content
from .sampling import NO_SAMPLING, SamplingFields

_IN_CHAT = "is not supported here; use /v1/chat/completions"
_CHAT_LIMITS = ("max_tokens", "max_completion_tokens")
SAMPLING = SamplingFields(
    {
        **{key: name for key, name in OPENAI_SAMPLING.names.items() if key not in _CHAT_LIMITS},
        "max_output_tokens": "max_tokens",
    },
    hottest=OPENAI_SAMPLING.hottest,
    unlimited=OPENAI_SAMPLING.unlimited,
)
RESPONSES = known_fields("responses", SAMPLING.names)
_COUNTED = known_fields("responses_counted")
ITEM = known_fields("responses_item")
REASONING = known_fields("responses_reasoning")
TEXT = known_fields("responses_text")
FORMAT = known_fields("responses_format")
_FORM_FIELDS = ("type", "name", "description", "strict", "schema")
_NAMES: dict[FieldPath, FieldPath] = {
    ("messages",): ("input",),
    ("response_format",): ("text", "format"),
    ("response_format", "json_schema"): ("text", "format"),
}
_LOGPROBS = "message.output_text.logprobs"
_MOST_METADATA, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512
"""Those of OpenAI's interface."""


def endpoints(services: HttpServices) -> Endpoints:

    def asked(fields: Fields, sampling: SamplingFields) -> Asked:
        with located(_renamed):
            talk = conversation([*_instructions(fields), *_input(fields)])
            reasoned = reasons(REASONING.inner(fields, "reasoning"), "effort")
            form = _form(fields)
            return ask(fields, talk, form, services, reasoning=reasoned, sampling=sampling)

    def respond(fields: Fields) -> ServiceCall:
        RESPONSES.check(fields)
        if _LOGPROBS in fields.texts("include"):
            raise InvalidRequest("include", f"{_LOGPROBS} {_IN_CHAT}")
        found, events = asked(fields, SAMPLING), _Events(_echo(fields))
        return found.call(fields, events.whole, events.of, _renamed, events.of_failure)

    def counted(fields: Fields) -> ServiceCall:
        _COUNTED.check(fields)
        head = {"object": "response.input_tokens"}
        found = asked(fields, NO_SAMPLING)
        return count(found, services, lambda counts: {**head, **counts}, _renamed)

    return {
        ("POST", "/v1/responses"): query_endpoint(respond, RESPONSES),
        ("POST", "/v1/responses/input_tokens"): Endpoint(
            f"{VISION_METHODS}CountTokens", counted, fields=_COUNTED
        ),
    }


def _renamed(path: FieldPath) -> FieldPath:
    return renamed(path, _NAMES)


def _instructions(fields: Fields) -> Iterator[Message]:
    text = fields.text("instructions", "")
    if text:
        yield Message("system", text, (), ("instructions",))


def _input(fields: Fields) -> Iterator[Message]:
    """Earlier reasoning is left out. Raises InvalidRequest, UnsupportedImageError."""
    given = fields.values.get("input")
    if isinstance(given, str):
        yield Message("user", given, (), ("input",))
        return
    if given is not None and not isinstance(given, list):
        raise InvalidRequest("input", "must be a string or a list of messages")
    for item in fields.objects("input", MESSAGE):
        kind = item.text("type", "message")
        if kind == "reasoning":
            continue
        if kind == "item_reference":
            raise InvalidRequest(item.path, RESPONSES.refused["conversation"])
        if kind != "message":
            raise InvalidRequest(item.at("type"), f"must be message, got {kind[:50]!r}")
        yield read_message(item, ITEM, message_content)


def _form(fields: Fields) -> Fields:
    """``text.format`` as ``response_format`` of chat completions. Raises InvalidRequest."""
    form = FORMAT.inner(TEXT.inner(fields, "text"), "format")
    kind = form.text("type", "text")
    # The response repeats them.
    form.text("name", ""), form.text("description", ""), form.flag("strict")
    if kind != "json_schema" and form.values.get("schema"):
        raise InvalidRequest(form.at("schema"), "needs the type json_schema")
    schema = {"json_schema": form.values} if kind == "json_schema" else {}
    return Fields({"type": kind, **schema}, ("response_format",))


def metadata_of(fields: Fields) -> dict[str, str]:
    """Raises InvalidRequest."""
    metadata = fields.inner("metadata").values
    if len(metadata) > _MOST_METADATA:
        raise InvalidRequest("metadata", f"has {len(metadata)} keys; the limit is {_MOST_METADATA}")
    for key, value in metadata.items():
        if not isinstance(value, str) or len(key) > _LONGEST_KEY or len(value) > _LONGEST_VALUE:
            raise InvalidRequest(
                ("metadata", key[:_LONGEST_KEY]),
                f"must be a text of at most {_LONGEST_VALUE} characters, its key of {_LONGEST_KEY}",
            )
    return metadata


def _echo(fields: Fields) -> dict[str, Any]:
    """What the request says of its response. Raises InvalidRequest."""
    effort = fields.inner("reasoning").values.get("effort")
    form = fields.inner("text").inner("format").values
    known = {name: form[name] for name in _FORM_FIELDS if name in form}
    return {
        "instructions": fields.values.get("instructions"),
        "max_output_tokens": fields.values.get("max_output_tokens"),
        "metadata": metadata_of(fields),
        "reasoning": {"effort": effort, "summary": None},
        "temperature": fields.values.get("temperature"),
        "text": {"format": {"type": "text", **known}},
        "top_p": fields.values.get("top_p"),
        "background": False,
        "parallel_tool_calls": False,
        "previous_response_id": None,
        "store": False,
        "tool_choice": "none",
        "tools": [],
        "truncation": "disabled",
    }


def _response(
    echo: dict[str, Any], info: common_pb2.RequestInfo, status: str, **others: Any
) -> dict[str, Any]:
    return {
        "id": f"resp_{info.request_id}",
        "object": "response",
        "created_at": int(clock.wall()),
        "model": info.model,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **echo,
        **others,
    }


def _status(answer: pb.Answer) -> str:
    is_cut = answer.finish_reason == common_pb2.FINISH_REASON_LENGTH
    return "incomplete" if is_cut else "completed"


def _usage(response: pb.QueryResponse) -> dict[str, Any]:
    used = response.usage
    return {
        "input_tokens": used.input_tokens,
        "input_tokens_details": {
            "cached_tokens": used.cached_tokens,
            "cache_write_tokens": 0,
            "image_tokens": used.image_tokens,
            "num_crops": num_crops(response.info),
        },
        "output_tokens": used.output_tokens,
        "output_tokens_details": {"reasoning_tokens": used.reasoning_tokens},
        "total_tokens": used.input_tokens + used.output_tokens,
    }


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of item. ``parts``: the field with its parts. ``part_event``, ``text_event``: the names of events.
    ``number``: the field of events with the number of the part. ``extra``: fields of the events with text."""

    prefix: str
    parts: str
    part_event: str
    text_event: str
    number: str
    fields: dict[str, Any]
    part: dict[str, Any]
    extra: dict[str, Any]


_REASONING = _Kind(
    *("rs", "summary", "reasoning_summary_part", "reasoning_summary_text", "summary_index"),
    fields={"type": "reasoning"},
    part={"type": "summary_text"},
    extra={},
)
_MESSAGE = _Kind(
    *("msg", "content", "content_part", "output_text", "content_index"),
    fields={"type": "message", "role": "assistant"},
    part={"type": "output_text", "annotations": [], "logprobs": []},
    extra={"logprobs": []},
)


def _item(
    kind: _Kind, info: common_pb2.RequestInfo, status: str, text: str | None = None
) -> dict[str, Any]:
    """``text``: None before the item has parts."""
    parts = [] if text is None else [{**kind.part, "text": text}]
    return {
        "id": f"{kind.prefix}_{info.request_id}",
        **kind.fields,
        "status": status,
        kind.parts: parts,
    }


class _Events:
    """The response, whole or as the events of a stream. ``echo``: what the request says of it. Owns the numbers of the
    events, and which item is open."""

    def __init__(self, echo: dict[str, Any]) -> None:
        self._echo = echo
        self._number = self._index = 0
        self._info = common_pb2.RequestInfo()
        self._open: _Kind | None = None
        self._pieces: list[str] = []

    def whole(self, response: pb.QueryResponse) -> dict[str, Any]:
        (answer,), info = response.answers, response.info
        status = _status(answer)
        output = [_item(_MESSAGE, info, status, answer.text)]
        if answer.HasField("reasoning"):
            output.insert(0, _item(_REASONING, info, "completed", answer.reasoning.text))
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        parts = {"incomplete_details": cut, "output": output, "usage": _usage(response)}
        return _response(self._echo, info, status, **parts)

    def of(self, message: pb.StreamQueryResponse) -> Iterable[bytes]:
        kind = message.WhichOneof("event")
        if kind == "started":
            self._info = message.started
            begun = _response(self._echo, self._info, "in_progress")
            yield self._event("response.created", response=begun)
            yield self._event("response.in_progress", response=begun)
        elif kind == "reasoning_delta":
            yield from self._text(_REASONING, message.reasoning_delta.text)
        elif kind == "text_delta":
            yield from self._text(_MESSAGE, message.text_delta.text)
        elif kind == "final":
            if self._open is not _MESSAGE:  # The answer is empty.
                yield from self._begin(_MESSAGE)
            (answer,) = message.final.answers
            yield from self._end(_status(answer))
            whole = self.whole(message.final)
            yield self._event(f"response.{whole['status']}", response=whole)

    def of_failure(self, body: bytes) -> bytes:
        """The last event of a stream that fails. ``body``: of the error's response, if it had one."""
        error = orjson.loads(body)["error"]
        codes = {
            "rate_limit_error": "rate_limit_exceeded",
            "invalid_request_error": "invalid_prompt",
        }
        error["code"] = codes.get(error["type"], "server_error")
        failed = _response(self._echo, self._info, "failed", error=error)
        return self._event("response.failed", response=failed)

    def _text(self, kind: _Kind, text: str) -> Iterator[bytes]:
        if self._open is not kind:
            yield from self._begin(kind)
        self._pieces.append(text)
        yield self._of_part(f"{kind.text_event}.delta", delta=text, **kind.extra)

    def _begin(self, kind: _Kind) -> Iterator[bytes]:
        """Opens an item, after the one that is open."""
        if self._open is not None:
            yield from self._end("completed")
            self._index += 1
        self._open = kind
        item = _item(kind, self._info, "in_progress")
        yield self._event("response.output_item.added", output_index=self._index, item=item)
        yield self._of_part(f"{kind.part_event}.added", part={**kind.part, "text": ""})

    def _end(self, status: str) -> Iterator[bytes]:
        """Ends the item that is open."""
        kind, text = self._open, "".join(self._pieces)
        assert kind is not None, "an item has begun"
        self._pieces.clear()
        yield self._of_part(f"{kind.text_event}.done", text=text, **kind.extra)
        yield self._of_part(f"{kind.part_event}.done", part={**kind.part, "text": text})
        item = _item(kind, self._info, status, text)
        yield self._event("response.output_item.done", output_index=self._index, item=item)

    def _of_part(self, name: str, **values: Any) -> bytes:
        assert self._open is not None, "an item has begun"
        place = {"output_index": self._index, self._open.number: 0}
        item_id = f"{self._open.prefix}_{self._info.request_id}"
        return self._event(f"response.{name}", item_id=item_id, **place, **values)

    def _event(self, name: str, **values: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return sent_event({"type": name, "sequence_number": number, **values}, name)
