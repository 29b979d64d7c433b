"""RequestFraming: divides what a connection sends into requests, before h11 parses it. Owns limits on heads and chunks.

h11 accepts more than RFC 9112 allows: lines that end with a line feed alone, folded lines, both forms of a body's
length, chunks in HTTP/1.0, and all versions from 0.0 to 9.9. A proxy in front may divide the same bytes in another way
(request smuggling). h11 also takes tens of microseconds for each header and each chunk. So this module finds the end of
each head and body itself and refuses what is not exact. h11 gets one request at a time, without the extensions and
trailers of a chunked body, and with all chunks that arrived together as one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from http import HTTPStatus

import orjson

HEAD_BYTES = 32 * 1024
_TARGET_BYTES = 8000
HEAD_LINES = 100
"""Limit on the headers of a request. h11 takes up to 20 microseconds of the event loop for each."""
_FREE_CHUNKS = 2000
_BYTES_A_CHUNK = 256
"""A body may have _FREE_CHUNKS chunks, and one more for each _BYTES_A_CHUNK."""
_CHUNK_LINE_BYTES = 256
_TRAILER_BYTES = 8 * 1024

_ALLOWED = bytes({*b"\t\r\n", *range(0x20, 0x7F), *range(0x80, 0x100)})
_REQUEST_LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+ ([!-~]+) HTTP/([0-9])\.([0-9])")
_LENGTH = re.compile(rb"[0-9]{1,15}")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,12})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?")
_END = b"\r\n\r\n"


class RefusedRequest(Exception):
    """The connection's bytes are no request that this server takes; nothing after them can be read either."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = HTTPStatus(status), message

    def response(self) -> bytes:
        """The bytes of a whole response, the last one on its connection."""
        error = {
            "message": self.message,
            "type": "invalid_request_error",
            "param": None,
            "code": self.status.name.lower(),
        }
        body = orjson.dumps({"error": error})
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + body


class RequestFraming:
    """One connection. ``accepts``: whether the server answers to a value of the header Host."""

    def __init__(self, accepts: Callable[[str], bool]) -> None:
        self._accepts = accepts
        self._waiting = bytearray()
        """What has arrived and was not taken."""
        self._checked = self._lines = 0
        """Bytes and line ends of the next head that were checked already."""
        self._left = 0
        """Bytes of the body that are not taken. 0 between requests."""
        self._chunks: _Chunks | None = None

    @property
    def is_between(self) -> bool:
        """Whether the last request was taken to its end, so that a head follows."""
        return not self._left and self._chunks is None

    @property
    def has_more(self) -> bool:
        """Whether bytes wait that were not taken."""
        return bool(self._waiting)

    def feed(self, data: bytes) -> None:
        self._waiting += data

    def take(self) -> bytes:
        """Returns a whole head, or what has arrived of the body that follows it; b"" if more must arrive. Raises
        RefusedRequest."""
        if self.is_between:
            return self._take_head()
        if self._chunks is not None:
            taken = self._chunks.take(self._waiting)
            if self._chunks.has_ended:
                self._chunks = None
            return taken
        taken = bytes(self._waiting[: self._left])
        del self._waiting[: self._left]
        self._left -= len(taken)
        return taken

    def _take_head(self) -> bytes:
        waiting = self._waiting
        end = waiting.find(_END, max(0, self._checked - len(_END)))
        until = len(waiting) if end < 0 else end + len(_END)
        start = max(0, self._checked - 2)
        start -= start > 0 and waiting[start] == ord("\n")
        if not _is_exact(waiting[start:until]):
            raise RefusedRequest(
                400, "a head must consist of lines that end with CR LF, without control characters"
            )
        self._lines += waiting.count(b"\n", self._checked, until)
        self._checked = until
        if until > HEAD_BYTES:
            raise RefusedRequest(431, f"the head has more than {HEAD_BYTES} bytes")
        if self._lines > HEAD_LINES + 2:
            raise RefusedRequest(431, f"the head has more than {HEAD_LINES} headers")
        if end < 0:
            return b""
        head = bytes(waiting[:until])
        del waiting[:until]
        self._checked = self._lines = 0
        self._read(head[: -len(_END)])
        return head

    def _read(self, head: bytes) -> None:
        """Checks a head, and learns from it how long the body is. h11 refuses names that are not valid."""
        first, *lines = head.split(b"\r\n")
        found = _REQUEST_LINE.fullmatch(first)
        if found is None:
            raise RefusedRequest(400, "the first line is not a method, a target and a version")
        target, *version = found.groups()
        if version not in ([b"1", b"0"], [b"1", b"1"]):
            raise RefusedRequest(505, "the version must be HTTP/1.0 or HTTP/1.1")
        if len(target) > _TARGET_BYTES:
            raise RefusedRequest(414, f"the target has more than {_TARGET_BYTES} bytes")
        if not target.startswith(b"/"):
            raise RefusedRequest(400, "the target must be a path; this server is not a proxy")
        values: dict[bytes, list[bytes]] = {
            b"host": [],
            b"content-length": [],
            b"transfer-encoding": [],
        }
        for line in lines:
            name, _, value = line.partition(b":")
            if (known := values.get(name.lower())) is not None:
                known.append(value.strip(b" \t"))
        if any(len(each) > 1 for each in values.values()):
            raise RefusedRequest(
                400, "Host, Content-Length and Transfer-Encoding must not be repeated"
            )
        for host in values[b"host"]:
            if not self._accepts(host.decode("latin-1")):
                shown = host[:100].decode("latin-1")
                raise RefusedRequest(
                    421, f"this server does not answer to the host {shown!r}; see --http-hosts"
                )
        lengths, codings = values[b"content-length"], values[b"transfer-encoding"]
        if lengths and codings:
            raise RefusedRequest(400, "a body must not have Content-Length and Transfer-Encoding")
        for length in lengths:
            if not _LENGTH.fullmatch(length):
                raise RefusedRequest(400, "Content-Length must be a whole number")
            self._left = int(length)
        for coding in codings:
            if coding.lower() != b"chunked":
                raise RefusedRequest(501, "Transfer-Encoding must be chunked")
            if version == [b"1", b"0"]:
                raise RefusedRequest(400, "HTTP/1.0 has no Transfer-Encoding")
            self._chunks = _Chunks()


def _is_exact(lines: bytes | bytearray) -> bool:
    """Whether all lines end with CR LF, none is folded, and there are no control characters. CR may be the last byte
    that has arrived."""
    ends = lines.count(b"\r\n")
    return (
        lines.count(b"\n") == ends
        and lines.count(b"\r") - lines.endswith(b"\r") == ends
        and b"\r\n " not in lines
        and b"\r\n\t" not in lines
        and not lines.translate(None, _ALLOWED)
    )


class _Chunks:
    def __init__(self) -> None:
        self._left = 0
        """Bytes of the current chunk that are not taken, with the line end behind it."""
        self._num_chunks = self._num_bytes = self._trailer_bytes = 0
        self._is_trailer = False
        self.has_ended = False

    def take(self, waiting: bytearray) -> bytes:
        """Removes what has arrived, and returns it as one chunk. Raises RefusedRequest."""
        data, at = bytearray(), 0
        with memoryview(waiting) as view:
            while at < len(view) and not self.has_ended:
                taken = self._data(view, at, data) if self._left else self._line(waiting, at)
                if not taken:
                    break
                at += taken
        del waiting[:at]
        self._num_bytes += at
        chunk = b"%x\r\n%b\r\n" % (len(data), bytes(data)) if data else b""
        return chunk + b"0\r\n\r\n" if self.has_ended else chunk

    def _data(self, view: memoryview, at: int, data: bytearray) -> int:
        """Appends what has arrived of a chunk to ``data``. Returns the bytes read; 0 if more must arrive."""
        if self._left > 2:
            piece = view[at : at + self._left - 2]
            data += piece
            self._left -= len(piece)
            return len(piece)
        if len(view) - at < 2:
            return 0
        if bytes(view[at : at + 2]) != b"\r\n":
            raise RefusedRequest(400, "a chunk is longer than its size")
        self._left = 0
        return 2

    def _line(self, waiting: bytearray, at: int) -> int:
        """Reads the size of a chunk, or a trailer. Returns the bytes read; 0 if more must arrive."""
        most = _TRAILER_BYTES - self._trailer_bytes if self._is_trailer else _CHUNK_LINE_BYTES
        end = waiting.find(b"\r\n", at, at + most)
        if end < 0:
            if len(waiting) - at >= most:
                raise RefusedRequest(400, "a chunk's line or the trailers are too long")
            return 0
        line = waiting[at:end]
        num_bytes = len(line) + 2
        if self._is_trailer:
            if not _is_exact(b"\r\n%b\r\n" % bytes(line)):
                raise RefusedRequest(400, "a trailer is not a header")
            self._trailer_bytes += num_bytes
            self.has_ended = not line
            return num_bytes
        found = _CHUNK_LINE.fullmatch(line)
        if found is None:
            raise RefusedRequest(400, "a chunk must begin with its size in hexadecimal digits")
        size = int(found[1], 16)
        self._num_chunks += 1
        if self._num_chunks > _FREE_CHUNKS + (self._num_bytes + at) // _BYTES_A_CHUNK:
            raise RefusedRequest(400, f"the body has {self._num_chunks} chunks, most of them small")
        self._left = size + 2 if size else 0
        self._is_trailer = not size
        return num_bytes
