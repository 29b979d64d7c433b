"""A principal with hundreds of calls in flight does not keep other callers from answers, nor make them wait for
long."""

import math
import time
from dataclasses import dataclass

import grpc
import pytest

from benchmarks.traffic.flood import Flood
from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_grpc.security.identity.principal import Scope
from kestrel_grpc.security.identity.tokens import line_of, new_token
from tests.abuse.process import ServerProcess
from tests.forking.spawned import fork_what_is_spawned

NUM_CALLS = 8
SLACK_S = 0.1
"""For the flood's callers, which take a processor of the machine. Without shares, calls wait tens of seconds behind
the flood's."""
NORMAL, HIGH = common_pb2.PRIORITY_NORMAL, common_pb2.PRIORITY_HIGH


def query(max_tokens, priority=NORMAL, question="what?"):
    return pb.QueryRequest(
        question=question,
        sampling=common_pb2.Sampling(max_tokens=max_tokens, temperature=0),
        options=common_pb2.RequestOptions(priority=priority),
    )


def bearer(token):
    return (("authorization", f"Bearer {token}"),)


def seconds(stub, token, priority=NORMAL):
    """Of ``NUM_CALLS`` calls, one after the other, each of which must be answered; sorted."""
    taken = []
    for number in range(NUM_CALLS):
        began = time.monotonic()
        asked = query(15, priority, f"what {number}?")
        stub.Query(asked, metadata=bearer(token), timeout=60)
        taken.append(time.monotonic() - began)
    return sorted(taken)


def p95(taken):
    return taken[math.ceil(0.95 * len(taken)) - 1]


def best_p95(limit, *call):
    """The p95 of ``seconds(*call)``; the best of four where it is above ``limit`` seconds, for what else runs on the
    machine only ever adds to it."""
    best = math.inf
    for _ in range(4):
        best = min(best, p95(seconds(*call)))
        if best <= limit:
            break
    return best


@pytest.fixture
def tokens(tmp_path):
    """By principal; "urgent" may ask for the best priority."""
    made = {"flood": new_token(), "other": new_token(), "urgent": new_token()}
    path = tmp_path / "tokens"
    path.write_text(
        "".join(
            line_of(name, [Scope.INFER, Scope.HIGH], token) + "\n" for name, token in made.items()
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
        stub = VisionServiceStub(channel)
        seconds(stub, tokens["other"])
        idle = p95(seconds(stub, tokens["other"]))
        with Flood(server.address, in_flight, Ask(tokens["flood"])) as flood:
            until = time.monotonic() + 60
            while not {"OK", "RESOURCE_EXHAUSTED"} <= set(flood.ended) and time.monotonic() < until:
                time.sleep(0.05)
            assert flood.ended["RESOURCE_EXHAUSTED"], "the queue is full"
            limits = 3 * idle + SLACK_S, 2 * idle + SLACK_S
            other = best_p95(limits[0], stub, tokens["other"])
            urgent = best_p95(limits[1], stub, tokens["urgent"], HIGH)
            own = best_p95(limits[1], stub, tokens["flood"], HIGH)
            ended = flood.ended
        # The machine may have become busier since the first measurement.
        idle = max(idle, p95(seconds(stub, tokens["other"])))
        limits = 3 * idle + SLACK_S, 2 * idle + SLACK_S
        print(
            f"p95 alone {idle:.3f} s, beside the flood {other:.3f}, urgent {urgent:.3f}, {own:.3f} s"
        )
        assert other <= limits[0]
        assert urgent <= limits[1]
        assert own <= limits[1]
        assert set(ended) <= {"OK", "RESOURCE_EXHAUSTED"}
        assert ended["OK"] > 0
