"""Server reflection, versions v1 and v1alpha, so that grpcurl, buf curl and similar tools need no .proto files.

This servicer resolves every symbol. grpcio-reflection's does not resolve methods, and supports v1alpha only. The
messages of v1 and v1alpha have the same encoding, so one servicer answers both.

The generated stubs hold neither comments nor validation rules. ``kestrel.v1.binpb``, which ``make protos`` writes,
holds both. It is read at the first request that needs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from grpc_reflection.v1alpha import reflection_pb2 as pb

from kestrel_client._pb.inference import grpc_service_pb2

from ..edge.methods import Methods

V1 = "grpc.reflection.v1.ServerReflection"
V1ALPHA = "grpc.reflection.v1alpha.ServerReflection"
_CONTRACT = Path(__file__).with_name("kestrel.v1.binpb")
MOST_ANSWERS = 64
"""Limit on the answers that wait for their readers at the same time. An answer has up to 0.2 MB."""


def add_reflection(methods: Methods, service_names: tuple[str, ...]) -> None:
    """Adds reflection. It describes ``service_names`` and the reflection services."""
    reflection = Reflection((*service_names, V1, V1ALPHA))
    handler = grpc.stream_stream_rpc_method_handler(
        reflection.answer,
        request_deserializer=pb.ServerReflectionRequest.FromString,
        response_serializer=pb.ServerReflectionResponse.SerializeToString,
    )
    for name in (V1, V1ALPHA):
        methods.add_registered_method_handlers(name, {"ServerReflectionInfo": handler})


class Reflection:
    """Answers reflection requests from the descriptors of the contract, from protobuf's default descriptor pool, which
    holds most other files, and from the pools of the rest."""

    def __init__(self, service_names: Iterable[str]) -> None:
        self._service_names = sorted(service_names)
        self.turns = asyncio.Semaphore(MOST_ANSWERS)

    @functools.cached_property
    def _contract(self) -> dict[str, bytes]:
        """The descriptors of the contract's files and of all files that they import, by file name; imports first."""
        read = descriptor_pb2.FileDescriptorSet.FromString(_CONTRACT.read_bytes())
        return {file.name: _with_comments_only(file) for file in read.file}

    @functools.cached_property
    def _pools(self) -> tuple[descriptor_pool.DescriptorPool, ...]:
        contract = descriptor_pool.DescriptorPool()
        for file in self._contract.values():
            contract.AddSerializedFile(file)
        return (
            contract,
            descriptor_pool.Default(),
            _pool_of_v1(),
            grpc_service_pb2.DESCRIPTOR.pool,
        )

    async def answer(
        self, requests: AsyncIterator[pb.ServerReflectionRequest], context: Any
    ) -> AsyncIterator[pb.ServerReflectionResponse]:
        """One response for each request, in their order."""
        async for request in requests:
            async with self.turns:
                response = self._answer(request)
                response.valid_host = request.host
                response.original_request.CopyFrom(request)
                yield response

    def _answer(self, request: pb.ServerReflectionRequest) -> pb.ServerReflectionResponse:
        kind = request.WhichOneof("message_request")
        if kind == "list_services":
            services = [pb.ServiceResponse(name=name) for name in self._service_names]
            return pb.ServerReflectionResponse(
                list_services_response=pb.ListServiceResponse(service=services)
            )
        for pool in self._pools:
            try:
                match kind:
                    case "file_by_filename":
                        return self._files(pool.FindFileByName(request.file_by_filename))
                    case "file_containing_symbol":
                        return self._files(_file_of(pool, request.file_containing_symbol))
                    case "file_containing_extension":
                        wanted = request.file_containing_extension
                        extended = pool.FindMessageTypeByName(wanted.containing_type)
                        extension: Any = pool.FindExtensionByNumber(
                            extended, wanted.extension_number
                        )
                        return self._files(extension.file)
                    case "all_extension_numbers_of_type":
                        return self._extension_numbers(request.all_extension_numbers_of_type)
            except KeyError:
                continue
        if kind is None:
            return _error(grpc.StatusCode.INVALID_ARGUMENT, "the request sets no message_request")
        name = str(getattr(request, kind)).strip()
        return _error(grpc.StatusCode.NOT_FOUND, f"{kind} not found: {name}")

    def _files(self, file: FileDescriptor) -> pb.ServerReflectionResponse:
        """The file, then the files that it imports directly or indirectly."""
        protos = []
        for each in _with_imports(file, set()):
            described = self._contract.get(each.name)
            if described is None:
                proto = descriptor_pb2.FileDescriptorProto()
                each.CopyToProto(proto)
                described = proto.SerializeToString()
            protos.append(described)
        return pb.ServerReflectionResponse(
            file_descriptor_response=pb.FileDescriptorResponse(file_descriptor_proto=protos)
        )

    def _extension_numbers(self, name: str) -> pb.ServerReflectionResponse:
        """The extensions that any pool has of a message. Raises KeyError if no pool has the message."""
        numbers: set[int] = set()
        found = False
        for pool in self._pools:
            with contextlib.suppress(KeyError):
                extensions = pool.FindAllExtensions(pool.FindMessageTypeByName(name))
                numbers |= {each.number for each in extensions}
                found = True
        if not found:
            raise KeyError(name)
        return pb.ServerReflectionResponse(
            all_extension_numbers_response=pb.ExtensionNumberResponse(
                base_type_name=name, extension_number=sorted(numbers)
            )
        )


def _file_of(pool: descriptor_pool.DescriptorPool, symbol: str) -> FileDescriptor:
    """The file that declares a symbol of any kind. Raises KeyError.

    An enum's value has two names: protobuf declares it beside the enum, and grpcurl looks for it below the enum.
    """
    try:
        return pool.FindFileContainingSymbol(symbol)
    except KeyError:  # protobuf's pool in Python does not find methods or values below their enum.
        parent, _, name = symbol.rpartition(".")
    declared: Any
    try:
        declared = pool.FindServiceByName(parent)
        members = declared.methods_by_name
    except KeyError:
        declared = pool.FindEnumTypeByName(parent)
        members = declared.values_by_name
    if name not in members:
        raise KeyError(symbol)
    file: FileDescriptor = declared.file
    return file


def _with_comments_only(file: descriptor_pb2.FileDescriptorProto) -> bytes:
    """The file without comments of others' files and without places that have no comment: a third of its bytes."""
    places = file.source_code_info.location
    ours = file.package == "kestrel.v1"
    commented = [p for p in places if ours and (p.leading_comments or p.trailing_comments)]
    del places[:]
    places.extend(commented)
    return file.SerializeToString()


def _with_imports(file: FileDescriptor, seen: set[str]) -> Iterator[FileDescriptor]:
    if file.name not in seen:
        seen.add(file.name)
        yield file
        for imported in file.dependencies:
            yield from _with_imports(imported, seen)


def _error(code: grpc.StatusCode, message: str) -> pb.ServerReflectionResponse:
    return pb.ServerReflectionResponse(
        error_response=pb.ErrorResponse(error_code=code.value[0], error_message=message)
    )


def _pool_of_v1() -> descriptor_pool.DescriptorPool:
    """A pool with the descriptors of v1, made from those of v1alpha, because no Python package contains them."""
    proto = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(proto)
    proto.name = "grpc/reflection/v1/reflection.proto"
    proto.package = "grpc.reflection.v1"
    for message in proto.message_type:
        for field in message.field:
            if field.HasField("type_name"):
                field.type_name = field.type_name.replace(".v1alpha.", ".v1.")
    for method in proto.service[0].method:
        method.input_type = method.input_type.replace(".v1alpha.", ".v1.")
        method.output_type = method.output_type.replace(".v1alpha.", ".v1.")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(proto)
    return pool
