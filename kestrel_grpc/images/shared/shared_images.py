"""SharedImages: reads and writes the images that several servers share. Nothing here fails a call.

An operation waits at most for the setting's time. What runs longer is cancelled. Several calls that ask for one image
share one read. A failure is counted, and is logged at most every minute.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from kestrel_engine import clock

from ...settings.shared_images import SharedImagesConfig
from ..store import StoredImage
from .breaker import Breaker
from .flight_room import FlightRoom, RoomFull
from .records import OVERHEAD_BYTES, Deleted, Records, Unreadable
from .redis_backend import DamagedValue, RedisBackend, StoredValue

logger = logging.getLogger(__name__)

Operation = Literal["get", "put", "delete", "check"]
Outcome = Literal[
    "hit", "miss", "gone", "damaged", "stored", "deleted", "too_large", "full", "failed", "paused"
]
_T = TypeVar("_T")

_IMAGE_ID = re.compile(r"img_[0-9a-f]{32}")
_LARGE_BYTES = 1 << 18
"""Values of more bytes are packed and unpacked on a thread."""
_LOG_INTERVAL_S = 60.0
_PART_OF_DEADLINE = 0.5
"""A call waits at most for this part of its time to write or to delete, so that it can still answer."""
_PART_FOR_ROOM = 0.5
_CHECK_INTERVAL_S = 60.0
_MOST_CHECKED = 10_000


@dataclass(frozen=True, slots=True)
class SharedImageEvent:
    """One operation. ``num_bytes``: of the value that was read or written."""

    operation: Operation
    outcome: Outcome
    seconds: float
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class FetchResult:
    """``image``: None if the store has none, or if ``answered`` is False."""

    image: StoredImage | None
    answered: bool


_NOWHERE = FetchResult(None, True)


class SharedImages:
    """Belongs to one event loop."""

    def __init__(
        self,
        config: SharedImagesConfig,
        backend: RedisBackend,
        records: Records,
        on_event: Callable[[SharedImageEvent], None] = lambda event: None,
    ) -> None:
        self._config, self._backend, self._records = config, backend, records
        self._on_event = on_event
        self.breaker = Breaker()
        self._room = FlightRoom(
            config.flight_bytes + OVERHEAD_BYTES, _PART_FOR_ROOM * config.timeout_s
        )
        self._most_bytes = config.value_bytes + OVERHEAD_BYTES
        self._reads: dict[tuple[str, str], asyncio.Task[FetchResult]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        """The others."""
        self._logged_at: float | None = None
        self._checked_at: OrderedDict[tuple[str, str], float] = OrderedDict()
        """When each image that is known to be in the store was last seen there, the oldest first."""

    @classmethod
    def open(
        cls, config: SharedImagesConfig, on_event: Callable[[SharedImageEvent], None]
    ) -> SharedImages | None:
        """None if the configuration names no store. Connects to nothing yet. Raises ConfigError."""
        if config.url is None:
            return None
        return cls(config, RedisBackend(config), Records.open(config), on_event)

    def start(self) -> None:
        """Starts a read of an image that does not exist, so that a store that does not answer is logged at once."""
        self._begin(self.fetch("", f"img_{'0' * 32}"))

    async def fetch(self, owner: str, image_id: str) -> FetchResult:
        """The owner's image with this id."""
        if not _IMAGE_ID.fullmatch(image_id):
            return _NOWHERE
        key = owner, image_id
        task = self._reads.get(key)
        if task is None:
            task = self._reads[key] = asyncio.create_task(self._fetch(owner, image_id))
            task.add_done_callback(lambda _: self._reads.pop(key, None))
        # A call that ends does not end the read of the others.
        return await asyncio.shield(task)

    async def put(self, owner: str, image: StoredImage, left_s: float | None = None) -> None:
        """Writes an image, and waits for it as long as the setting and ``left_s``, the call's time, allow."""
        await self._finish(self._put(owner, image), left_s)

    async def delete(self, owner: str, image_id: str, left_s: float | None = None) -> bool:
        """Returns whether the store had the image, as far as it answered."""
        if not _IMAGE_ID.fullmatch(image_id):
            return False
        return await self._finish(self._delete(owner, image_id), left_s)

    def check(self, owner: str, image_id: str, drop: Callable[[], object]) -> None:
        """Starts to check whether an image that this server holds was deleted by way of another server. Then calls
        ``drop``. Does nothing if the image is not known to be shared, or was checked less than a minute ago."""
        key = owner, image_id
        last = self._checked_at.get(key)
        if last is None or clock.now() - last < _CHECK_INTERVAL_S:
            return
        self._saw(key)
        self._begin(self._check(owner, image_id, drop))

    async def close(self) -> None:
        """Waits for writes that run, at most for the setting's time."""
        tasks = {*self._tasks, *self._reads.values()}
        if tasks:
            await asyncio.wait(tasks, timeout=self._config.timeout_s)
        for task in tasks:
            task.cancel()
        try:
            async with asyncio.timeout(self._config.timeout_s):
                await self._backend.close()
        except Exception:  # The server stops all the same.
            logger.debug("the shared image store was not closed", exc_info=True)

    def _begin(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _finish(self, work: Coroutine[Any, Any, bool], left_s: float | None) -> bool:
        task = self._begin(work)
        most_s = None if left_s is None else _PART_OF_DEADLINE * max(0.0, left_s)
        done, _ = await asyncio.wait({task}, timeout=most_s)
        return bool(done) and not task.cancelled() and task.result()

    async def _fetch(self, owner: str, image_id: str) -> FetchResult:
        async def read() -> tuple[Outcome, int, StoredImage | None]:
            async with self._backend.opened(owner, image_id) as value:
                if value is None:
                    return "miss", 0, None
                if value.num_bytes > self._most_bytes:
                    return "too_large", 0, None
                async with self._room.reserved(owner, value.num_bytes):
                    data = await value.read()
                    image = await self._computed(
                        len(data), lambda: self._records.unpack(owner, image_id, data)
                    )
                    self._saw((owner, image_id))
                    return "hit", len(data), image

        outcome, image = await self._run("get", read)
        return FetchResult(image, outcome not in ("failed", "paused", "full"))

    async def _put(self, owner: str, image: StoredImage) -> bool:
        async def write() -> tuple[Outcome, int, None]:
            num_bytes = image.num_bytes + OVERHEAD_BYTES
            if image.num_bytes > min(self._config.value_bytes, self._config.caller_bytes):
                return "too_large", 0, None
            async with self._room.reserved(owner, num_bytes):
                value = await self._computed(num_bytes, lambda: self._records.pack(owner, image))
                await self._store(owner, image.image_id, value)
                self._saw((owner, image.image_id))
                return "stored", len(value), None

        outcome, _ = await self._run("put", write)
        return outcome == "stored"

    async def _store(self, owner: str, image_id: str, value: bytes) -> None:
        most = self._config.caller_bytes + OVERHEAD_BYTES
        await self._backend.put(owner, image_id, value, ttl_s=self._config.ttl_s, owner_bytes=most)

    async def _delete(self, owner: str, image_id: str) -> bool:
        async def delete() -> tuple[Outcome, int, None]:
            async with self._backend.opened(owner, image_id) as value:
                if value is None or await self._says_deleted(owner, image_id, value):
                    return "miss", 0, None
            await self._backend.delete(owner, image_id)
            await self._store(owner, image_id, self._records.pack_deleted(owner, image_id))
            return "deleted", 0, None

        outcome, _ = await self._run("delete", delete)
        return outcome == "deleted"

    async def _check(self, owner: str, image_id: str, drop: Callable[[], object]) -> bool:
        async def check() -> tuple[Outcome, int, None]:
            async with self._backend.opened(owner, image_id) as value:
                if value is None:  # It has expired, or other images have taken its place.
                    return "miss", 0, None
                is_gone = await self._says_deleted(owner, image_id, value)
            if is_gone:
                drop()
            return "gone" if is_gone else "hit", 0, None

        outcome, _ = await self._run("check", check)
        return outcome == "gone"

    async def _says_deleted(self, owner: str, image_id: str, value: StoredValue) -> bool:
        if value.num_bytes > OVERHEAD_BYTES:
            return False
        try:
            self._records.unpack(owner, image_id, await value.read())
        except Deleted:
            return True
        except Unreadable:
            pass
        return False

    def _saw(self, key: tuple[str, str]) -> None:
        self._checked_at[key] = clock.now()
        self._checked_at.move_to_end(key)
        if len(self._checked_at) > _MOST_CHECKED:
            self._checked_at.popitem(last=False)

    async def _run(
        self,
        operation: Operation,
        work: Callable[[], Awaitable[tuple[Outcome, int, StoredImage | None]]],
    ) -> tuple[Outcome, StoredImage | None]:
        started = clock.now()
        outcome: Outcome
        num_bytes, image = 0, None
        if not self.breaker.enter():
            outcome = "paused"
        else:
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    outcome, num_bytes, image = await work()
                self.breaker.succeeded()
            except asyncio.CancelledError:
                self.breaker.left()
                raise
            except Deleted:
                self.breaker.succeeded()
                outcome = "miss"
            except (Unreadable, DamagedValue) as damage:
                self.breaker.succeeded()
                outcome = "damaged"
                self._log("an image in the shared image store is not used: %s", damage)
            except RoomFull:
                self.breaker.left()
                outcome = "full"
            except Exception as error:  # The store and its library may raise anything.
                self.breaker.failed()
                outcome = "failed"
                self._log(
                    "the shared image store failed (%s: %s); this server continues without it",
                    operation,
                    reason_of(error, self._config.timeout_s),
                )
        self._on_event(SharedImageEvent(operation, outcome, clock.now() - started, num_bytes))
        return outcome, image

    async def _computed(self, num_bytes: int, work: Callable[[], _T]) -> _T:
        return await asyncio.to_thread(work) if num_bytes > _LARGE_BYTES else work()

    def _log(self, message: str, *values: object) -> None:
        now = clock.now()
        if self._logged_at is None or now - self._logged_at >= _LOG_INTERVAL_S:
            self._logged_at = now
            logger.warning(message, *values)


def reason_of(error: Exception, timeout_s: float) -> str:
    """Why an operation on the store failed, in one line."""
    if isinstance(error, TimeoutError):
        return f"no answer in {timeout_s:g} s"
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
