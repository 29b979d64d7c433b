"""BoundedContext: a call's context whose writes wait for a slow reader only so long."""

from __future__ import annotations

import asyncio
from typing import Any

from ..errors import SlowReader


class BoundedContext:
    """Everything but ``write`` is the call's own ``context``."""

    def __init__(self, context: Any, limit_s: float) -> None:
        self._context, self._limit_s = context, limit_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        """gRPC takes a message at once until the reader is behind by a window. Raises SlowReader."""
        try:
            async with asyncio.timeout(self._limit_s):
                await self._context.write(message)
        except TimeoutError:
            raise SlowReader(
                f"the stream was not read for {self._limit_s:g} s; it has been ended"
            ) from None
