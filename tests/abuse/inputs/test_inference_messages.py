"""Requests of KServe's protocol with extreme values, and bytes that are no message: as test_messages.py."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import given

from kestrel_client._pb.inference import grpc_service_pb2 as pb
from tests.abuse.inputs.edge_messages import mangled, near
from tests.abuse.inputs.test_messages import CALLERS_FAULT, FEW_AND_MANY, fuzz
from tests.abuse.served import METADATA, ServedInThread
from tests.kserve.conftest import infer, jpeg

REQUEST = infer(
    id="seven",
    SKILL="query",
    QUESTION="What?",
    IMAGE=jpeg(),
    MAX_TOKENS=2,
    TEMPERATURE=0.0,
    REASONING=False,
    SPATIAL_REFS="[[0.5, 0.5]]",
)
METHODS = {
    "ModelInfer": REQUEST,
    "ModelStreamInfer": REQUEST,
    "ModelConfig": pb.ModelConfigRequest(name="moondream", version="1"),
    "ModelStatistics": pb.ModelStatisticsRequest(name="moondream"),
}


@pytest.fixture(scope="module")
def served() -> Iterator[ServedInThread]:
    with ServedInThread() as served:
        yield served


@pytest.fixture(scope="module")
def channel(served: ServedInThread) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(served.address) as channel:
        yield channel


def check(channel: grpc.Channel, name: str, data: bytes) -> grpc.StatusCode:
    """Sends the message; what comes back is an answer, or a status that a caller is promised."""
    path = f"/inference.GRPCInferenceService/{name}"
    try:
        if name == "ModelStreamInfer":
            made = channel.stream_stream(path)(iter([data]), timeout=60, metadata=METADATA)
            (answer,) = (pb.ModelStreamInferResponse.FromString(each) for each in made)
            told = answer.error_message
            return grpc.StatusCode[told.partition(":")[0]] if told else grpc.StatusCode.OK
        channel.unary_unary(path)(data, timeout=60, metadata=METADATA)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("name", METHODS)
def test_the_valid_message_is_answered(channel, name: str):
    data = METHODS[name].SerializeToString()
    assert check(channel, name, data) is grpc.StatusCode.OK


@FEW_AND_MANY
@pytest.mark.parametrize("name", METHODS)
def test_fields_at_their_edges(served, channel, name: str, examples: int):
    @fuzz(examples)
    @given(message=near(METHODS[name]))
    def abuse(message: Message) -> None:
        code = check(channel, name, message.SerializeToString())
        assert code is grpc.StatusCode.OK or code in CALLERS_FAULT

    abuse()
    served.assert_at_rest()


@FEW_AND_MANY
@pytest.mark.parametrize("name", METHODS)
def test_bytes_that_are_no_message(served, channel, name: str, examples: int):
    @fuzz(examples)
    @given(data=mangled(METHODS[name].SerializeToString()))
    def abuse(data: bytes) -> None:
        code = check(channel, name, data)
        assert code is grpc.StatusCode.OK or code in CALLERS_FAULT

    abuse()
    served.assert_at_rest()
