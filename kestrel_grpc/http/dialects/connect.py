"""The Connect protocol: the methods of kestrel.v1 for curl, browsers and the clients of connectrpc.com.

The protocol (connectrpc.com, "Connect Protocol Reference"): a unary method is a plain POST of the message, as JSON or
in binary form, and its errors have an HTTP status and JSON. A stream has an envelope for each message: a byte of flags,
the length in four bytes, and the content. The last envelope holds the error, if there is one, as JSON. A message may
be compressed with gzip.

GET is for methods without side effects, as the protos mark them. None of them computes: a page of any site can make a
browser send a GET. StreamFrames is left out, because streams in both directions need HTTP/2. So is AdminService.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import parse_qsl

import orjson
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor_pb2 import MethodOptions
from google.protobuf.message import Message

from kestrel_engine import InvalidRequest

from ...edge.calls.call import Call
from ...edge.failures.errors import UnsupportedBody
from ...edge.failures.statuses import complaint, pushback
from ...edge.messages.incoming import EOF, Incoming, Reading, inflate, is_compressed
from ...security.admission.admission import MessageTooLarge
from ..body import BODY_COPIES, Arriving, check_compression, largest_body
from ..context import Receive, Scope
from ..edge import Endpoint, Endpoints, ServiceCall
from ..forms import JSON, ByteResponse, ErrorResponse
from ..refusals import Rename, headers_of, status_of_code
from ..services import HttpServices
from .envelopes import HEAD_BYTES, envelope, parse_proto, take_head
from .proto_json import parse_json, to_json

_COMPRESSED, _END = 1, 2
"""Flags of an envelope."""
_STREAM_ENCODING = b"connect-content-encoding"
_TIMEOUT = re.compile(rb"\d{1,10}")
_INLINE_BYTES = 4096
"""A thread reads a larger body: JSON is read in Python, and a compressed body may become 32 times larger."""
_PARAMETERS = frozenset({"connect", "encoding", "message", "base64", "compression"})
"""Of a GET. The protocol lets others stand beside them."""
_QUERY_BYTES = 64 * 1024
"""Limit on the message of a GET, decompressed. A request's target has 8,000 bytes at most."""
_STANDARD = bytes.maketrans(b"-_", b"+/")
"""The letters of base64's alphabet for URLs, as those of the standard one."""

_Data = bytes | bytearray


@dataclass(frozen=True, slots=True)
class _Codec:
    """A form of messages. ``parse`` fills a message."""

    name: str
    parse: Callable[[_Data, Any], None]
    write: Callable[[Message], bytes]

    @property
    def unary_type(self) -> bytes:
        return b"application/" + self.name.encode()

    @property
    def stream_type(self) -> bytes:
        return b"application/connect+" + self.name.encode()

    def read(self, message: Any, data: _Data, largest: int, is_gzip: bool) -> Any:
        """Fills ``message``. Raises InvalidRequest, MessageTooLarge."""
        if is_gzip and len(data):
            data = inflate(data, largest_body(largest))
        if len(data) > largest_body(largest):
            raise MessageTooLarge("", f"the decompressed message is larger than {largest} bytes")
        self.parse(data, message)
        if (size := message.ByteSize()) > largest:
            raise MessageTooLarge.of(size, largest)
        return message

    def whole(self, response: Message) -> ByteResponse:
        return ByteResponse(self.write(response), self.unary_type)

    def enveloped(self, response: Message) -> Iterable[bytes]:
        yield envelope(0, self.write(response))


_PROTO = _Codec("proto", parse_proto, lambda message: message.SerializeToString())
_JSON = _Codec("json", parse_json, to_json)
_CODECS = {codec.name: codec for codec in (_PROTO, _JSON)}


def endpoints(services: HttpServices, largest: int) -> Iterable[Endpoints]:
    """The endpoints of each codec. ``largest``: limit on the bytes of a message."""
    for codec in _CODECS.values():
        made: Endpoints = {}
        for path, method, behaviour in services.methods():
            if not method.client_streaming:
                made["POST", path] = _posted(path, method, behaviour, codec, largest)
            elif not method.server_streaming:
                made["POST", path] = _uploaded(path, method, behaviour, codec)
            level = method.GetOptions().idempotency_level
            if codec is _JSON and level == MethodOptions.NO_SIDE_EFFECTS:
                made["GET", path] = _gotten(path, method, behaviour, largest)
        yield made


def _posted(path: str, method: Any, behaviour: Any, codec: _Codec, largest: int) -> Endpoint:
    kind = message_factory.GetMessageClass(method.input_type)
    streams = method.server_streaming
    encoding = _STREAM_ENCODING if streams else b"content-encoding"
    content_type = codec.stream_type if streams else codec.unary_type

    def read(scope: Scope, body: bytearray) -> ServiceCall:
        is_gzip = _is_gzip(_checked(scope), encoding)
        if streams:
            is_gzip = _is_compressed(take_head(body, "envelope"), is_gzip)
        message = codec.read(kind(), body, largest, is_gzip)
        return ServiceCall(message, behaviour, codec.whole, codec.enveloped if streams else None)

    form = _Form(content_type, streams)
    return _endpoint(path, read, form, types=(content_type,), encoding=encoding)


def _uploaded(path: str, method: Any, behaviour: Any, codec: _Codec) -> Endpoint:
    kind = message_factory.GetMessageClass(method.input_type)
    form = _Form(codec.stream_type, streams=True)

    def read(scope: Scope, arriving: Arriving) -> ServiceCall:
        messages = _Uploaded(arriving, kind, codec, _is_gzip(_checked(scope), _STREAM_ENCODING))

        def whole(response: Message) -> ByteResponse:
            parts = (*codec.enveloped(response), form.ending)
            return ByteResponse(b"".join(parts), codec.stream_type)

        return ServiceCall(messages.all(), behaviour, whole)

    types, encoding = (codec.stream_type,), _STREAM_ENCODING
    return _endpoint(path, read, form, pulls=True, types=types, encoding=encoding)


class _Uploaded(Incoming):
    """The messages of a method that takes a stream of them."""

    def __init__(self, body: Arriving, kind: Any, codec: _Codec, may_be_gzip: bool) -> None:
        envelopes = _Envelopes(body.receive, body.limits.largest, may_be_gzip)
        reading = Reading(kind, body.limits, body.pulls, BODY_COPIES)
        super().__init__(envelopes, reading, body.hold, body.use)
        self._codec = codec

    async def _message(self, data: bytes) -> Any:
        data, kind = await self._plain(data), cast(type[Message], self._reading.decode)
        parts = (kind(), data, self._reading.limits.largest, False)
        if len(data) <= _INLINE_BYTES:
            return self._codec.read(*parts)
        return await asyncio.to_thread(self._codec.read, *parts)


class _Envelopes:
    """What the envelopes of a body hold, one after the other, while the body arrives."""

    def __init__(self, receive: Receive, largest: int, may_be_gzip: bool) -> None:
        self._receive, self._largest, self._may_be_gzip = receive, largest, may_be_gzip
        self._arrived = bytearray()
        self._has_ended = False

    async def read(self) -> Any:
        """The next content; EOF after the last one. Raises InvalidRequest, MessageTooLarge, CancelledError."""
        # What has arrived may hold thousands of envelopes. Other calls run in between.
        await asyncio.sleep(0)
        await self._wait_for(HEAD_BYTES)
        if not self._arrived:
            return EOF
        is_gzip = _is_compressed(self._arrived[0], self._may_be_gzip)
        length = int.from_bytes(self._arrived[1:HEAD_BYTES])
        if length > self._largest:
            raise MessageTooLarge.of(length, self._largest)
        await self._wait_for(end := HEAD_BYTES + length)
        if len(self._arrived) < end:
            raise InvalidRequest("", "the body ends within an envelope")
        content = bytes(self._arrived[HEAD_BYTES:end])
        del self._arrived[:end]
        if is_gzip and content and not is_compressed(content):
            raise InvalidRequest("", "the compressed message cannot be decompressed")
        return content

    async def _wait_for(self, num_bytes: int) -> None:
        """Waits for so many bytes, or for the end of the body."""
        while len(self._arrived) < num_bytes and not self._has_ended:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            self._arrived += message.get("body", b"")
            self._has_ended = not message.get("more_body")


def _gotten(path: str, method: Any, behaviour: Any, largest: int) -> Endpoint:
    kind = message_factory.GetMessageClass(method.input_type)

    def read(scope: Scope, body: bytearray) -> ServiceCall:
        _checked(scope)
        codec, data, is_gzip = _queried(scope["query_string"])
        message = codec.read(kind(), data, min(largest, _QUERY_BYTES), is_gzip)
        return ServiceCall(message, behaviour, codec.whole)

    return _endpoint(path, read, _Form(JSON, streams=False), takes_body=False)


def _endpoint(path: str, read: Callable[..., ServiceCall], form: _Form, **others: Any) -> Endpoint:
    """``others``: fields of Endpoint."""
    shared: dict[str, Any] = {
        "is_raw": True,
        "inline_bytes": _INLINE_BYTES,
        "timeout_s": _timeout_s,
    }
    return Endpoint(path, read, form=form, **shared, **others)


def _checked(scope: Scope) -> dict[bytes, bytes]:
    """The headers of a request. Raises InvalidRequest."""
    headers = dict(scope["headers"])
    if headers.get(b"connect-protocol-version", b"1") != b"1":
        raise InvalidRequest("", "the header connect-protocol-version must be 1")
    if b"connect-timeout-ms" in headers and _timeout_s(scope) is None:
        raise InvalidRequest("", "the header connect-timeout-ms must be 1 to 10 digits")
    return headers


def _is_gzip(headers: dict[bytes, bytes], encoding: bytes) -> bool:
    """Whether the header ``encoding``, which was checked, names gzip."""
    return headers.get(encoding, b"identity").lower() != b"identity"


def _queried(query: bytes) -> tuple[_Codec, bytes, bool]:
    """Codec and message of a GET, and whether it is compressed. Raises InvalidRequest, NotServed, UnsupportedBody."""
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True, encoding="latin-1")
    known = [(name, value) for name, value in pairs if name in _PARAMETERS]
    values = dict(known)
    if len(values) < len(known):
        raise InvalidRequest("", "the query names a parameter twice")
    if values.get("connect") != "v1":
        raise InvalidRequest("", "the query must have connect=v1")
    for name in ("encoding", "message"):
        if name not in values:
            raise InvalidRequest("", f"the query must have {name}")
    if (codec := _CODECS.get(values["encoding"])) is None:
        types = [each.unary_type for each in _CODECS.values()]
        raise UnsupportedBody(f"encoding must be {' or '.join(_CODECS)}", types)
    data = values["message"].encode("latin-1")
    if values.get("base64") == "1":
        try:
            padding = b"=" * (-len(data) % 4)
            data = binascii.a2b_base64(data.translate(_STANDARD) + padding, strict_mode=True)
        except binascii.Error:
            raise InvalidRequest("", "message is not base64 in the alphabet for URLs") from None
    compression = values.get("compression", "identity").lower()
    if compression != "identity":
        check_compression(compression.encode("latin-1"))
    return codec, data, compression != "identity"


def _is_compressed(flags: int, may_be_gzip: bool) -> bool:
    """Whether the flags of an envelope say so. Raises InvalidRequest."""
    if flags & ~_COMPRESSED:
        raise InvalidRequest(
            "", f"an envelope of a request must have the flags 0 or 1, got {flags}"
        )
    if flags and not may_be_gzip:
        raise InvalidRequest(
            "", "a message is compressed, but the header connect-content-encoding is missing"
        )
    return bool(flags)


@dataclass(frozen=True, slots=True)
class _Form:
    """Errors as JSON: the whole response of a unary method, or the last envelope of a stream."""

    stream_type: bytes
    streams: bool

    @property
    def ending(self) -> bytes:
        return envelope(_END, b"{}")

    def error_response(self, error: Exception, call: Call, rename: Rename) -> ErrorResponse:
        described = complaint(error, call.request_id)
        error_body = {
            "code": described.code.name.lower().replace("cancelled", "canceled"),
            "message": described.message,
            "details": [_detail(each) for each in described.details],
        }
        trailers = pushback(error)
        status = status_of_code(described.code)
        if isinstance(error, UnsupportedBody):
            status = 415
        elif self.streams:
            end = {"error": error_body, "metadata": {key: [value] for key, value in trailers}}
            last = envelope(_END, orjson.dumps(end))
            return ErrorResponse(200, ByteResponse(last, self.stream_type), last)
        prefixed = ((f"trailer-{key}".encode(), value.encode()) for key, value in trailers)
        whole = ByteResponse(orjson.dumps(error_body), JSON, (*headers_of(error), *prefixed))
        return ErrorResponse(status, whole, b"")


def _detail(detail: Message) -> dict[str, Any]:
    value = base64.b64encode(detail.SerializeToString()).rstrip(b"=").decode()
    shown = json_format.MessageToDict(detail)
    return {"type": detail.DESCRIPTOR.full_name, "value": value, "debug": shown}


def _timeout_s(scope: Scope) -> float | None:
    """The deadline of a call; None if it has none, or an invalid one."""
    given = dict(scope["headers"]).get(b"connect-timeout-ms")
    return None if given is None or not _TIMEOUT.fullmatch(given) else int(given) / 1e3
