"""OpenAI's files and batches: /v1/files and /v1/batches, and how a request of a batch is answered."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from email.message import Message
from typing import Any
from urllib.parse import parse_qs

import orjson
from google.protobuf.empty_pb2 import Empty
from google.protobuf.wrappers_pb2 import BytesValue

from kestrel_engine import InvalidRequest

from ...batches.answering import Answer, Work
from ...batches.requests import read_requests
from ...batches.running import BatchRunner
from ...batches.tables import NewBatch
from ...edge.calls.call import Call, Context
from ...edge.calls.current import current
from ...edge.failures.errors import UnsupportedBody
from ...security.identity.principal import Principal
from ..body import BODY_COPIES
from ..context import Scope
from ..edge import Endpoint, Endpoints, ServiceCall
from ..fields import Fields, json_fields
from ..forms import JSON, JsonForm
from .known_fields import known_fields
from .responses import metadata_of

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""What a batch may ask."""
_METHODS = "/kestrel.v1.BatchService/"
_FORM = b"multipart/form-data"
_MOST_PARTS, _LONGEST_NAME, _LONGEST_LIST = 8, 256, 100
_MOST_FILES = 1000
"""Limit on the files of a response: the results of batches are files too."""
_LONGEST_HEADER = 1024
"""Limit on the bytes of a header with parameters: Python's email package takes 1.4 s of the event loop for 30 kB of
semicolons between quotes, and 2 ms for this."""
BATCH = known_fields("batch")
_LINES = JsonForm(
    stream_type=b"application/jsonl", error=lambda body: body, error_event=lambda body: b""
)
_Work = Callable[[Principal, Scope], Awaitable[Any]]


def endpoints(runner: BatchRunner) -> Endpoints:
    store = runner.store

    def endpoint(name: str, work: _Work, types: tuple[bytes, ...] | None = None) -> Endpoint:
        """``types``: those of a body that says nothing; None without a body."""

        def read(scope: Scope, body: bytes | bytearray) -> ServiceCall:
            return _call(lambda message: work(current.get().principal, scope))

        return Endpoint(
            f"{_METHODS}{name}", read, is_raw=True, takes_body=types is not None, types=types or ()
        )

    def upload(scope: Scope, body: bytes | bytearray) -> ServiceCall:
        name, content = _uploaded(scope, body)

        async def add(message: Any) -> Any:
            return _file(await store.add_file(current.get().principal, name, message.value))

        return _call(add, BytesValue(value=content))

    def create(fields: Fields) -> ServiceCall:
        asked = _new_batch(fields)

        async def add(message: Any) -> Any:
            made = await store.add_batch(current.get().principal, asked, read_requests)
            runner.wake()
            return _batch(made)

        return _call(add)

    def content(scope: Scope, body: bytes | bytearray) -> ServiceCall:
        async def behaviour(message: Any, context: Context) -> None:
            async for piece in store.content(current.get().principal, _id(scope)):
                await context.write(piece)

        return ServiceCall(Empty(), behaviour, dict, lambda piece: (piece,))

    async def files(owner: Principal, scope: Scope) -> Any:
        asked = _query(scope, "after", "limit", "order", "purpose")
        after, limit = _page(asked, _MOST_FILES, _MOST_FILES)
        if asked.get("order", "desc") != "desc":
            raise InvalidRequest("order", "must be desc: the newest file is the first one")
        found = await store.files(owner, after, limit + 1, asked.get("purpose", ""))
        return _list([_file(each) for each in found[:limit]], has_more=len(found) > limit)

    async def file(owner: Principal, scope: Scope) -> Any:
        return _file(await store.file(owner, _id(scope)))

    async def delete(owner: Principal, scope: Scope) -> Any:
        await store.delete_file(owner, _id(scope))
        return {"id": _id(scope), "object": "file", "deleted": True}

    async def batches(owner: Principal, scope: Scope) -> Any:
        after, limit = _page(_query(scope, "after", "limit"), 20, _LONGEST_LIST)
        found = await store.batches(owner, after, limit + 1)
        return _list([_batch(each) for each in found[:limit]], has_more=len(found) > limit)

    async def batch(owner: Principal, scope: Scope) -> Any:
        return _batch(await store.batch(owner, _id(scope)))

    async def cancel(owner: Principal, scope: Scope) -> Any:
        return _batch(await store.cancel(owner, _id(scope)))

    return {
        ("POST", "/v1/files"): Endpoint(
            f"{_METHODS}AddFile", upload, is_raw=True, types=(_FORM,), copies=2
        ),
        ("GET", "/v1/files"): endpoint("ListFiles", files),
        ("GET", "/v1/files/{id}"): endpoint("GetFile", file),
        ("DELETE", "/v1/files/{id}"): endpoint("DeleteFile", delete),
        ("GET", "/v1/files/{id}/content"): Endpoint(
            f"{_METHODS}GetContent", content, is_raw=True, takes_body=False, form=_LINES
        ),
        ("POST", "/v1/batches"): Endpoint(f"{_METHODS}CreateBatch", create),
        ("GET", "/v1/batches"): endpoint("ListBatches", batches),
        ("GET", "/v1/batches/{id}"): endpoint("GetBatch", batch),
        ("POST", "/v1/batches/{id}/cancel"): endpoint("CancelBatch", cancel, (JSON, b"")),
    }


def _call(work: Callable[[Any], Awaitable[Any]], message: Any = None) -> ServiceCall:
    given = Empty() if message is None else message
    return ServiceCall(given, lambda request, _: work(request), lambda found: found)


def _id(scope: Scope) -> str:
    return str(scope["path_params"]["id"])


def _list(found: list[dict[str, Any]], *, has_more: bool = False) -> dict[str, Any]:
    ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]} if found else {}
    return {"object": "list", "data": found, "has_more": has_more, **ends}


def _query(scope: Scope, *known: str) -> dict[str, str]:
    """The fields of a query, of which ``known`` are all that are taken. Raises InvalidRequest."""
    try:
        query = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=16)
    except ValueError:
        raise InvalidRequest("", "the query has more than 16 fields") from None
    for name in query:
        if name not in known:
            raise InvalidRequest(name[:50], f"is unknown; known: {', '.join(known)}")
    return {name: values[0] for name, values in query.items()}


def _page(query: Mapping[str, str], usual: int, most: int) -> tuple[str, int]:
    """``after`` and ``limit`` of a query. Raises InvalidRequest."""
    limit = query.get("limit", str(usual))
    if not (re.fullmatch("[0-9]{1,9}", limit) and 1 <= int(limit) <= most):
        raise InvalidRequest("limit", f"must be from 1 to {most}, got {limit[:50]!r}")
    return query.get("after", ""), int(limit)


def _file(stored: Mapping[str, Any]) -> dict[str, Any]:
    names = ("id", "bytes", "created_at", "expires_at", "filename", "purpose")
    return {**{name: stored[name] for name in names}, "object": "file", "status": "processed"}


def _batch(stored: Mapping[str, Any]) -> dict[str, Any]:
    status, errors = stored["status"], stored["errors"]
    kept = ("id", "endpoint", "input_file_id", "completion_window", "status", "output_file_id")
    names = ("completed_at", "failed_at", "expired_at", "cancelled_at")
    return {
        **{name: stored[name] for name in (*kept, "error_file_id", "created_at", "expires_at")},
        **dict.fromkeys(names),
        "object": "batch",
        "off_peak": bool(stored["off_peak"]),
        "in_progress_at": None if status == "failed" else stored["created_at"],
        f"{status}_at": stored["ended_at"] or stored["created_at"],
        "errors": errors and {"object": "list", "data": orjson.loads(errors)},
        "request_counts": {
            "total": stored["total"],
            "completed": stored["completed"],
            "failed": stored["failed"],
        },
        "metadata": orjson.loads(stored["metadata"]),
    }


def _new_batch(fields: Fields) -> NewBatch:
    BATCH.check(fields)
    endpoint, window = fields.text("endpoint"), fields.text("completion_window", "24h")
    if endpoint not in ENDPOINTS:
        raise InvalidRequest("endpoint", f"must be one of {', '.join(ENDPOINTS)}")
    if window != "24h":
        raise InvalidRequest("completion_window", f"must be 24h, got {window[:50]!r}")
    return NewBatch(
        *(endpoint, fields.text("input_file_id"), window, metadata_of(fields)),
        fields.flag("off_peak"),
    )


def _uploaded(scope: Scope, body: bytes | bytearray) -> tuple[str, bytes]:
    """The name and the content of the file in a form (RFC 7578). Raises InvalidRequest, UnsupportedBody."""
    headers = dict(scope["headers"])
    if b"origin" in headers:  # A page may send a form to any server without asking.
        raise UnsupportedBody("web pages may not upload files", ())
    boundary = _parameters(headers[b"content-type"], "content-type").get("boundary", "")
    if not (1 <= len(boundary) <= 70 and boundary.isascii()):
        raise InvalidRequest("", "the header content-type must have a boundary")
    between = b"\r\n--" + boundary.encode()
    found: dict[str, tuple[str, bytes]] = {}
    for index, part in enumerate((b"\r\n" + body).split(between, _MOST_PARTS + 2)[1:]):
        if part.startswith(b"--"):
            break
        head, _, content = part.partition(b"\r\n\r\n")
        if index == _MOST_PARTS or len(head) > 4096:
            raise InvalidRequest("", f"the form has more than {_MOST_PARTS} parts, or a long head")
        for line in head.split(b"\r\n"):
            key, _, value = line.partition(b":")
            if key.strip().lower() == b"content-disposition":
                named = _parameters(value, "content-disposition")
                field = named.get("name", "")
                if field in found:
                    raise InvalidRequest(field, "occurs twice in the form")
                found[field] = (named.get("filename", ""), bytes(content))
    else:
        raise InvalidRequest("", "the form has no end: its last boundary is missing")
    if found.get("purpose", ("", b""))[1] != b"batch":
        raise InvalidRequest("purpose", "must be batch")
    name, content = found.get("file", ("", b""))
    if not content:
        raise InvalidRequest("file", "is required, and must not be empty")
    shown = name[:_LONGEST_NAME].encode(errors="replace").decode()
    return shown or "file.jsonl", content


def _parameters(value: bytes, name: str) -> dict[str, str]:
    """The parameters of a header, such as the boundary of a form, in UTF-8 or as RFC 2231 has them. Raises
    InvalidRequest."""
    if len(value) > _LONGEST_HEADER:
        raise InvalidRequest("", f"the header {name} has more than {_LONGEST_HEADER} bytes")
    message = Message()
    message[name] = value.decode(errors="replace").replace("\r", " ").replace("\n", " ")
    pairs: list[tuple[str, Any]] = message.get_params(header=name) or []
    return {key: text if isinstance(text, str) else _utf8(text[2]) for key, text in pairs}


def _utf8(encoded: str) -> str:
    """A value of RFC 2231, whose bytes ``email`` gives as Latin-1. Clients use UTF-8, whatever charset they name."""
    return encoded.encode("latin-1", "replace").decode(errors="replace")


class _Lines:
    """The requests of batches to a path of the port, and their answers: a Form."""

    copies, caps_max_tokens = BODY_COPIES, True

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def method(self, body: bytes) -> str:
        return self._endpoint.method

    def read(self, body: bytes) -> Work:
        service_call = self._endpoint.read(json_fields(body))
        if service_call.events is not None:
            raise InvalidRequest("stream", "must be false in a batch")

        async def respond(context: Context) -> bytes:
            response = await service_call.behaviour(service_call.message, context)
            return orjson.dumps(service_call.answer(response))

        return Work(service_call.message, respond, service_call.rename)

    def answered(self, body: bytes, call: Call) -> Answer:
        return Answer(True, _response(200, call, body))

    def refused(self, error: Exception, call: Call, work: Work | None) -> Answer:
        rename = (lambda path: path) if work is None else work.form
        response = self._endpoint.form.error_response(error, call, rename)
        return Answer(False, _response(response.status, call, response.whole.data))


def forms_of(known: Endpoints) -> dict[str, _Lines]:
    """By endpoint. ``known``: the endpoints of the port."""
    return {path: _Lines(known["POST", path]) for path in ENDPOINTS}


def _response(status: int, call: Call, body: bytes) -> bytes:
    values = {"status_code": status, "request_id": call.request_id, "body": orjson.Fragment(body)}
    return orjson.dumps(values)
