"""Upload: one picture file that arrives in pieces. Owns the checks made meanwhile, and what all uploads may hold.

Nothing is kept anywhere else until ``finish`` has given the file.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from kestrel_client._pb.kestrel.v1 import image_service_pb2 as pb
from kestrel_engine import ImageTooLargeError, InvalidRequest

from ..edge.statuses import UploadsFull


class UploadRoom:
    """The bytes that unfinished uploads hold together, bounded by ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.used_bytes = max_bytes, 0

    def take(self, num_bytes: int) -> None:
        """Raises UploadsFull."""
        if self.used_bytes + num_bytes > self.max_bytes:
            raise UploadsFull(
                f"unfinished uploads hold {self.used_bytes} of {self.max_bytes} bytes; try again soon"
            )
        self.used_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.used_bytes -= num_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """What came of an upload."""

    info: pb.UploadInfo | None
    chunks: tuple[bytes, ...]


class Upload:
    """``take`` every message, then ``finish``; ``close`` in any case. Raises as soon as something is wrong."""

    def __init__(self, max_bytes: int, room: UploadRoom) -> None:
        self._max_bytes, self._room = max_bytes, room
        self._info: pb.UploadInfo | None = None
        self._chunks: list[bytes] = []
        self._size = 0
        self._digest = hashlib.sha256()

    def take(self, message: pb.UploadImageRequest) -> None:
        """Raises InvalidRequest, ImageTooLargeError, UploadsFull."""
        part = message.WhichOneof("part")
        if part == "info":
            self._begin(message.info)
        elif part == "chunk":
            self._append(message.chunk)
        else:
            raise InvalidRequest("", "the message holds nothing: set info or chunk")

    def finish(self) -> bytes:
        """The whole file. Raises InvalidRequest if it is not what ``info`` told."""
        if self._info is None:
            raise InvalidRequest("info", "is required: the upload holds no message")
        if self._info.HasField("size_bytes") and self._size != self._info.size_bytes:
            raise InvalidRequest(
                "info.size_bytes",
                f"is {self._info.size_bytes}, but {self._size} bytes came: the upload was cut short",
            )
        if self._info.HasField("sha256") and self._digest.digest() != self._info.sha256:
            raise InvalidRequest("info.sha256", "is not that of the bytes that came")
        return b"".join(self._chunks)

    def taken(self) -> Taken:
        """What came so far; survives ``close``."""
        return Taken(self._info, tuple(self._chunks))

    def close(self) -> None:
        """Lets everything go. Idempotent."""
        self._room.give_back(self._size)
        self._chunks.clear()
        self._size = 0

    def _begin(self, info: pb.UploadInfo) -> None:
        if self._info is not None:
            raise InvalidRequest("info", "must come once, first")
        if info.HasField("size_bytes"):
            if info.size_bytes < 1:
                raise InvalidRequest("info.size_bytes", "must be at least 1")
            self._check_size("info.size_bytes", info.size_bytes)
        if info.HasField("sha256") and len(info.sha256) != self._digest.digest_size:
            raise InvalidRequest("info.sha256", f"has {len(info.sha256)} bytes, a SHA-256 has 32")
        self._info = info

    def _append(self, chunk: bytes) -> None:
        if self._info is None:
            raise InvalidRequest("info", "must come before the first chunk")
        size = self._size + len(chunk)
        self._check_size("chunk", size)
        if self._info.HasField("size_bytes") and size > self._info.size_bytes:
            raise InvalidRequest(
                "chunk", f"goes beyond the {self._info.size_bytes} bytes that info.size_bytes tells"
            )
        self._room.take(len(chunk))
        self._size = size
        self._chunks.append(chunk)
        self._digest.update(chunk)

    def _check_size(self, field: str, size: int) -> None:
        if size > self._max_bytes:
            raise ImageTooLargeError(field, f"has {size} bytes, the limit is {self._max_bytes}")
