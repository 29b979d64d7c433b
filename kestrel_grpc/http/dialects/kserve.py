"""KServe's Open Inference Protocol by HTTP (/v2), with the binary tensor extension.

A request becomes a message of ``inference`` and is answered by the service that answers it by gRPC (kserve/service.py).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import orjson

from kestrel_client._pb.inference import grpc_service_pb2 as pb
from kestrel_engine import InvalidRequest

from ...edge.failures.errors import ModelNotReady
from ...kserve.model import OUTPUT
from ...kserve.tensors import BYTES, CONTENT_TYPE, FORMATS, raw_bytes
from ...security.admission.message_room import ADAPTED_COPIES
from ...service_names import KSERVE_METHODS
from ..context import Scope
from ..edge import Endpoint, Endpoints, ServiceCall
from ..fields import Fields, json_fields
from ..forms import JSON, ByteResponse, JsonForm
from ..services import HttpServices

_HEADER_LENGTH = b"inference-header-content-length"
"""The header with the length of the JSON before binary tensors."""
_TYPES = (JSON, b"application/octet-stream", b"")
"""Triton's clients name no type."""
_FORM = JsonForm(
    stream_type=b"application/json",
    error=lambda body: {"error": body["error"]["message"]},
    error_event=lambda body: orjson.dumps({"error": body["error"]["message"]}),
)
_MODEL = "/v2/models/{model}"
_VERSION = f"{_MODEL}/versions/{{version}}"
_UNSERVED = (
    *(
        ("POST", f"/v2/repository/models/{{model}}/{verb}", f"RepositoryModel{verb.title()}")
        for verb in ("load", "unload")
    ),
    *(
        (verb, path, "TraceSetting")
        for verb in ("GET", "POST")
        for path in ("/v2/trace/setting", f"{_MODEL}/trace/setting")
    ),
    *((verb, "/v2/logging", "LogSettings") for verb in ("GET", "POST")),
    *(
        (
            verb,
            f"/v2/{kind.lower()}sharedmemory{region}/{what}",
            f"{kind}SharedMemory{what.title()}",
        )
        for kind in ("System", "Cuda")
        for region in ("", "/region/{region}")
        for verb, what in (("GET", "status"), ("POST", "register"), ("POST", "unregister"))
    ),
)
"""Verb, path and method of the requests that the service refuses with a reason."""
_MOST_SIDE = 2**63 - 1
_MOST_DEPTH = 8


def endpoints(services: HttpServices) -> Endpoints:
    service = services.inference

    def get(method: str, answer: Callable[[Any], Any] = plain) -> Endpoint:
        kind = getattr(pb, f"{method}Request")
        is_named = "version" in kind.DESCRIPTOR.fields_by_name

        def read(scope: Scope, body: bytes | bytearray) -> ServiceCall:
            path = scope["path_params"]
            named = {"name": path.get("model"), "version": path.get("version")} if is_named else {}
            return ServiceCall(kind(**named), getattr(service, method), answer)

        return Endpoint(
            f"{KSERVE_METHODS}{method}", read, takes_body=False, form=_FORM, is_raw=True
        )

    def infer(scope: Scope, body: bytes | bytearray) -> ServiceCall:
        request, is_binary = _request(scope, body)
        return ServiceCall(request, service.ModelInfer, _binary if is_binary else _as_json)

    made = {
        ("GET", "/v2"): get("ServerMetadata"),
        ("GET", "/v2/health/live"): get("ServerLive"),
        ("GET", "/v2/health/ready"): get("ServerReady", _ready),
        ("GET", "/v2/models/stats"): get("ModelStatistics"),
        ("POST", "/v2/repository/index"): get(
            "RepositoryIndex", lambda found: plain(found)["models"]
        ),
    }
    for path in (_MODEL, _VERSION):
        made |= {
            ("GET", path): get("ModelMetadata"),
            ("GET", f"{path}/ready"): get("ModelReady", _ready),
            ("GET", f"{path}/config"): get("ModelConfig", lambda found: plain(found.config)),
            ("GET", f"{path}/stats"): get("ModelStatistics"),
            ("POST", f"{path}/infer"): Endpoint(
                f"{KSERVE_METHODS}ModelInfer",
                infer,
                form=_FORM,
                copies=ADAPTED_COPIES,
                types=_TYPES,
                is_raw=True,
            ),
        }
    refused = {(verb, path): get(method) for verb, path, method in _UNSERVED}
    return made | {key: replace(each, is_served=False) for key, each in refused.items()}


def plain(message: Any) -> dict[str, Any]:
    """Returns a message as values for JSON. 64-bit integers are numbers, as clients expect."""
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            values[field.name] = {key: plain(each) for key, each in value.items()}
        elif field.is_repeated:
            values[field.name] = [_value(field, each) for each in value]
        elif field.message_type is None or message.HasField(field.name):
            values[field.name] = _value(field, value)
    return values


def _value(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return plain(value)
    return value if field.enum_type is None else field.enum_type.values_by_number[value].name


def _ready(response: Any) -> dict[str, Any]:
    if not response.ready:
        raise ModelNotReady("the model is not ready")
    return plain(response)


def _request(scope: Scope, body: bytes | bytearray) -> tuple[pb.ModelInferRequest, bool]:
    """Returns the request, whose binary tensors follow the JSON in its body, and whether the client requests its output
    in binary form. Raises InvalidRequest."""
    headers = dict(scope["headers"])
    length = len(body)
    if _HEADER_LENGTH in headers:
        text = headers[_HEADER_LENGTH]
        if not text.isdigit() or len(text) > 12 or int(text) > length:
            shown = text[:20].decode("latin-1")
            raise InvalidRequest(
                "", f"Inference-Header-Content-Length must be in [0, {length}], got {shown!r}"
            )
        length = int(text)
    with memoryview(body) as view:
        fields = json_fields(bytes(view[:length]))
        rest = bytes(view[length:])
    path = scope["path_params"]
    request = pb.ModelInferRequest(
        model_name=path["model"], model_version=path.get("version", ""), id=fields.text("id", "")
    )
    at = 0
    for given in fields.objects("inputs"):
        name = given.text("name")
        tensor = request.inputs.add(
            name=name, datatype=given.text("datatype"), shape=_shape(given, name)
        )
        parameters = given.inner("parameters")
        if "shared_memory_region" in parameters.values:
            tensor.parameters["shared_memory_region"].bool_param = True  # The service refuses it.
        if form := parameters.text(CONTENT_TYPE, ""):
            tensor.parameters[CONTENT_TYPE].string_param = form
        size = parameters.whole("binary_data_size")
        if size is None:
            request.raw_input_contents.append(_packed(name, tensor.datatype, given))
            continue
        if not 0 <= size <= len(rest) - at:
            raise InvalidRequest(
                name, f"has binary_data_size {size}, but {len(rest) - at} bytes follow"
            )
        request.raw_input_contents.append(rest[at : at + size])
        at += size
    if at != len(rest):
        raise InvalidRequest("", f"{len(rest) - at} bytes follow the last binary tensor")
    _parameters(request, fields.inner("parameters"))
    return request, _wants_binary(request, fields)


def _shape(given: Fields, name: str) -> list[int]:
    shape = [_whole(side) for side in given.items("shape")]
    for side in shape:
        if not isinstance(side, int) or isinstance(side, bool) or not 0 <= side <= _MOST_SIDE:
            raise InvalidRequest(name, "shape must be a list of whole numbers of at least 0")
    return shape


def _packed(name: str, datatype: str, given: Fields) -> bytes:
    """Returns the elements in ``data`` in raw form."""
    elements = list(_flat(given.items("data"), name, _MOST_DEPTH))
    if datatype == BYTES:
        if not all(isinstance(each, str) for each in elements):
            raise InvalidRequest(name, "data must be strings")
        return raw_bytes([each.encode() for each in elements])
    if datatype not in FORMATS:
        return b""  # The service refuses the datatype.
    if not datatype.startswith("FP"):
        elements = [_whole(each) for each in elements]
    try:
        return struct.pack(f"<{len(elements)}{FORMATS[datatype]}", *elements)
    except (struct.error, OverflowError):
        raise InvalidRequest(name, f"data must be numbers that {datatype} can hold") from None


def _whole(value: Any) -> Any:
    """5 for 5.0: JSON has one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _flat(items: Iterable[Any], name: str, depth: int) -> Iterator[Any]:
    for item in items:
        if not isinstance(item, list):
            yield item
        elif depth:
            yield from _flat(item, name, depth - 1)
        else:
            raise InvalidRequest(name, f"data must have at most {_MOST_DEPTH} dimensions")


def _parameters(request: pb.ModelInferRequest, parameters: Fields) -> None:
    for name, value in parameters.values.items():
        if isinstance(value, bool):
            request.parameters[name].bool_param = value
        elif isinstance(value, int) and abs(value) <= _MOST_SIDE:
            request.parameters[name].int64_param = value
        elif isinstance(value, float):
            request.parameters[name].double_param = value
        elif isinstance(value, str):
            request.parameters[name].string_param = value
        else:
            raise InvalidRequest(("parameters", name), "must be a string, a number, true or false")


def _wants_binary(request: pb.ModelInferRequest, fields: Fields) -> bool:
    is_binary = fields.inner("parameters").flag("binary_data_output")
    for given in fields.objects("outputs"):
        output = request.outputs.add(name=given.text("name"))
        parameters = given.inner("parameters")
        for name in ("classification", "shared_memory_region"):
            if name in parameters.values:
                output.parameters[name].bool_param = True
        if "binary_data" in parameters.values:
            is_binary = parameters.flag("binary_data")
    return is_binary


def _answer(response: pb.ModelInferResponse, **output: Any) -> dict[str, Any]:
    return {
        **({"id": response.id} if response.id else {}),
        "model_name": response.model_name,
        "model_version": response.model_version,
        "outputs": [{"name": OUTPUT, "datatype": BYTES, "shape": [1], **output}],
    }


def _as_json(response: pb.ModelInferResponse) -> dict[str, Any]:
    (raw,) = response.raw_output_contents
    return _answer(response, data=[raw[4:].decode()])


def _binary(response: pb.ModelInferResponse) -> ByteResponse:
    (raw,) = response.raw_output_contents
    head = orjson.dumps(_answer(response, parameters={"binary_data_size": len(raw)}))
    length = (_HEADER_LENGTH, str(len(head)).encode())
    return ByteResponse(head + raw, b"application/octet-stream", (length,))
