"""``replay``: repeats a captured request with a server.

A request that samples without its own seed may give another result. The deadline is not captured; --timeout sets it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import json_format, message_factory

from ..._pb.kestrel.v1 import image_service_pb2, vision_service_pb2
from ...errors import from_rpc_error
from ...images.request_images import request_images
from ..connection import CallMetadata, add_connection_flags, open_channel
from ..files import file_errors
from ..flag_table import add_flags
from ..parser import EXIT_FAILED, CommandError
from ..requests.output import print_json

if TYPE_CHECKING:
    from google.protobuf.descriptor import MethodDescriptor

_FORMAT = 1
_CHUNK_BYTES = 1024 * 1024
_SERVICES = (vision_service_pb2.DESCRIPTOR, image_service_pb2.DESCRIPTOR)


@dataclass(frozen=True, slots=True, eq=False)
class CapturedCall:
    """The contents of a file.

    ``request`` is a message, or the list of the messages of a method that takes a stream. ``left_out`` holds the facts
    about the images that the file does not hold.
    """

    method: MethodDescriptor
    request: Any
    code: str
    model: str | None
    left_out: list[dict[str, Any]]

    @property
    def path(self) -> str:
        """The method's name in gRPC."""
        return f"/{self.method.containing_service.full_name}/{self.method.name}"


REMOVED = {"--in-process": "; start serve, and give its address to --server"}
"""What to give in place of flags that were removed."""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = (
        "The command admin capture start writes such files. Prints the new result as JSON.\n"
        "Exits with 1 if the request fails."
    )
    parser.add_argument("file", metavar="FILE", help="a captured request")
    add_flags(
        parser,
        "--image FILE...  the image, if the capture does not hold it; of several, each in the order of the prompt",
    )
    add_connection_flags(parser)


def run(args: argparse.Namespace) -> int:
    captured = read_captured(args)
    with open_channel(args) as (channel, metadata):
        return call(channel, metadata, captured, args.timeout)


def read_captured(args: argparse.Namespace) -> CapturedCall:
    """Reads the captured request, and puts the images that were left out in their places. Raises CommandError."""
    captured = _read_file(args.file)
    _set_images(captured, args.image or [])
    print(f"{captured.path.removeprefix('/')}, captured with {captured.code}", flush=True)
    return captured


def _read_file(path: str) -> CapturedCall:
    """Reads a captured request. Raises CommandError."""
    with file_errors("read", path):
        data = Path(path).read_bytes()
    try:
        fields = json.loads(data.decode())
        if fields["kestrel_capture"] != _FORMAT:
            raise ValueError("another version has written it")
        service, _, name = str(fields["method"]).rpartition("/")
        method = _methods().get((service, name))
        if method is None:
            raise ValueError(f"there is no method {fields['method']!r}")
        make = message_factory.GetMessageClass(method.input_type)
        request: Any
        if method.client_streaming:
            request = [json_format.ParseDict(message, make()) for message in fields["request"]]
        else:
            request = json_format.ParseDict(fields["request"], make())
        left_out = fields["images_left_out"]
        if not isinstance(left_out, list) or not all(isinstance(each, dict) for each in left_out):
            raise ValueError("images_left_out must be a list of objects")
        return CapturedCall(method, request, fields["code"], fields["model"], left_out)
    except UnicodeDecodeError:
        raise CommandError(f"{path!r} is not a captured request: it is not text") from None
    except KeyError as error:
        raise CommandError(f"{path!r} is not a captured request: it has no {error}") from None
    except (TypeError, ValueError, RecursionError, json_format.ParseError) as error:
        why = " ".join(str(error).split())
        raise CommandError(f"{path!r} is not a captured request: {why}") from None


def _methods() -> dict[tuple[str, str], MethodDescriptor]:
    return {
        (service.full_name, method.name): method
        for file in _SERVICES
        for service in file.services_by_name.values()
        for method in service.methods
    }


def _set_images(captured: CapturedCall, paths: Sequence[str]) -> None:
    """Puts the images of the files ``paths`` in the place of those that were left out. Raises CommandError."""
    left_out = captured.left_out
    if len(paths) < len(left_out):
        facts = left_out[len(paths)]
        about = (
            f", of {facts['bytes']} bytes, SHA-256 {facts['sha256']}" if "bytes" in facts else ""
        )
        what = "the image" if len(left_out) == 1 else f"image {len(paths) + 1} of {len(left_out)}"
        raise CommandError(f"the capture does not hold {what}{about}: give it with --image")
    if len(paths) > len(left_out):
        raise CommandError(f"--image is given {len(paths)} times for {len(left_out)} images")
    data = []
    for path in paths:
        with file_errors("read", path):
            data.append(Path(path).read_bytes())
    if captured.method.input_type is image_service_pb2.UploadImageRequest.DESCRIPTOR:
        if data:
            _set_upload(captured.request, data[0])
        return
    request = captured.request[-1] if isinstance(captured.request, list) else captured.request
    empty = [each for each in request_images(request) if each.WhichOneof("source") is None]
    if len(empty) < len(data):
        raise CommandError(f"the capture has no place for {len(data)} images")
    for image, each in zip(empty, data, strict=False):
        image.encoded = each


def _set_upload(messages: list[Any], data: bytes) -> None:
    # The captured size and hash belong to another image.
    upload = image_service_pb2.UploadImageRequest
    begin = upload(info=image_service_pb2.UploadInfo())
    starts = range(0, len(data), _CHUNK_BYTES)
    messages[:] = [begin, *(upload(chunk=data[start : start + _CHUNK_BYTES]) for start in starts)]


def call(
    channel: grpc.Channel, metadata: CallMetadata, captured: CapturedCall, timeout: float
) -> int:
    """Makes the call and prints what it gives. Returns the exit status."""
    method, message_class = captured.method, message_factory.GetMessageClass
    kinds = ("stream" if s else "unary" for s in (method.client_streaming, method.server_streaming))
    call = getattr(channel, "_".join(kinds))(
        captured.path,
        request_serializer=message_class(method.input_type).SerializeToString,
        response_deserializer=message_class(method.output_type).FromString,
    )
    sent = iter(captured.request) if method.client_streaming else captured.request
    try:
        answered: Any = call(sent, metadata=metadata, timeout=timeout)
        for message in answered if method.server_streaming else (answered,):
            print_json(json_format.MessageToDict(message, preserving_proto_field_name=True))
    except grpc.RpcError as error:
        print(f"failed again: {from_rpc_error(error)} [{error.code().name}]", flush=True)
        return EXIT_FAILED
    print("OK", flush=True)
    return 0
