"""Floods of messages beyond the memory for messages: resident memory stays within the flags, and other callers get
answers.

Each attack runs in a process of its own, by hand-made calls, against a real server with default flags but for
--max-held-bytes, lowered so that the test is quick. One principal attacks, another one is polite.
"""

import asyncio
import contextlib
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_grpc.security.identity.principal import Scope
from kestrel_grpc.security.identity.tokens import line_of
from tests.abuse.connections.hand_made_calls import Body, HandMadeCalls, bomb
from tests.abuse.connections.polite import MIB, Polite
from tests.abuse.connections.rude_sockets import RudeCall, RudeCaller
from tests.abuse.process import ROOT, ServerProcess
from tests.forking.process import run_forked
from tests.waiting import wait_until

HELD = 512 * MIB
QUERY = "/kestrel.v1.VisionService/Query"
CHECK = "/grpc.health.v1.Health/Check"
RUDE, POLITE = "rude-caller-token-0123456789", "polite-caller-token-0123456789"
TOKEN = (("authorization", f"Bearer {POLITE}"),)
CONNECTIONS, SECONDS = 4, 1.0
ATTACKS = {
    "bombs": (QUERY, "", bomb, 120 * MIB, 12),
    "unfinished": (QUERY, "", None, 40 * MIB, 24),
    "unfinished health": (CHECK, "", None, 40 * MIB, 40),
    "bombs of a caller": (QUERY, RUDE, bomb, 120 * MIB, 12),
    "unfinished of a caller": (QUERY, RUDE, None, 33 * MIB, 24),
    "whole of a caller": (QUERY, RUDE, "whole", 33 * MIB, 28),
}
"""What is called, by whom, the kind of body, its size, how many."""


async def attack(name: str, address: str) -> None:
    path, token, kind, size, count = ATTACKS[name]
    if kind is bomb:
        body = bomb(size)
    else:
        body = Body(size, size if kind == "whole" else size - MIB)
    headers = {"authorization": f"Bearer {token}"} if token else {}
    if kind is bomb:
        headers["grpc_encoding"] = "gzip"

    async def connection() -> None:
        async with HandMadeCalls(address) as calls:
            each = (
                calls.call(path, body, end=kind is not None, linger_s=SECONDS, **headers)
                for _ in range(count // CONNECTIONS)
            )
            await asyncio.gather(*each)

    await asyncio.gather(*(connection() for _ in range(CONNECTIONS)))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("flood")
    tokens = folder / "tokens"
    names = {"rude": RUDE, "polite": POLITE}
    tokens.write_text("".join(f"{line_of(n, [Scope.INFER], t)}\n" for n, t in names.items()))
    tokens.chmod(0o600)
    flags = ("--auth-tokens", str(tokens), "--max-held-bytes", f"{HELD}")
    with ServerProcess(folder, *flags) as process:
        with Polite(process, TOKEN):
            time.sleep(1)
        yield process
        log = process.log.read_text(errors="replace")
        assert "Traceback" not in log, log[-3000:]


@pytest.mark.slow_with("unfinished health", "bombs of a caller", "unfinished of a caller")
@pytest.mark.parametrize("name", ATTACKS)
def test_memory_stays_within_what_the_flags_promise(server: ServerProcess, name: str) -> None:
    command = [sys.executable, "-m", "tests.abuse.connections.test_flood", name, server.address]
    most = 1.1 * HELD if ATTACKS[name][1] or ATTACKS[name][0] == CHECK else 64 * MIB
    with Polite(server, TOKEN) as seen:
        assert run_forked(command, cwd=ROOT, timeout=120).returncode == 0
        polite = len(seen.seconds)
        wait_until(lambda: len(seen.seconds) > polite)  # The polite caller is answered.
    assert not seen.failed, str(seen)
    assert seen.peak - seen.rest < most, f"{name}: {(seen.peak - seen.rest) / MIB:.0f} MiB more"
    wait_until(lambda: seen.resident <= seen.rest + 64 * MIB, lambda: seen.resident)


async def vanish(address: str) -> None:
    """Callers of every kind of method who open no window, and go before or after the server gives them up."""
    request = pb.QueryRequest(query={"question": "?", "max_tokens": 2})
    messages = {
        QUERY: request.SerializeToString(),
        "/kestrel.v1.VisionService/StreamQuery": request.SerializeToString(),
        "/kestrel.v1.VisionService/Nope": b"",
        CHECK: b"",
        "/grpc.health.v1.Health/Watch": b"",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": b"\x3a\x00",
    }

    async def one(path: str, message: bytes, token: str, hold_s: float) -> None:
        caller = RudeCaller(address, RudeCall(path, message, token), random.Random(1))
        with contextlib.suppress(OSError):
            await caller.never_reads(hold_s)

    for hold_s in (0.05, 0.5, 2.5):
        calls = (one(*each, token, hold_s) for each in messages.items() for token in (RUDE, "no"))
        await asyncio.gather(*calls)


def test_callers_who_open_no_window_and_vanish_leave_no_traceback(server: ServerProcess) -> None:
    asyncio.run(vanish(server.address))
    with grpc.insecure_channel(server.address) as channel:
        request = pb.QueryRequest(query={"question": "?", "max_tokens": 2})
        metadata = TOKEN
        assert VisionServiceStub(channel).Query(request, metadata=metadata, timeout=60)
    assert "Traceback" not in server.log.read_text(errors="replace")


if __name__ == "__main__":
    asyncio.run(attack(sys.argv[1], sys.argv[2]))
    print(Path(__file__).name, "ran", sys.argv[1])
