"""Lifetime: whether the engine takes requests. Owns the stages closing and closed, and the failure that ends it."""

from __future__ import annotations

from ..errors import EngineClosed, KestrelError
from ..steps.loop import EngineLoop


class Lifetime:
    """The stages go one way: open, closing, closed. A failure may come at any time. For one event loop."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._is_closing = self._is_closed = False
        self._failure: KestrelError | None = None

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted now."""
        return not self._is_closing and self._failure is None and self._loop.alive

    @property
    def is_running(self) -> bool:
        """Whether the step thread runs, also while the engine closes."""
        return not self._is_closed and self._loop.alive

    def closing(self) -> None:
        """From now on no request is accepted."""
        self._is_closing = True

    def closed(self) -> None:
        """From now on nothing is computed."""
        self._is_closed = True

    def failed(self, failure: KestrelError) -> None:
        self._failure = failure

    def check_open(self) -> None:
        """Raises EngineClosed unless requests are accepted."""
        if self._is_closing:
            raise EngineClosed("the engine is shutting down")
        self.check_alive()

    def check_alive(self) -> None:
        """Raises EngineClosed unless the step thread can compute accepted requests."""
        if self._is_closed:
            raise EngineClosed("the engine was shut down")
        if self._failure is not None:
            raise EngineClosed(f"the engine has failed: {self._failure}")
        if not self._loop.alive:
            raise EngineClosed("the engine's step thread has died")
