"""BudgetFile: stores what principals have used of their budgets, so that a restart gives no tokens back."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from contextlib import suppress

from kestrel_engine import ConfigError, read_small_file

from .admission.budgets import Budgets
from .files import writable_by_all

logger = logging.getLogger(__name__)

EVERY_S = 10.0
"""A killed process forgets what was used in this time."""
_MOST_BYTES = 1 << 24


class BudgetFile:
    """The file at ``path``, with ``worker``: at ``path``.workerN. Reads it. Raises ConfigError."""

    def __init__(self, path: str, budgets: Budgets, worker: int | None = None) -> None:
        self._path = path if worker is None else f"{path}.worker{worker}"
        self._budgets, self._saved, self._has_complained = budgets, "", False
        try:
            if writable_by_all(self._path):
                raise ValueError("every user of this machine may write it: chmod o-w")
            budgets.restore(json.loads(read_small_file(self._path, _MOST_BYTES)))
        except FileNotFoundError:
            self._write("{}")
        except (OSError, ValueError, RecursionError) as error:
            why = (error.strerror if isinstance(error, OSError) else "") or str(error)
            raise self._error(f"cannot be read: {why}") from None

    async def run(self) -> None:
        """Stores changes again and again."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self.save()

    async def save(self) -> None:
        """Replaces the file, unless it has the state. An error is logged once until this succeeds again."""
        text = json.dumps(self._budgets.state())
        if text == self._saved:
            return
        try:
            await asyncio.to_thread(self._write, text)
        except ConfigError as error:
            if not self._has_complained:
                logger.error("%s", error)
            self._has_complained = True
        else:
            self._saved, self._has_complained = text, False

    def _write(self, text: str) -> None:
        part = f"{self._path}.part"
        try:
            with suppress(FileNotFoundError):
                os.unlink(part)
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(descriptor, "w", encoding="ascii") as file:
                file.write(text)
                file.flush()
                os.fsync(descriptor)
            os.replace(part, self._path)
        except OSError as error:
            raise self._error(f"cannot be written: {error.strerror}") from None

    def _error(self, why: str) -> ConfigError:
        return ConfigError("token_budget", f"file={self._path}", why)
