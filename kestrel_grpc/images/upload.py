"""Upload: an image file that arrives in several messages. UploadRoom limits the bytes of all unfinished uploads.

An upload is checked while it arrives. Its bytes are stored nowhere else before ``finish`` returns the file.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from kestrel_client._pb.kestrel.v1 import image_service_pb2 as pb
from kestrel_engine import (
    DeadlineExceeded,
    FairShares,
    FieldPath,
    ImageTooLargeError,
    InvalidRequest,
    Member,
    Quota,
)

from ..edge.failures.errors import UploadsFull


class _Uploader(Member):
    """A principal that uploads. It holds the bytes that arrived. ``uploads``: the one with the oldest last message
    first."""

    def __init__(self, principal: str, weight: float) -> None:
        super().__init__(principal, weight)
        self.uploads: dict[Upload, None] = {}


class UploadRoom:
    """Limits the bytes of all unfinished uploads together to ``max_bytes``.

    Each principal that uploads has a share according to its weight. It may use more while room is left. If no room is
    left, and an upload of a principal within its share needs some, the room ends another upload: of the principal that
    exceeds its share most, the upload that has waited longest for a message.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._shares: FairShares[_Uploader] = FairShares(max_bytes)

    @property
    def used_bytes(self) -> int:
        return self._shares.held

    def enter(self, upload: Upload) -> None:
        name, weight = upload.principal, upload.weight
        own = self._shares.members.get(name) or _Uploader(name, weight)
        self._shares.enter(own)
        own.uploads[upload] = None

    def leave(self, upload: Upload) -> None:
        """Frees the bytes of an upload. Idempotent."""
        own = self._shares.members.get(upload.principal)
        if own is not None and upload in own.uploads:
            del own.uploads[upload]
            self._shares.hold(own, -upload.num_bytes)
            self._shares.leave(own)

    def reserve(self, upload: Upload, num_bytes: int) -> None:
        """Reserves ``num_bytes`` for the next message of ``upload``. Raises UploadsFull."""
        own = self._shares.members[upload.principal]
        own.uploads[upload] = own.uploads.pop(upload)
        while self.used_bytes + num_bytes > self.max_bytes:
            above = [] if self._shares.exceeds(own, num_bytes) else self._shares.above(own)
            waiting = (each for each in above[0].uploads if each.displace_with) if above else ()
            victim = next(iter(waiting), None)
            if victim is None:
                quota = self._quota(own)
                raise UploadsFull(
                    f"unfinished uploads hold {self.used_bytes} of {self.max_bytes} bytes, {_describe(quota)}; try "
                    "again soon",
                    quota=quota,
                )
            quota = self._quota(above[0])
            self.leave(victim)
            why = "the server ended the upload to make room for another caller's; this caller exceeded its share"
            victim.displace(UploadsFull(f"{why}, {_describe(quota)}", quota=quota))
        self._shares.hold(own, num_bytes)

    def _quota(self, own: _Uploader) -> Quota:
        return self._shares.quota(own, "bytes of unfinished uploads")


def _describe(quota: Quota) -> str:
    return f"of which {quota.holder} used {quota.held} with a share of {quota.share}"


@dataclass(frozen=True, slots=True, eq=False)
class ReceivedParts:
    """The parts of an upload that arrived."""

    info: pb.UploadInfo | None
    chunks: tuple[bytes, ...]


class Upload:
    """An upload in progress. Pass every message to ``add``, then call ``finish``; call ``close`` in any case.

    Each method raises an error as soon as the upload is known to be invalid.
    """

    def __init__(
        self, max_bytes: int, room: UploadRoom, *, principal: str = "", weight: float = 1.0
    ) -> None:
        self.principal, self.weight = principal, weight
        self.num_bytes = 0
        """Bytes of the chunks that arrived."""
        self.displace_with: Callable[[], None] | None = None
        """Wakes the task that waits for a message; None while no task waits."""
        self.displaced: UploadsFull | None = None
        self._max_bytes, self._room = max_bytes, room
        self._info: pb.UploadInfo | None = None
        self._chunks: list[bytes] = []
        self._digest = hashlib.sha256()
        room.enter(self)

    def displace(self, error: UploadsFull) -> None:
        """Drops the chunks that arrived. The task that waits for a message raises ``error``."""
        self.displaced = error
        self._chunks.clear()
        if self.displace_with is not None:
            self.displace_with()

    async def messages(
        self, requests: AsyncIterator[pb.UploadImageRequest], idle_s: float
    ) -> AsyncIterator[pb.UploadImageRequest]:
        """The messages of the call.

        Raises DeadlineExceeded if no message arrives for ``idle_s`` seconds, and UploadsFull if the room ended the
        upload in favour of another caller's.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout(idle_s) as timer:
                    self.displace_with = lambda timer=timer: timer.reschedule(loop.time())  # type: ignore[misc]
                    request = await anext(requests, None)
            except TimeoutError:
                if self.displaced is None:
                    raise DeadlineExceeded(
                        f"the upload received no data for {idle_s:g} s, the limit"
                    ) from None
            finally:
                self.displace_with = None
            if self.displaced is not None:
                raise self.displaced
            if request is None:
                return
            yield request

    def add(self, message: pb.UploadImageRequest) -> None:
        """Checks and adds a message. Raises InvalidRequest, ImageTooLargeError, UploadsFull."""
        part = message.WhichOneof("part")
        if part == "info":
            self._begin(message.info)
        elif part == "chunk":
            self._append(message.chunk)
        else:
            raise InvalidRequest("", "the message is empty; set info or chunk")

    def finish(self) -> bytes:
        """The whole file. Raises InvalidRequest if its size or hash is not the one in ``info``."""
        if self._info is None:
            raise InvalidRequest("info", "is required; the upload holds no message")
        if self._info.HasField("size_bytes") and self.num_bytes != self._info.size_bytes:
            raise InvalidRequest(
                ("info", "size_bytes"),
                f"is {self._info.size_bytes}, but {self.num_bytes} bytes arrived; the upload is incomplete",
            )
        if self._info.HasField("sha256") and self._digest.digest() != self._info.sha256:
            raise InvalidRequest(("info", "sha256"), "is not the hash of the bytes that arrived")
        return b"".join(self._chunks)

    def received(self) -> ReceivedParts:
        """The parts that have arrived. They stay valid after ``close``."""
        return ReceivedParts(self._info, tuple(self._chunks))

    def close(self) -> None:
        """Frees the upload's bytes. Idempotent."""
        self._room.leave(self)
        self._chunks.clear()

    def _begin(self, info: pb.UploadInfo) -> None:
        if self._info is not None:
            raise InvalidRequest("info", "must be the first message, and only that")
        if info.HasField("size_bytes"):
            if info.size_bytes < 1:
                raise InvalidRequest(("info", "size_bytes"), "must be at least 1")
            self._check_size(("info", "size_bytes"), info.size_bytes)
        if info.HasField("sha256") and len(info.sha256) != self._digest.digest_size:
            raise InvalidRequest(
                ("info", "sha256"), f"has {len(info.sha256)} bytes; a SHA-256 has 32"
            )
        self._info = info

    def _append(self, chunk: bytes) -> None:
        if self._info is None:
            raise InvalidRequest("info", "must come before the first chunk")
        size = self.num_bytes + len(chunk)
        self._check_size("chunk", size)
        if self._info.HasField("size_bytes") and size > self._info.size_bytes:
            raise InvalidRequest(
                "chunk", f"exceeds the {self._info.size_bytes} bytes that info.size_bytes declares"
            )
        self._room.reserve(self, len(chunk))
        self.num_bytes = size
        self._chunks.append(chunk)
        self._digest.update(chunk)

    def _check_size(self, field: str | FieldPath, size: int) -> None:
        if size > self._max_bytes:
            raise ImageTooLargeError(
                field,
                f"has {size} bytes; the limit is {self._max_bytes}",
                value=size,
                limit=self._max_bytes,
            )
