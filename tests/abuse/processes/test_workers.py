"""Several processes behind one port: connections spread over them, one is killed or hangs, the supervisor is killed,
none can start. Callers of the others never notice, callers of the one hear of it in time."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from kestrel_client import AsyncKestrelClient
from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from tests.abuse.fake_server import FAIL, NO_END, WALL
from tests.abuse.process import ROOT, ServerProcess
from tests.forking.process import run_forked
from tests.service.statuses import failure
from tests.waiting import until, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="SO_REUSEPORT spreads on Linux")

Code = grpc.StatusCode
DEADLINE_S = 60.0
LOCAL = [("grpc.use_local_subchannel_pool", 1)]
"""A connection of its own: channels to one address share theirs otherwise."""
SPREAD = ("--spread", "connections")
LOGS = ("--log-format", "json", "--access-log", "json")


class Workers(ServerProcess):
    """A supervisor and two workers."""

    def __init__(self, folder: Path, *flags: str, listen: str = "127.0.0.1:0", **variables: str):
        super().__init__(
            folder, "--workers", "2", "--device", "cpu", *SPREAD, *LOGS, *flags, listen=listen, **variables,
        )  # fmt: skip
        wait_until(lambda: len(self.pids()) >= 2)

    def events(self, event: str) -> list[dict]:
        whole, _, _ = self.log.read_text().rpartition("\n")
        records = [json.loads(line) for line in whole.splitlines()]
        return [record for record in records if record.get("event") == event]

    async def until(self, what: Callable[[], bool]) -> None:
        await until(what, lambda: self.log.read_text()[-4000:])

    def pids(self) -> dict[int, int]:
        """Of the latest worker of each index."""
        return {record["worker"]: record["pid"] for record in self.events("worker_ready")}

    async def worker_of(self, request_id: str) -> int:
        """Who handled a call that has ended."""
        found: list[int] = []

        def look() -> bool:
            found.extend(e["worker"] for e in self.events("call") if e["request_id"] == request_id)
            return bool(found)

        await self.until(look)
        return found[0]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: unix sockets have no room for pytest's."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def query(request_id: str | None = None, max_tokens: int = 2) -> pb.QueryRequest:
    return pb.QueryRequest(
        query={"question": "what?", "max_tokens": max_tokens, "sampling": {"temperature": 0}},
        options=common_pb2.RequestOptions(request_id=request_id),
    )


@asynccontextmanager
async def stubs(server: Workers, count: int) -> AsyncIterator[list[tuple[int, VisionServiceStub]]]:
    """(worker, stub) of ``count`` connections; there is one to each worker at least."""
    async with AsyncExitStack() as stack:
        found = []
        for number in range(count):
            channel = await stack.enter_async_context(
                grpc.aio.insecure_channel(server.address, options=LOCAL)
            )
            stub = VisionServiceStub(channel)
            await stub.Query(query(f"probe-{number}"), timeout=DEADLINE_S)
            found.append((await server.worker_of(f"probe-{number}"), stub))
        assert {worker for worker, _ in found} == {0, 1}, "one in 2 ** (count - 1) fails"
        yield found


async def stream(
    stub: VisionServiceStub, max_tokens: int, metadata: tuple[tuple[str, str], ...] = ()
):
    """One that has begun to talk."""
    call = stub.StreamQuery(query(max_tokens=max_tokens), timeout=DEADLINE_S, metadata=metadata)
    events = aiter(call)
    for _ in range(2):
        await anext(events)
    return call


def some_of_each(connections: list[tuple[int, VisionServiceStub]]):
    """No more than a worker computes together."""
    return [each for worker in (0, 1) for each in [c for c in connections if c[0] == worker][:2]]


async def test_sigkill_of_a_worker_is_heard_by_its_callers_alone_and_it_comes_back(folder: Path):
    with Workers(folder, "--worker-listen", f"unix:{folder}/{{index}}") as server:
        assert server.address.startswith("127.0.0.1:")
        first = server.pids()
        async with stubs(server, 16) as connections:
            calls = [
                (worker, await stream(stub, 400)) for worker, stub in some_of_each(connections)
            ]
            others = [call for worker, call in calls if worker == 1]
            mine = [call for worker, call in calls if worker == 0]
            stub_of_dead = next(stub for worker, stub in connections if worker == 0)
            async with AsyncKestrelClient(server.address, channel_options=LOCAL) as client:
                os.kill(first[0], signal.SIGKILL)
                # The SDK's retries find the worker that lives, wherever its connection led.
                answers = await asyncio.gather(
                    *(client.query(None, "what?", max_tokens=2, temperature=0) for _ in range(3))
                )
                assert [answer.usage.output_tokens for answer in answers] == [2, 2, 2]
                told = await asyncio.gather(*map(failure, mine))
                assert {each.code for each in told} <= {Code.UNAVAILABLE}

            async def answered():
                """Whether a plain channel has reconnected. A call over the connection that breaks is lost."""
                call = stub_of_dead.Query(query("again"), timeout=DEADLINE_S, wait_for_ready=True)
                if await call.code() is Code.OK:
                    return await call
                assert await call.code() is Code.UNAVAILABLE

            assert (await until(answered)).usage.output_tokens == 2
            for call in others:
                events = [event async for event in call]
                assert events[-1].final.usage.output_tokens == 400, "nothing was lost"
        await server.until(lambda: len(server.events("worker_ready")) == 3)
        assert server.pids()[0] != first[0] and server.pids()[1] == first[1]
        async with stubs(server, 16), grpc.aio.insecure_channel(f"unix:{folder}/0") as own:
            await VisionServiceStub(own).Query(query("own"), timeout=DEADLINE_S)
            assert await server.worker_of("own") == 0, "its own address leads to it alone"
        server.stop(within_s=60)
        assert not any(map(alive, server.pids().values()))
        assert not (folder / "0").exists() and not (folder / "1").exists()


async def test_sigterm_lets_all_workers_end_their_requests(folder: Path):
    with Workers(folder) as server:
        async with stubs(server, 12) as connections:
            calls = [await stream(stub, 300) for _, stub in some_of_each(connections)]
            server.popen.send_signal(signal.SIGTERM)
            for call in calls:
                events = [event async for event in call]
                assert events[-1].final.usage.output_tokens == 300
        assert server.popen.wait(60) == 0
        assert {record["worker"] for record in server.events("stopped")} == {0, 1}


@pytest.mark.slow
async def test_a_worker_whose_step_hangs_ends_itself_and_is_started_anew(folder: Path):
    with Workers(folder, "--step-timeout", "1.5") as server:
        hung, other = server.pids()[0], server.pids()[1]
        async with stubs(server, 12) as connections:
            calls = [
                (worker, await stream(stub, 500)) for worker, stub in some_of_each(connections)
            ]
            server.hang.with_suffix(f".{hung}").touch()
            for worker, call in calls:
                if worker == 0:
                    told = await failure(call)
                    assert (told.code, told.reason) == (Code.INTERNAL, "COMPUTATION_FAILED")
                else:
                    events = [event async for event in call]
                    assert events[-1].final.usage.output_tokens == 500
            await server.until(lambda: len(server.events("worker_ready")) == 3)
        assert server.pids()[0] != hung and server.pids()[1] == other
        assert not alive(hung)
        ended = server.events("worker_ended")
        assert [(each["worker"], each["error"]) for each in ended] == [(0, "the engine has died")]


async def test_sigkill_of_the_supervisor_ends_the_workers_and_frees_the_port(folder: Path):
    with Workers(folder, "--grace", "30") as server:
        pids = server.pids()
        async with stubs(server, 12) as connections:
            call = await stream(connections[0][1], 200)
            server.popen.kill()
            server.popen.wait(60)
            events = [event async for event in call]
            assert events[-1].final.usage.output_tokens == 200, "what ran may end"
        await server.until(lambda: not any(map(alive, pids.values())))
    with Workers(folder, listen=server.address):
        async with grpc.aio.insecure_channel(server.address, options=LOCAL) as channel:
            await VisionServiceStub(channel).Query(query(), timeout=DEADLINE_S)
        for flags in ([], ["--workers", "2", "--device", "cpu", *SPREAD]):
            refused = run("--listen", server.address, *flags)
            assert refused.returncode == 1
            assert refused.stderr == (
                f"kestrel-grpc serve: error: cannot listen on {server.address}: "
                "address already in use; is another server running?\n"
            )


async def test_a_second_signal_ends_all_at_once(folder: Path):
    with Workers(folder, "--worker-listen", f"unix:{folder}/{{index}}") as server:
        async with grpc.aio.insecure_channel(f"unix:{folder}/1") as channel:
            call = await stream(VisionServiceStub(channel), NO_END)
            server.popen.send_signal(signal.SIGTERM)
            await server.until(lambda: len(server.events("draining")) == 2)
            server.popen.send_signal(signal.SIGTERM)
            # Calls that end by themselves would make this 0.
            assert server.popen.wait(60) == 128 + signal.SIGTERM
            assert (await failure(call)).code is Code.UNAVAILABLE
        await server.until(lambda: not any(map(alive, server.pids().values())))
        assert not (folder / "0").exists() and not (folder / "1").exists()


def run(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A server that can't start."""
    return run_forked(
        [sys.executable, "-m", "tests.abuse.fake_server", "--log-level", "error", *flags],
        cwd=ROOT,
        env={**os.environ, **variables},
        text=True,
    )


def test_a_worker_that_cannot_start_ends_the_start_with_one_line():
    flags = ("--workers", "2", "--device", "cpu", "--listen", "127.0.0.1:0", *SPREAD)
    done = run(*flags, **{FAIL: "no weights here"})
    assert done.returncode == 1 and done.stdout == ""
    error = done.stderr.replace("worker 1", "worker 0")
    assert error == "kestrel-grpc serve: error: worker 0 failed: no weights here\n"


async def test_workers_share_a_principals_budget_also_after_one_is_killed(folder):
    """Each call uses the same tokens, and the budget holds ten calls, whichever worker has them."""
    asked = pb.QueryRequest(
        query={"question": "what?", "max_tokens": 15, "sampling": {"temperature": 0}}
    )

    async def answered(address: str, most: int) -> tuple[int, int]:
        """The calls that were answered, and the tokens of each."""
        count = tokens = 0
        for _ in range(most):
            async with grpc.aio.insecure_channel(address, options=LOCAL) as channel:
                try:
                    response = await VisionServiceStub(channel).Query(asked, timeout=DEADLINE_S)
                except grpc.aio.AioRpcError as error:
                    assert error.code() is Code.RESOURCE_EXHAUSTED, error
                    continue
                count, usage = count + 1, response.usage
                tokens = usage.input_tokens + usage.output_tokens
        return count, tokens

    with Workers(folder) as server:
        _, tokens = await answered(server.address, 1)
    (again := folder / "again").mkdir()
    # No day ends meanwhile.
    with Workers(again, "--token-budget", f"day={10 * tokens}", **{WALL: "1.8e9"}) as server:
        assert (await answered(server.address, 6))[0] == 6
        pids = server.pids()
        os.kill(pids[0], signal.SIGKILL)
        await server.until(lambda: server.pids()[0] != pids[0])
        assert (await answered(server.address, 24))[0] == 4
