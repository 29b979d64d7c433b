"""deploy/haproxy/haproxy.cfg as it is, run by a real HAProxy before a real server: what passes, and what doesn't."""

import asyncio
import contextlib
import os
import re
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kestrel_client import AsyncKestrelClient, DeadlineExceededError, Tls, UnauthenticatedError
from kestrel_client._pb.kestrel.v1 import admin_service_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.admin_service_pb2_grpc import AdminServiceStub
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_grpc.security.identity.principal import Scope
from kestrel_grpc.security.identity.tokens import line_of, new_token
from tests.abuse.connections.hand_made_calls import head
from tests.abuse.connections.rude_sockets import PREFACE, frame
from tests.abuse.process import ServerProcess
from tests.ports import free_port
from tests.service.certificates import make_authority
from tests.waiting import until, wait_until

CONFIGURATION = Path(__file__).parents[2] / "deploy/haproxy/haproxy.cfg"
HAPROXY = shutil.which("haproxy") or "/usr/sbin/haproxy"
pytestmark = pytest.mark.skipif(
    not os.access(HAPROXY, os.X_OK), reason="needs haproxy (Debian: apt-get install haproxy)"
)


FEW_CALLS = 100
"""Far below what haproxy.cfg lets an address make in ten seconds."""


class Front:
    """A context: Kestrel on a unix socket, HAProxy with TLS before it."""

    def __init__(self, folder):
        self.folder = folder
        authority = make_authority(folder)
        pair = authority.issue("localhost")
        (pem := folder / "front.pem").write_bytes(pair.cert.read_bytes() + pair.key.read_bytes())
        self.ca = authority.ca.cert
        self.token = new_token()
        (tokens := folder / "tokens").write_text(line_of("camera", [Scope.INFER], self.token))
        self.port = free_port()
        self.address = f"localhost:{self.port}"
        back = f"unix:{folder}/kestrel.sock"
        self._flags = ("--auth-tokens", str(tokens), "--max-message-bytes", "1MiB")
        self._flags += ("--access-log", "json")
        self._back = back
        self._environ = {
            **os.environ,
            "KESTREL_FRONT": f"127.0.0.1:{self.port}",
            "KESTREL_PEM": str(pem),
            "KESTREL_BACK": f"unix@{folder}/kestrel.sock",
            "KESTREL_STATS": f"{folder}/stats.sock",
        }

    def start_server(self):
        self.server = ServerProcess(self.folder, *self._flags, listen=self._back)

    def __enter__(self):
        self.start_server()
        self.log = (self.folder / "haproxy.log").open("wb")
        self.haproxy = subprocess.Popen(
            [HAPROXY, "-db", "-f", str(CONFIGURATION)], stderr=self.log, env=self._environ
        )

        def is_up():
            assert self.haproxy.poll() is None, (self.folder / "haproxy.log").read_text()
            return "UP" in self.told("show stat")

        wait_until(is_up, lambda: self.told("show stat"))
        return self

    def __exit__(self, *exc_info):
        self.haproxy.kill()
        self.haproxy.wait()
        self.log.close()
        self.server.__exit__(None, None, None)

    def told(self, command):
        """What HAProxy's socket says; of ``show stat`` the server's state alone. "" before it listens."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
            try:
                asked.connect(f"{self.folder}/stats.sock")
            except OSError:
                return ""
            asked.sendall(f"{command}\n".encode())
            text = b"".join(iter(lambda: asked.recv(65536), b"")).decode()
        rows = [line.split(",") for line in text.splitlines()]
        return next((row[17] for row in rows if row[:2] == ["kestrel", "one"]), text)

    def forget_callers(self):
        """Counts by address start anew. HAProxy keeps the entry of an open connection, whose calls it forgets later."""

        def forgotten() -> bool:
            self.told("clear table strangers")
            rates = re.findall(r"http_req_rate\(10000\)=(\d+)", self.told("show table strangers"))
            return all(int(rate) < FEW_CALLS for rate in rates)

        wait_until(forgotten, lambda: self.told("show table strangers"))

    def count_calls(self, number):
        """HAProxy has counted ``number`` calls of this address in the last ten seconds."""
        self.told(f"set table strangers key ::ffff:127.0.0.1 data.http_req_rate {number}")
        assert f"http_req_rate(10000)={number}" in self.told("show table strangers")

    def until(self, state):
        wait_until(lambda: self.told("show stat") == state, lambda: self.told("show stat"))

    def client(self, token=True, **options):
        return AsyncKestrelClient(
            self.address,
            tls=Tls(root_certificates=self.ca),
            token=self.token if token else None,
            **options,
        )

    def channel(self):
        credentials = grpc.ssl_channel_credentials(self.ca.read_bytes())
        return grpc.aio.secure_channel(
            self.address, credentials, options=[("grpc.use_local_subchannel_pool", 1)]
        )

    def connection(self):
        """TLS with ALPN, and no byte sent yet."""
        context = ssl.create_default_context(cafile=str(self.ca))
        context.set_alpn_protocols(["h2"])
        plain = socket.create_connection(("127.0.0.1", self.port), 10)
        try:
            return context.wrap_socket(plain, server_hostname="localhost")
        except BaseException:
            plain.close()
            raise


@pytest.fixture(scope="module")
def front(tmp_path_factory):
    with Front(tmp_path_factory.mktemp("front")) as running:
        yield running


@pytest.fixture(autouse=True)
def from_the_start(front):
    front.forget_callers()


async def test_answers_streams_and_deadlines_pass(front):
    async with front.client() as client:
        assert (await client.query(None, "what?", max_tokens=3)).usage.output_tokens <= 3
        async with client.stream_query(None, "what?", max_tokens=60) as stream:
            assert len([event async for event in stream]) >= 2, "it is not held back"
        with pytest.raises(DeadlineExceededError):
            await client.query(None, "what?", max_tokens=300, timeout=0.005)


async def test_statuses_of_the_server_pass_with_their_details(front):
    metadata = (("authorization", f"Bearer {front.token}"),)
    async with front.channel() as channel:
        vision = VisionServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await vision.Query(pb.QueryRequest(query={"question": ""}), metadata=metadata)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "grpc-status-details-bin" in dict(caught.value.trailing_metadata())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await vision.Query(
                pb.QueryRequest(query={"question": "a" * 3 * 2**20}), metadata=metadata
            )
        # The server refuses it while it is on its way, and HAProxy 2.6 tells the end of the stream before the status.
        assert caught.value.code() in (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            grpc.StatusCode.CANCELLED,
        )
        wrong = (("authorization", "Bearer wrong"),)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await vision.Query(pb.QueryRequest(query={"question": "?"}), metadata=wrong)
        assert caught.value.details() == "the token is not known to this server"


async def test_who_has_no_token_or_asks_for_another_service_stays_outside(front):
    async with front.client(token=False) as client:
        with pytest.raises(UnauthenticatedError, match="a token is needed"):
            await client.query(None, "what?")
    metadata = (("authorization", f"Bearer {front.token}"),)
    async with front.channel() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await AdminServiceStub(channel).Drain(
                admin_service_pb2.DrainRequest(), metadata=metadata
            )
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    log = front.server.log.read_text()
    assert "AdminService" not in log and "CREDENTIALS_MISSING" not in log


# wrap_socket leaves its socket open if the connection is reset before the handshake begins.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_connections_of_one_address_are_bounded(front):
    opened = []
    try:
        with pytest.raises((OSError, ssl.SSLError)):
            for _ in range(21):
                opened.append(await asyncio.to_thread(front.connection))
        assert len(opened) >= 15, "some of the 20 may be of tests before"
    finally:
        for each in opened:
            each.close()

    async def connects():
        with contextlib.suppress(OSError, ssl.SSLError):
            (await asyncio.to_thread(front.connection)).close()
            return True

    await until(connects)


@pytest.mark.slow
def test_a_handshake_or_headers_that_take_long_are_cut_off(front):
    silent = socket.create_connection(("127.0.0.1", front.port), 60)
    slow = front.connection()
    slow.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000"))
    # HEADERS of 100 bytes, of which 10 come.
    slow.sendall(bytes.fromhex("000064010400000001") + bytes(10))
    for each in (silent, slow):
        each.settimeout(60)
        with contextlib.suppress(ConnectionError):
            while each.recv(4096):
                pass
        each.close()


@pytest.mark.slow
async def test_who_waits_for_an_answer_is_not_cut_off(front):
    """Longer than "timeout client"."""
    front.server.hang.touch()
    try:
        async with front.client() as client:
            waiting = asyncio.create_task(client.query(None, "what?", max_tokens=2, timeout=60))
            await asyncio.sleep(13)
            assert not waiting.done()
            front.server.hang.unlink()
            assert (await waiting).usage
    finally:
        front.server.hang.unlink(missing_ok=True)


def test_headers_that_are_large_are_refused(front):
    credentials = grpc.ssl_channel_credentials(front.ca.read_bytes())
    metadata = (("authorization", f"Bearer {front.token}"), ("x-large", "a" * 60_000))
    with grpc.secure_channel(front.address, credentials) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            VisionServiceStub(channel).Query(
                pb.QueryRequest(query={"question": "?"}), metadata=metadata, timeout=60
            )
    assert caught.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED


def test_headers_that_never_end_end_the_connection(front):
    """CONTINUATION after CONTINUATION: gRPC's core would take them for ever."""
    sent = 0
    with front.connection() as endless, contextlib.suppress(OSError):
        endless.settimeout(60)
        endless.sendall(PREFACE + frame(4, 0, 0) + frame(1, 0, 1, head("/a/b")))
        while sent < 2**22:
            endless.sendall(frame(9, 0, 1, b"\x00\x04abcd\x40" + b"x" * 64))
            sent += 80
            endless.setblocking(False)
            with contextlib.suppress(ssl.SSLWantReadError):
                while endless.recv(4096):
                    pass
                break
            endless.settimeout(60)
    assert 1000 < sent < 2**20


async def test_health_decides_whether_calls_are_sent(front):
    """Last: it restarts the server."""
    assert front.told("show stat") == "UP"
    front.server.popen.kill()
    front.server.popen.wait()
    front.until("DOWN")
    async with front.channel() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await VisionServiceStub(channel).Query(
                pb.QueryRequest(query={"question": "?"}),
                metadata=(("authorization", f"Bearer {front.token}"),),
                timeout=60,
            )
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    front.server.__exit__(None, None, None)
    front.start_server()
    front.until("UP")
    async with front.client() as client:
        assert (await client.query(None, "what?", max_tokens=2)).usage
    front.server.popen.terminate()
    assert front.server.popen.wait(60) == 0
    front.server.__exit__(None, None, None)
    front.start_server()
    front.until("UP")


async def test_calls_of_one_address_are_bounded_in_time(front):
    """The test tells HAProxy the number of calls: a busy machine may not make that many in ten seconds."""
    async with front.channel() as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def ask(number):
            front.count_calls(number)
            try:
                await health.Check(health_pb2.HealthCheckRequest(), timeout=60)
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}"
            return "OK"

        assert await ask(900) == "OK"
        # More than the limit even if most of ten seconds pass before the call.
        refused = "RESOURCE_EXHAUSTED: too many calls from this address"
        assert await ask(1_000_000) == refused
