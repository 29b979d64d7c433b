"""Counts of tokens before a request: Anthropic's /v1/messages/count_tokens.

It counts the question that its conversation is, as /v1/chat/completions would ask it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import FieldPath, InvalidRequest

from ...edge.messages.fields import located
from ...service_names import VISION_METHODS
from ...services.vision import VisionService
from ..edge import Endpoint, ServiceCall
from ..fields import Fields
from ..known_fields import KnownFields
from .conversation import MESSAGE, Message, MessageImage, conversation
from .known_fields import CHAT_MESSAGE, NO_TOOLS
from .models import set_model

_REMEDY = "send images as parts of a message, and name a fine-tune in model, as MODEL/ADAPTER"
_ANTHROPIC = KnownFields(
    "count_tokens",
    frozenset({"model", "messages", "system", "thinking"}),
    refused={"tools": NO_TOOLS, "mcp_servers": NO_TOOLS, "input": "use messages"},
    ignored=frozenset({"tool_choice", "cache_control", "context_management", "output_config"}),
    remedy=_REMEDY,
)
_PARTS = {
    "text": KnownFields(
        "parts of messages", frozenset({"type", "text"}), ignored=frozenset({"cache_control"})
    ),
    "image": KnownFields(
        "parts of messages", frozenset({"type", "source"}), ignored=frozenset({"cache_control"})
    ),
}
"""Of Anthropic's messages, by type."""
_SOURCES = {"base64": "data", "url": "url"}
"""Where an image is, by the type of its source."""
_THINKING = {"enabled": True, "adaptive": True, "disabled": False}


def endpoints(
    vision: VisionService, names: Callable[[], Sequence[str]]
) -> dict[tuple[str, str], Endpoint]:
    """By verb and path. ``names`` gives the served models' names, the default first."""

    def anthropic(fields: Fields) -> ServiceCall:
        _ANTHROPIC.check(fields)
        thinking = fields.inner("thinking")
        kind = thinking.text("type", "disabled")
        if kind not in _THINKING:
            raise InvalidRequest(
                thinking.at("type"), f"must be one of {', '.join(_THINKING)}, got {kind[:50]!r}"
            )
        messages = [*_system(fields, "system"), *_messages(fields)]
        return _counted(fields, messages, "messages", _THINKING[kind], lambda counted: counted)

    def _counted(
        fields: Fields,
        messages: list[Message],
        key: str,
        reasoning: bool,
        answer: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> ServiceCall:
        """``key``: of the conversation."""
        with located(lambda path: (key,) if path == ("messages",) else path):
            asked = conversation(messages).request(reasoning=reasoning, max_crops=None)
        request = pb.CountTokensRequest(images=asked.images, tasks=[pb.Task(query=asked.query)])
        if fields.values.get("model") is not None:
            set_model(request.options, fields.text("model"), names())

        def rename(path: FieldPath) -> FieldPath:
            return ("model",) if path[:1] == ("options",) else (key,)

        return ServiceCall(
            request,
            vision.CountTokens,
            lambda response: answer({"input_tokens": response.input_tokens}),
            rename=rename,
        )

    method = f"{VISION_METHODS}CountTokens"
    return {
        ("POST", "/v1/messages/count_tokens"): Endpoint(method, anthropic),
    }


def _system(fields: Fields, key: str) -> Iterator[Message]:
    """The instructions before the conversation, if there are any. Raises InvalidRequest."""
    text, images = _anthropic_content(fields, key)
    if images:
        raise InvalidRequest(key, "only user messages may hold images")
    if text:
        yield Message("system", text, (), (key,))


def _messages(fields: Fields) -> Iterator[Message]:
    """Anthropic's messages. Raises InvalidRequest, UnsupportedImageError."""
    for message in fields.objects("messages", MESSAGE):
        CHAT_MESSAGE.check(message)
        text, images = _anthropic_content(message, "content")
        yield Message(str(message.values.get("role")), text, images, message.path)


def _anthropic_content(fields: Fields, key: str) -> tuple[str, list[MessageImage]]:
    """A text, or a list of texts and images. Raises InvalidRequest, UnsupportedImageError."""
    given = fields.values.get(key)
    if given is None or isinstance(given, str):
        return given or "", []
    texts: list[str] = []
    images: list[MessageImage] = []
    for part in fields.objects(key, "an object with a type"):
        kind = part.text("type")
        if kind not in _PARTS:
            raise InvalidRequest(part.at("type"), f"must be text or image, got {kind[:50]!r}")
        _PARTS[kind].check(part)
        if kind == "text":
            texts.append(part.text("text"))
            continue
        source = part.inner("source")
        where = source.text("type")
        if where not in _SOURCES:
            raise InvalidRequest(source.at("type"), f"must be base64 or url, got {where[:50]!r}")
        encoded = source.image(source.text(_SOURCES[where]), _SOURCES[where])
        images.append(MessageImage(encoded, None))
    return "\n".join(texts), images
