"""UsageLog: what each principal used, by model and adapter, as lines of JSON. Owns what is not written yet.

Every EVERY_S seconds, and when the server stops, it appends a line for each principal, model and adapter with requests
that have ended since. Each hour (UTC) has a file of its own. What could not be written is in the next lines.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from kestrel_engine import RequestEvent, clock

from ..logs.appending import LineFile, stamp
from ..telemetry.usage import Usage, usage_of

logger = logging.getLogger(__name__)

EVERY_S = 10.0
MOST_KEYS = 10_000
"""Limit on the sums in memory. Beyond it, further principals of a model have one sum, under OTHERS."""
OTHERS = "other"

_Key = tuple[str, str, str]
"""Principal, model, adapter."""


class UsageLog:
    """Writes into ``folder``. ``most_bytes``: limit on the bytes of all its files; the oldest ones are deleted.
    ``worker``: the index of this worker, which has files of its own; None without workers."""

    def __init__(self, folder: str, most_bytes: int, worker: int | None = None) -> None:
        self._folder, self._most_bytes = Path(folder), most_bytes
        self._suffix = "" if worker is None else f"-worker{worker}"
        self._used: dict[_Key, Usage] = {}
        self._since = clock.wall()
        self._writing = asyncio.Lock()
        self._has_complained = False
        self._path, self._file = self._folder, LineFile("")
        """Of the last lines."""

    @property
    def waiting(self) -> int:
        """Number of requests that no line holds yet."""
        return sum(used.requests for used in self._used.values())

    def on_request(self, event: RequestEvent, model: str) -> None:
        """Counts a request of the engine that has ended."""
        self._add((event.principal, model, event.adapter), usage_of([event]))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            await self.write()

    async def write(self) -> None:
        """Writes what was used since the last lines. An error is logged once until writing succeeds again."""
        async with self._writing:
            taken, self._used = self._used, {}
            since, until = self._since, clock.wall()
            if not taken:
                self._since = until
                return
            written, error = await asyncio.to_thread(self._write, taken, since, until)
            for key in list(taken)[written:]:
                self._add(key, taken[key])
            if error is None:
                self._since = until
            elif not self._has_complained:
                logger.error(
                    "usage waits, because %s can't be written: %s", self._folder, error.strerror
                )
            self._has_complained = error is not None

    def _add(self, key: _Key, used: Usage) -> None:
        if key not in self._used and len(self._used) >= MOST_KEYS:
            key = (OTHERS, key[1], "")
        self._used[key] = self._used.get(key, Usage()).plus(used)

    def _write(
        self, used: dict[_Key, Usage], since: float, until: float
    ) -> tuple[int, OSError | None]:
        """Appends lines. Returns their number, and the error that prevented further ones."""
        name = f"usage-{datetime.fromtimestamp(until, UTC):%Y%m%dT%H}Z{self._suffix}.jsonl"
        path, written = self._folder / name, 0
        span = {"from": stamp(since), "to": stamp(until)}
        lines = []
        for (principal, model, adapter), sums in used.items():
            who = {"principal": principal, "model": model, "adapter": adapter}
            fields = span | who | sums._asdict() | {"device_s": round(sums.device_s, 9)}
            lines.append(json.dumps(fields).encode() + b"\n")
        try:
            self._make_room(path, sum(map(len, lines)))
            if path != self._path:
                self._path, self._file = path, LineFile(str(path))
            for line in lines:
                self._file.write(line)
                written += 1
        except OSError as error:
            return written, error
        return written, None

    def _make_room(self, path: Path, num_bytes: int) -> None:
        """Deletes the oldest files so that ``path`` may grow by ``num_bytes``. Raises OSError if it is too large."""
        files = sorted(each for each in self._folder.glob("usage-*.jsonl") if each != path)
        total = num_bytes + _size(path) + sum(map(_size, files))
        while total > self._most_bytes and files:
            oldest = files.pop(0)
            total -= _size(oldest)
            logger.warning(
                "usage log: %s is deleted, because the files have reached their limit", oldest
            )
            with suppress(FileNotFoundError):
                oldest.unlink()
        if total > self._most_bytes:
            raise OSError(
                errno.EFBIG, f"{path.name} has reached the limit of {self._most_bytes} bytes"
            )


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0
