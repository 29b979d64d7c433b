"""CallWatchers: they receive the events of each call. Telemetry, the access log and counters are among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .call import Call


class CallWatcher(Protocol):
    """Receives the events of every call. Its methods must not raise.

    ``on_message`` is called when the request's id is known: when it is read, or the stream of its parts begins.
    """

    def begin(self, call: Call) -> None: ...

    def on_message(self, call: Call) -> None: ...

    def end(self, call: Call) -> None: ...


class CallWatchers:
    """``at_end``: called with each call that has ended, before ``watcher``. ``watcher``: of all events."""

    def __init__(self, *at_end: Callable[[Call], None], watcher: CallWatcher | None = None) -> None:
        self._at_end, self._watcher = at_end, watcher

    def begin(self, call: Call) -> None:
        if self._watcher is not None:
            self._watcher.begin(call)

    def on_message(self, call: Call) -> None:
        if self._watcher is not None:
            self._watcher.on_message(call)

    def end(self, call: Call) -> None:
        for note in self._at_end:
            note(call)
        if self._watcher is not None:
            self._watcher.end(call)
