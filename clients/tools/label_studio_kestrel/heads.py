"""HeadLimit: ends connections whose requests' heads take too long, so that none holds a place for ever."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0
"""Seconds from the beginning of a connection, or of a request, to the end of its head."""


class HeadLimit(H11Protocol):
    """uvicorn bounds the bytes of a head, and the time between two requests."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def _waits_for_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        if not self._waits_for_head():
            self._stop_watching()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_S, self._end)

    def _stop_watching(self) -> None:
        if self._late is not None:
            self._late.cancel()
        self._late = None

    def _end(self) -> None:
        self._late = None
        if self._waits_for_head():
            self.transport.abort()
