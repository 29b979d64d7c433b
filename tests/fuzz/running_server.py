"""A server with the fake runtime on sockets, in this thread's event loop, for inputs that are requests."""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import h11

from kestrel_engine import InferenceEngine, RuntimeConfig
from kestrel_engine.types.requests import Token
from kestrel_engine.types.step import RuntimeLimits
from kestrel_grpc.process.server import KestrelServer
from kestrel_grpc.settings.http import HttpConfig
from kestrel_grpc.settings.server import ServerConfig
from tests.engine.fakes import fake_build
from tests.fake_runtime import FakeRuntime

T = TypeVar("T")

_LIMITS = RuntimeLimits(
    num_pages=400, page_size=2, max_batch_size=3, max_seq_length=300, vocab_size=400
)


def _short(fed: tuple[Token, ...]) -> int:
    """An answer of a few letters: its length costs time and is not a fault."""
    last = fed[-1]
    if last not in range(100, 105):
        return 100
    return 0 if last == 104 else int(last) + 1


class RunningServer:
    """The server and its event loop. One in a process, because grpc.aio knows one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._faults = _Faults()
        self.server = self.run(self._start)

    def run(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Runs a request to its end. Raises AssertionError for an error in the server's log."""
        answer = self._loop.run_until_complete(ask())
        faults, self._faults.seen = self._faults.seen, []
        assert not faults, faults
        return answer

    async def _start(self) -> KestrelServer:
        logging.getLogger().addHandler(self._faults)
        settings = RuntimeConfig(max_batch_size=3)

        async def load() -> InferenceEngine:
            built = fake_build(settings, FakeRuntime(_LIMITS, _short), "moondream3")
            return InferenceEngine(settings, built, observer=server.telemetry)

        config = ServerConfig(
            listen=("127.0.0.1:0",), http=HttpConfig(http_listen=("127.0.0.1:0",))
        )
        server = KestrelServer(config, settings, load)
        await server.start()
        await server.load()
        return server

    async def post(self, path: str, kind: str, body: bytes) -> tuple[int, bytes]:
        """The status and body of the answer to a POST on the HTTP port."""
        host, _, port = self.server.http_addresses[0].rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            client = h11.Connection(h11.CLIENT)
            headers = {
                "host": "127.0.0.1",
                "content-type": kind,
                "content-length": str(len(body)),
                "connection": "close",
            }
            request = h11.Request(method="POST", target=path, headers=list(headers.items()))
            for event in (request, h11.Data(data=body), h11.EndOfMessage()):
                writer.write(client.send(event) or b"")
            client.receive_data(await reader.read())
            status, answer = 0, b""
            while (event := client.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    answer += bytes(event.data)
                elif isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
                    return status, answer
            raise AssertionError(f"{path}: no whole answer, status {status}")
        finally:
            writer.close()


@functools.cache
def running_server() -> RunningServer:
    return RunningServer()


class _Faults(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(self.format(record))
