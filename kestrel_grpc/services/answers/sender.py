"""Sender: writes the events of a stream, which may come from several tasks at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from ...edge.calls.call import Context


class Sender:
    """Counts the events of one stream. ``message``: the type of its messages."""

    def __init__(self, context: Context, message: Callable[..., Any]) -> None:
        self._context, self._message = context, message
        self._sequence, self._writing = 0, asyncio.Lock()
        self.is_shared = False
        """Several tasks or requests send events at the same time."""
        self.failure: Exception | None = None
        """The error of the event that could not be sent. It is no failure of the task."""

    async def send(self, event: Mapping[str, Any], key: str = "") -> None:
        """Sends an event. ``event``: its one field, by name. ``key``: of its task, in a stream of several tasks."""
        if key:
            event = {**event, "key": key}
        if not self.is_shared:
            await self._write(event)
            return
        # gRPC allows one write at a time, and none after one that was given up.
        async with self._writing:
            if self.failure is not None:
                raise self.failure
            await self._write(event)

    async def _write(self, event: Mapping[str, Any]) -> None:
        try:
            await self._context.write(self._message(sequence=self._sequence, **event))
        except Exception as error:
            self.failure = error
            raise
        self._sequence += 1
