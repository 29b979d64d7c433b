"""A principal with hundreds of calls in flight does not keep other callers from answers, nor make them wait for
long."""

from dataclasses import dataclass

import grpc
import pytest

from benchmarks.traffic.flood import Flood
from kestrel_client._pb.kestrel.v1 import admin_service_pb2, common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.admin_service_pb2_grpc import AdminServiceStub
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_grpc.security.identity.principal import Scope
from kestrel_grpc.security.identity.tokens import line_of, new_token
from tests.abuse.process import ServerProcess
from tests.forking.spawned import fork_what_is_spawned
from tests.waiting import wait_until

NUM_CALLS = 8
PASSING = 0.1
"""Of a full queue of the flood, the share that may be answered while another call waits. Without shares it is all."""
NORMAL, HIGH = common_pb2.PRIORITY_NORMAL, common_pb2.PRIORITY_HIGH


def query(max_tokens, priority=NORMAL, question="what?"):
    return pb.QueryRequest(
        query={"question": question, "max_tokens": max_tokens, "sampling": {"temperature": 0}},
        options=common_pb2.RequestOptions(priority=priority),
    )


def bearer(token):
    return (("authorization", f"Bearer {token}"),)


def answered(channel, token):
    """The calls that the server has answered so far."""
    request = admin_service_pb2.GetStatisticsRequest()
    told = AdminServiceStub(channel).GetStatistics(request, metadata=bearer(token))
    return sum(method.ok_calls for method in told.methods)


def passing(channel, tokens, who, priority=NORMAL):
    """The calls of others that are answered during one call of ``who``: the mean of NUM_CALLS, one after the other.
    Each of them must be answered."""
    before = answered(channel, tokens["admin"])
    for number in range(NUM_CALLS):
        asked = query(15, priority, f"what {number}?")
        VisionServiceStub(channel).Query(asked, metadata=bearer(tokens[who]), timeout=60)
    return (answered(channel, tokens["admin"]) - before) / NUM_CALLS - 1


@pytest.fixture
def tokens(tmp_path):
    """By principal; "urgent" may ask for the best priority."""
    made = {name: new_token() for name in ("flood", "other", "urgent", "admin")}
    path = tmp_path / "tokens"
    path.write_text(
        "".join(
            line_of(name, [Scope.ADMIN] if name == "admin" else [Scope.INFER, Scope.HIGH], token)
            + "\n"
            for name, token in made.items()
        )
    )
    path.chmod(0o600)
    return made


@dataclass(frozen=True)
class Ask:
    """A call of the flood."""

    token: str

    def __call__(self, stub, rng):
        asked = query(rng.randint(20, 200), question=f"{rng.random()}?")
        return stub.Query(asked, metadata=bearer(self.token), timeout=60)


@pytest.mark.parametrize(
    ("in_flight", "max_queue"), [(300, 200), pytest.param(700, 512, marks=pytest.mark.slow)]
)
def test_beside_a_flood_of_one_principal_others_are_answered_in_time(
    tokens, tmp_path, monkeypatch, in_flight, max_queue
):
    fork_what_is_spawned(monkeypatch)
    flags = ("--auth-tokens", str(tmp_path / "tokens"), "--max-queue", str(max_queue))
    with (
        ServerProcess(tmp_path, *flags) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        with Flood(server.address, in_flight, Ask(tokens["flood"])) as flood:
            wait_until(
                lambda: {"OK", "RESOURCE_EXHAUSTED"} <= set(flood.ended)
            )  # The queue is full.
            other = passing(channel, tokens, "other")
            urgent = passing(channel, tokens, "urgent", HIGH)
            own = passing(channel, tokens, "flood", HIGH)
            ended = flood.ended
        assert max(other, urgent, own) <= PASSING * max_queue, (other, urgent, own)
        assert set(ended) <= {"OK", "RESOURCE_EXHAUSTED"}
