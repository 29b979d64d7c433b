"""Which connections the guard ends, and how it finds them on Linux."""

import gc
import itertools
import socket
import sys
import weakref

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kestrel_grpc.security.admission.admission import MessageTooLarge
from kestrel_grpc.security.connections.accepted_connection import (
    AcceptedConnection,
    AcceptedSockets,
)
from kestrel_grpc.security.connections.connection_guard import (
    FREE_BYTES,
    IDLE_S,
    PATIENCE_S,
    TOTAL_BYTES,
    WINDOW_BYTES,
    ConnectionGuard,
    Reason,
)
from kestrel_grpc.settings.security import ConnectionLimits, SecurityConfig
from tests.ports import has_ipv6
from tests.waiting import until

MESSAGE = 40 * 2**20
linux = pytest.mark.skipif(not AcceptedSockets.can_look(), reason="needs /proc")


def ipv6(value):
    return pytest.param(value, marks=pytest.mark.skipif(not has_ipv6(), reason="needs IPv6"))


class Table:
    """Sockets that a test opens and closes."""

    def __init__(self, clock):
        self.clock, self.open = clock, []
        self._inodes = itertools.count(1)

    def add(self, host="10.0.0.1", count=1):
        inodes = itertools.islice(self._inodes, count)
        made = [AcceptedConnection(0, inode, f"ipv4:{host}:{inode}") for inode in inodes]
        self.open += made
        return made

    def look(self):
        return list(self.open)

    def end(self, connection):
        self.open.remove(connection)


@pytest.fixture
def guarded(still_clock):
    def make(**limits):
        table = Table(still_clock)
        return table, ConnectionGuard(ConnectionLimits(**limits), MESSAGE, table)

    return make


def look_later(table, guard):
    """Looks once now and once when connections have had time to show what they are."""
    guard.look()
    table.clock.advance(PATIENCE_S + 0.1)
    return guard.look()


def test_a_connection_with_an_admitted_caller_does_not_count_for_its_address(guarded):
    table, guard = guarded(connections=8)
    callers = table.add("10.0.0.1", 6)
    for each in callers:
        guard.use(each.peer).is_known = True
    strangers = table.add("10.0.0.1", 5)
    assert look_later(table, guard)
    assert table.open == callers + strangers[:4]


def test_the_newest_connections_of_an_address_are_ended(guarded):
    table, guard = guarded(connections=8)
    first = table.add("10.0.0.1", 3)
    other = table.add("10.0.0.2", 2)
    assert not look_later(table, guard)
    table.add("10.0.0.1", 3)
    assert look_later(table, guard)
    assert table.open[:5] == first + other
    assert [each.peer.split(":")[1] for each in table.open[5:]] == ["10.0.0.1"], "half of 8"
    assert guard.ended[Reason.ADDRESS] == 2
    assert not guard.look() and guard.num_connections == 6


@pytest.mark.parametrize("limits, most", [({"address_connections": 0}, 40), ({"connections": 10}, 5),
                                          ({"connections": None}, 40), ({"address_connections": 7}, 7)])  # fmt: skip
def test_the_limit_of_an_address(limits, most, guarded):
    table, guard = guarded(**limits)
    table.add(count=40)
    look_later(table, guard)
    assert len(table.open) == most


def test_networks_of_ipv6_are_one_address(guarded):
    table, guard = guarded(address_connections=1)
    for number, host in enumerate(("2001:db8::1", "2001:db8::2", "2001:db8:0:1::1")):
        table.open.append(AcceptedConnection(0, number, f"ipv6:%5B{host}%5D:{number}"))
    look_later(table, guard)
    assert [each.inode for each in table.open] == [0, 2]


def test_bytes_that_no_call_explains_end_a_connection(guarded):
    table, guard = guarded(streams=10)
    quiet, caller = table.add(count=2)
    guard.look()
    most = FREE_BYTES + 10 * (WINDOW_BYTES + 16 * 1024)
    quiet.received_bytes = most
    for _ in range(100):
        with guard.use(caller.peer):
            caller.received_bytes += most
        assert not guard.look(), "the edge heard of it"
    quiet.received_bytes += 1
    assert guard.look() and table.open == [caller]
    assert guard.ended[Reason.UNEXPLAINED] == 1
    assert guard.take_freed_bytes() > most and guard.take_freed_bytes() == 0


def test_a_message_that_is_waited_for_explains_as_much_as_one_may_have(guarded):
    table, guard = guarded(streams=1)
    (caller,) = table.add()
    use = guard.use(caller.peer)
    with use:
        use.pulls = 1
        guard.look()
        caller.received_bytes = MESSAGE
        assert not guard.look()
        caller.received_bytes = 2 * MESSAGE
        assert guard.look()


def test_if_all_received_too_much_the_largest_are_ended(guarded):
    table, guard = guarded()
    attackers = table.add("10.0.0.9", 20)
    table.add("10.0.0.1", 5)
    guard.look()
    for number, each in enumerate(attackers):
        each.received_bytes = TOTAL_BYTES // 20 + 1000 * number
        guard.use(each.peer).is_known = True
    assert not guard.look(), "the event loop may handle the calls of admitted callers late"
    for each in attackers:
        guard.use(each.peer).is_known = False
    assert guard.look(), "strangers get no time for it"
    assert guard.ended[Reason.UNEXPLAINED] == 1
    assert attackers[-1] not in table.open and len(table.open) == 24


def test_headers_beyond_the_limit_are_refused_and_far_beyond_it_end_the_connection(guarded):
    table, guard = guarded(metadata_bytes=16 * 1024)
    (one,) = table.add()
    error = guard.refuse_headers(one.peer, 20_000)
    assert isinstance(error, MessageTooLarge)
    assert error.message == "the metadata has 20000 bytes; the limit is 16384"
    assert not guard.look()
    guard.refuse_headers(one.peer, 100_000)
    assert guard.look() and table.open == [] and guard.ended[Reason.HEADERS] == 1
    assert not guard.look()
    (again,) = table.add()
    again.peer = one.peer
    assert not guard.look() and table.open == [again], "another client of the same address and port"


def test_metadata_of_calls_that_outlive_a_collection_is_collected_later(guarded):
    _, guard = guarded()
    call = Table(None)
    call.cycle = call
    gc.collect(1)
    ended = weakref.ref(call)
    gc.disable()
    try:
        del call
        for _ in range(4):
            assert ended() is not None
            guard.note_metadata(TOTAL_BYTES + 1)
        assert ended() is None
    finally:
        gc.enable()


def test_idle_connections_give_way_if_few_are_left(guarded):
    table, guard = guarded(connections=8, address_connections=0)
    _silent, called, busy = table.add(count=3)
    guard.look()
    with guard.use(called.peer):
        pass
    with guard.use(busy.peer):
        guard.look()
        table.clock.advance(IDLE_S + 1)
        new = table.add("10.0.0.2", 4)
        assert not guard.look(), "7 of 8"
        new += table.add("10.0.0.2", 1)
        assert guard.look() and table.open == [called, busy, *new], "never called"
        new += table.add("10.0.0.3", 1)
        assert guard.look() and table.open == [busy, *new], "called once"
        new += table.add("10.0.0.4", 1)
        assert not guard.look(), "the others are new, or have a call"
    assert guard.ended[Reason.IDLE] == 2


def test_it_logs_once_a_minute(caplog, guarded):
    table, guard = guarded(address_connections=1)
    for seconds in (0, 10, 40, 11):
        table.clock.advance(max(0, seconds - PATIENCE_S))
        table.add("10.0.0.7", 2)
        guard.look()
        table.clock.advance(PATIENCE_S)
        guard.look()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2, lines
    assert "ended 1 connections (address_limit 1), 1 of them from 10.0.0.7" in lines[0]
    assert "ended 6 connections (address_limit 6)" in lines[1]


def test_connections_that_have_gone_are_forgotten(guarded):
    _, guard = guarded()
    for number in range(1000):
        with guard.use(f"ipv4:10.0.0.1:{number}"):
            pass
        if number % 100 == 0:
            guard.look()
    with guard.use("ipv4:10.0.0.2:1"):
        guard.look()
        assert list(guard.uses) == ["ipv4:10.0.0.2:1"]


async def test_a_system_that_shows_no_connections_has_no_guard(caplog):
    caplog.set_level("INFO")
    guard = ConnectionGuard(ConnectionLimits(), MESSAGE, None)
    await guard.run()
    assert "--max-connections-per-address is off" in caplog.text
    assert guard.num_connections is None
    assert guard.use("ipv4:10.0.0.1:1") is guard.use("ipv4:10.0.0.2:1") is guard.use("unix:")


@linux
@pytest.mark.parametrize("host", ["127.0.0.1", ipv6("::1")])
def test_accepted_sockets_are_found_measured_and_ended(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as listener,
        socket.create_server((host, 0), family=family) as other,
    ):
        port = listener.getsockname()[1]
        sockets = AcceptedSockets(lambda: {port})
        assert sockets.look() == []
        client = socket.create_connection((host, port))
        assert sockets.look() == [], "the kernel has it, the process doesn't yet"
        accepted, _ = listener.accept()
        elsewhere = socket.create_connection((host, other.getsockname()[1]))
        unheard, _ = other.accept()
        (found,) = sockets.look()
        assert found.peer.endswith(f":{client.getsockname()[1]}") and found.received_bytes == 0
        client.sendall(bytes(5000))
        assert accepted.recv(5000, socket.MSG_WAITALL)
        client.sendall(bytes(3000))
        assert sockets.look() == [found] and found.received_bytes == 8000
        sockets.end(found)
        assert accepted.recv(1) == b"" == client.recv(1)
        accepted.close()
        assert sockets.look() == []
        sockets.end(found)  # It has gone; its descriptor may be another file's.
        elsewhere.sendall(b"x")
        assert unheard.recv(1) == b"x", "no other socket was ended"
        for each in (client, elsewhere, unheard):
            each.close()


@linux
@pytest.mark.parametrize("listen", ["127.0.0.1:0", ipv6("[::1]:0"), ipv6("[::]:0")])
async def test_grpc_names_peers_as_the_guard_does(serve, listen):
    security = SecurityConfig(insecure_listen=True)
    served = await serve(listen=listen, server_config={"security": security})
    guard = served.server.guard.connections
    port = served.server.addresses[0].rpartition(":")[2]
    hosts = {"[::]:0": ("127.0.0.1", "[::1]")}.get(listen, (listen.rpartition(":")[0],))
    for host in hosts:
        async with grpc.aio.insecure_channel(f"{host}:{port}") as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())

            def known():
                guard.look()
                peers = {each.socket.peer for each in guard.connections.values()}
                return peers & {peer for peer, use in guard.uses.items() if use.heard}

            # The connection of the host before may still be seen.
            await until(lambda: len(known()) == 1, lambda: (guard.uses, guard.connections))


if sys.platform != "linux":

    def test_there_is_no_guard_elsewhere():
        assert not AcceptedSockets.can_look()
