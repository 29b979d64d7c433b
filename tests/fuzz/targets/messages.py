"""gRPC requests in wire format. The first line of an input is the method, the rest is the message.

Every call must end with a status that is neither UNKNOWN nor INTERNAL, with nothing in the log.
"""

import asyncio
import contextlib

import grpc
from google.protobuf import message_factory
from google.protobuf.message import DecodeError

from kestrel_client._pb.inference import grpc_service_pb2
from kestrel_client._pb.kestrel.v1 import image_service_pb2, model_service_pb2, vision_service_pb2

from ..message_mutator import mutated
from ..running_server import running_server

_FILES = (vision_service_pb2, image_service_pb2, model_service_pb2, grpc_service_pb2)
METHODS = {
    f"/{service.full_name}/{method.name}".encode(): method
    for file in _FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
_FAULTS = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNIMPLEMENTED)
_SERVER = running_server()


def take(data: bytes) -> None:
    path, _, message = data.partition(b"\n")
    method = METHODS.get(path)
    if method is None:
        return

    def ask() -> None:
        """By gRPC's synchronous client: grpc.aio loses the status of a stream that the server refuses."""
        with grpc.insecure_channel(_SERVER.server.addresses[0]) as channel:
            if method.client_streaming:
                list(channel.stream_stream(path.decode())(iter([message]), timeout=60))
            else:
                list(channel.unary_stream(path.decode())(message, timeout=60))

    try:
        _SERVER.run(lambda: asyncio.to_thread(ask))
    except grpc.RpcError as error:
        assert error.code() not in _FAULTS, error
        assert error.details(), error


def mutate(data: bytes, most: int, seed: int) -> bytes:
    path, _, body = data.partition(b"\n")
    if path not in METHODS:
        return data
    message = message_factory.GetMessageClass(METHODS[path].input_type)()
    with contextlib.suppress(DecodeError):
        message.ParseFromString(body)
    return path + b"\n" + mutated(message, body, most - len(path) - 1, seed)
