"""CallWatcher: what the edge reports to telemetry about each call."""

from __future__ import annotations

from typing import Protocol

from .call import Call


class CallWatcher(Protocol):
    """Receives the events of every call. Its methods must not raise.

    ``on_message`` is called when the request's id is known: when it is read, or the stream of its parts begins.
    """

    def begin(self, call: Call) -> None: ...

    def on_message(self, call: Call) -> None: ...

    def end(self, call: Call) -> None: ...
