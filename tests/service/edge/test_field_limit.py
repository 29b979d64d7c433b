"""The fields of a message are counted before it is decoded: a small field takes much more memory than bytes."""

import itertools

import grpc
import pytest
from google.protobuf.internal import encoder
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel_client._pb.inference import grpc_service_pb2 as kserve
from kestrel_client._pb.kestrel.v1 import (
    admin_service_pb2,
    batch_service_pb2,
    common_pb2,
    image_service_pb2,
    model_service_pb2,
    vision_service_pb2,
)
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import InvalidRequest
from kestrel_grpc.edge.messages import incoming
from kestrel_grpc.edge.messages.incoming import MOST_FIELDS, check_fields
from kestrel_grpc.security.admission.admission import MessageTooLarge
from kestrel_grpc.settings.batches import BatchesConfig
from kestrel_grpc.settings.security import SecurityConfig
from tests.service.statuses import failure


def key(kind, name, wire_type=2):
    return encoder.TagBytes(kind.DESCRIPTOR.fields_by_name[name].number, wire_type)


def part(kind, name, data):
    return key(kind, name) + encoder._VarintBytes(len(data)) + data


def counted(message):
    """The fields of a message that has no packed numbers and no maps."""
    total = 0
    for field, value in message.ListFields():
        several = field.is_repeated
        for each in value if several else [value]:
            total += 1 + (counted(each) if field.message_type is not None else 0)
    return total


TURNS = st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5)), max_size=4)
REFS = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=5)


@settings(deadline=None)
@given(st.text(max_size=9), TURNS, REFS, st.binary(max_size=50))
def test_all_fields_are_counted(question, turns, refs, image):
    message = pb.QueryRequest(query=pb.QueryTask(question=question))
    if image:
        message.images.add().encoded = image
    for asked, answer in turns:
        message.query.history.add(question=asked, answer=answer)
    for x, y in refs:
        point = message.query.spatial_refs.add().point
        point.x, point.y = x, y
    found = incoming.num_fields(message.SerializeToString(), message.DESCRIPTOR)
    assert found == counted(message)


@pytest.mark.parametrize("beyond", [0, 1])
@pytest.mark.parametrize(
    ("kind", "small"),
    [
        (pb.QueryRequest, lambda n: part(pb.QueryRequest, "images", b"") * n),
        (pb.QueryRequest, lambda n: b"\xf8\x7f\x00" * n),
        (pb.QueryRequest, lambda n: b"\xfb\x7f\xfc\x7f" * (n // 2) + b"\xf8\x7f\x00" * (n % 2)),
        (pb.DetectTask, lambda n: part(pb.DetectTask, "objects", b"") * n),
        (pb.QueryRequest, lambda n: part(pb.QueryRequest, "query", part(pb.QueryTask, "history", b"") * (n - 1))),
        (kserve.InferTensorContents, lambda n: part(kserve.InferTensorContents, "int64_contents", b"\x01" * (n - 1))),
        (
            kserve.InferTensorContents,
            lambda n: part(kserve.InferTensorContents, "fp32_contents", b"\x01" * 4 * (n - 1)),
        ),
        (
            kserve.InferTensorContents,
            lambda n: part(kserve.InferTensorContents, "fp64_contents", b"\x01" * 8 * (n - 1)),
        ),
    ],
    ids=["messages", "unknown", "groups", "texts", "inner", "varints", "floats", "doubles"],
)  # fmt: skip
def test_the_limit(kind, small, beyond):
    data = small(MOST_FIELDS + beyond)
    kind.FromString(data)
    if beyond:
        with pytest.raises(MessageTooLarge, match="more than 20000 fields"):
            check_fields(data, kind.DESCRIPTOR)
    else:
        check_fields(data, kind.DESCRIPTOR)


def test_large_bytes_and_texts_count_as_one():
    message = pb.QueryRequest(query=pb.QueryTask(question="a" * 100_000))
    message.images.add().encoded = bytes(itertools.islice(itertools.cycle(range(256)), 3_000_000))
    data = message.SerializeToString()
    check_fields(data, message.DESCRIPTOR)
    check_fields(memoryview(data), message.DESCRIPTOR)


@pytest.mark.parametrize(
    "end",
    [
        b"\x07",
        b"\x0a\xff",
        b"\x0a\x05abc",
        b"\x09\x00",
        b"\xff" * 11,
        part(pb.QueryRequest, "query", b"\x0a\x7f"),
    ],
)
def test_what_is_no_message_is_refused_at_once(end):
    """A later part that is invalid must not hide the fields of an earlier one."""
    data = pb.QueryRequest(query=pb.QueryTask(question="a" * 50_000)).SerializeToString() + end
    with pytest.raises(DecodeError):
        pb.QueryRequest.FromString(data)
    with pytest.raises(InvalidRequest, match="not a valid message"):
        check_fields(data, pb.QueryRequest.DESCRIPTOR)


@pytest.mark.parametrize("method", ["Query", "StreamQuery"])
async def test_a_server_refuses_such_a_message(serve, method):
    served = await serve()
    data = part(pb.QueryRequest, "images", part(common_pb2.Image, "region", b""))
    many = data * 1_000_000
    call = served.channel.unary_unary if method == "Query" else served.channel.unary_stream
    told = await failure(call(f"/kestrel.v1.VisionService/{method}")(many))
    assert (told.code, told.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")
    assert "20000 fields" in told.message


SERVICES = (
    vision_service_pb2, image_service_pb2, model_service_pb2, batch_service_pb2, admin_service_pb2, kserve, health_pb2,
    reflection_pb2,
)  # fmt: skip
METHODS = [
    (service.full_name, method)
    for file in SERVICES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.input_type.fields
]


async def test_every_method_counts(serve, tmp_path):
    """Of a method whose decoder has no type, the fields would not be counted."""
    served = await serve(
        server_config={
            "security": SecurityConfig(api_key="the-key-of-an-administrator"),
            "batches": BatchesConfig(path=str(tmp_path / "batches.db")),
        }
    )
    metadata = (("authorization", "Bearer the-key-of-an-administrator"),)
    many = b"\xf8\x7f\x00" * (MOST_FIELDS + 1)
    for service, method in METHODS:
        path = f"/{service}/{method.name}"
        channel = served.channel
        if method.client_streaming:
            call = served.send(path, [many], metadata=metadata)
        else:
            made = channel.unary_stream if method.server_streaming else channel.unary_unary
            call = made(path)(many, metadata=metadata)
        told = await failure(call)
        assert told.code is grpc.StatusCode.RESOURCE_EXHAUSTED, (path, told)
        assert "20000 fields" in told.message, (path, told)
