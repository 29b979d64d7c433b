"""Shows the progress of a model's startup: one line that changes on a terminal, otherwise a log line every 10 s."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import TracebackType

from kestrel_engine import clock

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]

_LOG_INTERVAL_S = 10.0
_DRAW_INTERVAL_S = 0.1
_MB = 1e6


class LoadingProgress:
    """The engine's progress callback. The thread that loads calls it. As a context manager, it clears its line at exit.

    ``draws``: whether this process may draw on the terminal; False if several processes share it.
    """

    def __init__(self, *, draws: bool = True) -> None:
        self._terminal = draws and sys.stderr.isatty()
        self._last = clock.now()
        self._drawn = False

    def __call__(self, done: int, total: int, what: str) -> None:
        now = clock.now()
        if now - self._last < (_DRAW_INTERVAL_S if self._terminal else _LOG_INTERVAL_S):
            return
        self._last = now
        share = f"{100 * done / total:3.0f} %" if total else "  ? %"
        # Small totals do not count bytes, but for example graphs.
        amount = f"{total / _MB:,.0f} MB" if total >= _MB else f"{total:,}"
        line = f"{what}: {share} of {amount}"
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
            self._drawn = True
        else:
            logger.info("%s", line)

    def __enter__(self) -> LoadingProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def shown_by(*callbacks: Progress) -> Progress:
    """Returns a callback that calls all ``callbacks``."""

    def shown(done: int, total: int, step: str) -> None:
        for callback in callbacks:
            callback(done, total, step)

    return shown
