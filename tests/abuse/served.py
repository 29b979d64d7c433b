"""ServedInThread: a real server with the fake runtime on an event loop of its own thread, for callers that block.

Owns the loop and what is known of the server from outside: whether it is at rest, and what it complained of.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading

from kestrel_engine import InferenceEngine, RuntimeConfig
from kestrel_engine.types.requests import Token
from kestrel_engine.types.step import RuntimeLimits
from kestrel_grpc.process.server import KestrelServer
from kestrel_grpc.settings.batches import BatchesConfig
from kestrel_grpc.settings.security import SecurityConfig
from kestrel_grpc.settings.server import ServerConfig
from tests.engine.fakes import fake_build
from tests.fake_runtime import FakeRuntime, hashed
from tests.waiting import wait_until

KEY = "the-key-of-an-administrator"
METADATA = (("authorization", f"Bearer {KEY}"),)

LIMITS = RuntimeLimits(
    num_pages=600, page_size=2, max_batch_size=4, max_seq_length=400, vocab_size=400
)

_STOP = 0
"""The end of an answer, in the models' numbers."""


def short(fed: tuple[Token, ...]) -> int:
    """Says a thing or two and stops: as often as not at once, coordinates and sizes too where they are allowed."""
    choice = hashed(fed[-3:])
    return (_STOP, 5, 6, 3, 100 + choice % 250)[choice % 5]


class Complaints(logging.Handler):
    """Warnings and worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


class ServedInThread:
    """A context; ``address`` is where it serves. ``keeps``: whether images are kept for later calls."""

    def __init__(self, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="abused-server")
        self._complaints = Complaints()
        self.address = ""
        self._folder = tempfile.TemporaryDirectory()

    async def _start(self) -> KestrelServer:
        config = RuntimeConfig(
            max_batch_size=LIMITS.max_batch_size,
            default_max_tokens=8,
            image_cache_bytes=2**28 if self._keeps else 0,
        )

        async def load_engine() -> InferenceEngine:
            built = fake_build(config, FakeRuntime(LIMITS, short))
            return InferenceEngine(config, built, observer=server.telemetry)

        security = SecurityConfig(api_key=KEY)
        settings = ServerConfig(
            listen=("127.0.0.1:0",),
            security=security,
            image_store_bytes=2**28 if self._keeps else 0,
            batches=BatchesConfig(path=f"{self._folder.name}/batches.db"),
        )
        server = KestrelServer(settings, config, load_engine)
        await server.start()
        await server.load()
        return server

    def assert_at_rest(self) -> None:
        """Nothing that a call brought is left, and nothing was complained of."""
        server, engine = self._server, self._server.served.default.loaded
        assert engine is not None
        admission = server.guard.admission

        def left() -> dict[str, int]:
            stats = engine.stats
            return {
                "calls": server.in_flight.count,
                "admitted": admission.calls,
                "held bytes": server.guard.held_bytes,
                "requests": engine.num_requests,
                "running": stats.running,
                "waiting": stats.waiting,
                "pages": stats.pages_held,
            }

        wait_until(lambda: not any(left().values()), left)
        assert self._complaints.lines == []

    def __enter__(self) -> ServedInThread:
        logging.getLogger().addHandler(self._complaints)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(60)
        self.address = self._server.addresses[0]
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(0), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()
        self._folder.cleanup()
        logging.getLogger().removeHandler(self._complaints)
