"""Every method with extreme field values, over the wire: it answers only with the statuses that docs/use/statuses.md
lists, and the server frees everything. KESTREL_FUZZ_EXAMPLES: how many for each method."""

import io
import os
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from kestrel_client._pb.inference import grpc_service_pb2
from kestrel_client._pb.kestrel.v1 import (
    admin_service_pb2,
    batch_service_pb2,
    image_service_pb2,
    model_service_pb2,
)
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_grpc.edge.failures.status_message import DOMAIN
from tests.abuse.inputs.edge_messages import mangled, near, nested
from tests.abuse.served import METADATA, ServedInThread
from tests.kserve.conftest import infer
from tests.service.edge.test_validation_rules import VALID

EXAMPLES = int(os.environ.get("KESTREL_FUZZ_EXAMPLES", "20"))
FEW_AND_MANY = pytest.mark.parametrize(
    "examples", [EXAMPLES // 4, pytest.param(EXAMPLES, marks=pytest.mark.slow)]
)


def fuzz(examples: int) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize="KESTREL_FUZZ_EXAMPLES" not in os.environ,
        suppress_health_check=list(HealthCheck),
    )


TIMEOUT_S = 60.0
CALLERS_FAULT = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
NUMBERS = {code.value[0] for code in CALLERS_FAULT}


def jpeg() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (48, 32), (200, 30, 30)).save(buffer, "JPEG")
    return buffer.getvalue()


VISION: dict[str, Message] = {
    method.partition("/")[2]: messages[method == "VisionService/StreamFrames"]
    for method, messages in VALID.items()
    if method.startswith("VisionService/")
}
"""Of a stream of frames, the frame."""

IMAGES: dict[str, Message] = {
    "PutImage": image_service_pb2.PutImageRequest(image={"encoded": jpeg()}),
    "UploadImage": image_service_pb2.UploadImageRequest(chunk=jpeg()),
    "DeleteImage": image_service_pb2.DeleteImageRequest(image_id="x"),
}
MODELS: dict[str, Message] = {
    "ListModels": model_service_pb2.ListModelsRequest(page_size=1),
    "GetModel": model_service_pb2.GetModelRequest(model="fake"),
    "ListAdapters": model_service_pb2.ListAdaptersRequest(model="fake"),
    "GetServerInfo": model_service_pb2.GetServerInfoRequest(),
    "GetLoad": model_service_pb2.GetLoadRequest(),
}
BATCHES: dict[str, Message] = {
    "CreateBatch": batch_service_pb2.CreateBatchRequest(
        request={
            "custom_id": "a",
            "detect": {"image": {"encoded": jpeg()}, "detect": {"objects": ["cup"]}},
        }
    ),
    "ListBatches": batch_service_pb2.ListBatchesRequest(page_size=1),
}
"""The other methods need the id of a batch."""
ADMIN: dict[str, Message] = {
    "CancelRequest": admin_service_pb2.CancelRequestRequest(request_id="x"),
    "FlushCaches": admin_service_pb2.FlushCachesRequest(stored_images=True),
    "GetStatistics": admin_service_pb2.GetStatisticsRequest(),
}
"""Those that leave the server as it is."""

INFER = infer(
    id="seven", SKILL="query", QUESTION="What?", IMAGE=jpeg(), MAX_TOKENS=2, TEMPERATURE=0.0,
    REASONING=False, SPATIAL_REFS="[[0.5, 0.5]]",
)  # fmt: skip
KSERVE: dict[str, Message] = {
    "ModelInfer": INFER,
    "ModelStreamInfer": INFER,
    "ModelConfig": grpc_service_pb2.ModelConfigRequest(name="moondream", version="1"),
    "ModelStatistics": grpc_service_pb2.ModelStatisticsRequest(name="moondream"),
}
"""KServe's methods whose requests have fields beside names."""

SERVICES = {
    "VisionService": (pb, VISION),
    "ImageService": (image_service_pb2, IMAGES),
    "ModelService": (model_service_pb2, MODELS),
    "BatchService": (batch_service_pb2, BATCHES),
    "AdminService": (admin_service_pb2, ADMIN),
    "GRPCInferenceService": (grpc_service_pb2, KSERVE),
}
METHODS = [(service, name) for service, (_, valid) in SERVICES.items() for name in valid]


@pytest.fixture(scope="module")
def served() -> Iterator[ServedInThread]:
    with ServedInThread() as served:
        yield served


class Caller:
    """Calls methods by name with messages, or with bytes that claim to be such."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def call(self, service: str, name: str, *requests: Message | bytes) -> list[Any]:
        """The responses. Raises grpc.RpcError."""
        module, _ = SERVICES[service]
        method = module.DESCRIPTOR.services_by_name[service].methods_by_name[name]
        path = f"/{method.containing_service.full_name}/{name}"
        response = getattr(module, method.output_type.name)
        stream = method.server_streaming
        if method.client_streaming and stream:
            make, sent = self._channel.stream_stream, iter(requests)
        elif method.client_streaming:
            make, sent = self._channel.stream_unary, iter(requests)
        else:
            make = self._channel.unary_stream if stream else self._channel.unary_unary
            (sent,) = requests
        made = make(path, request_serializer=_bytes, response_deserializer=response.FromString)
        answer = made(sent, timeout=TIMEOUT_S, metadata=METADATA)
        return list(answer) if stream else [answer]

    def check(self, service: str, name: str, *requests: Message | bytes) -> grpc.StatusCode:
        """Makes the call; what comes back is an answer, or a status that a caller is promised."""
        try:
            answers = self.call(service, name, *requests)
        except grpc.RpcError as error:
            code = error.code()
            assert code in CALLERS_FAULT, (code, error.details(), requests)
            _check_details(error)
            return code
        if name == "StreamFrames":
            assert len(answers) <= len(requests)
            for answer in answers:
                assert answer.WhichOneof("outcome")
                assert not answer.HasField("error") or answer.error.code in NUMBERS, answer
            return grpc.StatusCode.OK
        if name == "ModelStreamInfer":
            (answer,) = answers
            told = answer.error_message
            code = grpc.StatusCode[told.partition(":")[0]] if told else grpc.StatusCode.OK
            assert code is grpc.StatusCode.OK or code in CALLERS_FAULT
            return code
        if len(answers) > 1:
            assert [a.sequence for a in answers] == list(range(len(answers)))
            assert answers[-1].HasField("final")
        last = getattr(answers[-1], "final", answers[-1])
        for result in getattr(last, "results", ()):
            if result.HasField("error"):
                assert result.error.code in NUMBERS, result.error
        return grpc.StatusCode.OK


@pytest.fixture(scope="module")
def caller(served: ServedInThread) -> Iterator[Caller]:
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(served.address, options=options) as channel:
        yield Caller(channel)


def _bytes(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


def _check_details(error: Any) -> None:
    """The status as programs read it: the same code and words, a reason, the request's id, and short enough."""
    trailers = dict(error.trailing_metadata())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    assert (status.code, status.message) == (error.code().value[0], error.details())
    assert len(status.message.encode()) < 800
    info, request = error_details_pb2.ErrorInfo(), error_details_pb2.RequestInfo()
    assert any(detail.Unpack(info) for detail in status.details)
    assert any(detail.Unpack(request) for detail in status.details)
    assert info.reason and info.domain == DOMAIN
    assert request.request_id == trailers["x-request-id"]


FIRST: dict[str, Message] = {
    "UploadImage": image_service_pb2.UploadImageRequest(
        info=image_service_pb2.UploadInfo(size_bytes=len(jpeg()))
    ),
    "CreateBatch": batch_service_pb2.CreateBatchRequest(info={"total_requests": 1}),
    "StreamFrames": VALID["VisionService/StreamFrames"][0],
}
"""The first message of a stream of messages, which says what is to come."""


def around(name: str, message: Message | bytes) -> tuple[Message | bytes, ...]:
    """What is sent."""
    return (FIRST[name], message) if name in FIRST else (message,)


def test_every_method_is_abused():
    """But for methods of AdminService that change what other tests find, some of KServe's, and those about a batch."""
    for service, (module, valid) in SERVICES.items():
        named = set(module.DESCRIPTOR.services_by_name[service].methods_by_name)
        assert set(valid) <= named
        some = ("AdminService", "GRPCInferenceService", "BatchService")
        assert service in some or set(valid) == named


@pytest.mark.parametrize(("service", "name"), METHODS)
def test_the_valid_message_is_answered(caller, service, name):
    messages = around(name, SERVICES[service][1][name])
    assert caller.check(service, name, *messages) is grpc.StatusCode.OK


@FEW_AND_MANY
@pytest.mark.parametrize(("service", "name"), METHODS)
def test_fields_at_their_edges(served, caller, service, name, examples):
    valid = SERVICES[service][1][name]

    @fuzz(examples)
    @given(message=near(valid))
    def abuse(message: Message) -> None:
        caller.check(service, name, *around(name, message))

    abuse()
    served.assert_at_rest()


@FEW_AND_MANY
@pytest.mark.parametrize(
    ("service", "name"),
    [
        ("ImageService", "UploadImage"),
        ("BatchService", "CreateBatch"),
        ("VisionService", "StreamFrames"),
    ],
)
def test_messages_of_a_stream_in_any_order(served, caller, service, name, examples):
    @fuzz(examples)
    @given(st.lists(near(FIRST[name]) | near(SERVICES[service][1][name]), max_size=5))
    def abuse(messages: list[Message]) -> None:
        caller.check(service, name, *messages)

    abuse()
    served.assert_at_rest()


@FEW_AND_MANY
@pytest.mark.parametrize(("service", "name"), METHODS)
def test_bytes_that_are_no_message(served, caller, service, name, examples):
    valid = SERVICES[service][1][name].SerializeToString()

    @fuzz(examples)
    @given(data=mangled(valid))
    def abuse(data: bytes) -> None:
        caller.check(service, name, *around(name, data))

    abuse()
    served.assert_at_rest()


@pytest.mark.parametrize("depth", [10, 30, 45, 60, 200, 5000])
@pytest.mark.parametrize("name", ["RunSkill", "StreamRunSkill"])
def test_values_within_values(served, caller, name, depth):
    assert caller.check("VisionService", name, nested(depth)) is grpc.StatusCode.INVALID_ARGUMENT
    served.assert_at_rest()
