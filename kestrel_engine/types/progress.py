"""Progress: the callback that reports how far downloading, loading or capturing is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""Called with bytes done, bytes in total (0: not known) and the name of the current item."""
