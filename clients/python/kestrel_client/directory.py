"""Directory: a list of servers that changes, in a file or at an http(s) address, and a thread that reads it again.

It may be what ``kestrel-grpc cluster`` serves or ``cluster follow`` writes: JSON with servers, Envoy's EDS, or an
address a line.
"""

from __future__ import annotations

import json
import logging
import threading
import weakref
from collections.abc import Iterator
from http.client import HTTPException
from typing import Any

import grpc

from .errors import UnavailableError
from .web import download, is_url

logger = logging.getLogger(__name__)

SCHEME = "directory:"
EVERY_S = 1.0
_ANSWER_S = 5.0
_MOST_BYTES = 8 * 1024 * 1024
_MOST_SERVERS = 10_000


class Directory:
    """``source``: the path of a file, or an http(s) address. Raises UnavailableError if it cannot be read now.

    Later, if it cannot be read or names no server, ``addresses`` stays as it is: gRPC checks the health of each server.
    """

    def __init__(self, source: str, every_s: float = EVERY_S) -> None:
        self._source, self._complained = source, False
        try:
            self.addresses = read(source)
        except ValueError as error:
            raise UnavailableError(
                grpc.StatusCode.UNAVAILABLE, f"the directory of servers {source}: {error}"
            ) from None
        self._closed = threading.Event()
        thread = threading.Thread(
            target=_follow,
            args=(weakref.ref(self), self._closed, every_s),
            name="kestrel-directory",
            daemon=True,
        )
        weakref.finalize(self, self._closed.set)
        thread.start()

    def look(self) -> None:
        """Reads the directory again."""
        try:
            self.addresses = read(self._source)
            self._complained = False
        except ValueError as error:
            self.complain(f"{error}; the servers stay as they are")

    def complain(self, what: str) -> None:
        """Logs a warning, once until the directory has been read again."""
        if not self._complained:
            logger.warning("the directory of servers %s: %s", self._source, what)
        self._complained = True

    def close(self) -> None:
        self._closed.set()


def _follow(of: weakref.ref[Directory], closed: threading.Event, every_s: float) -> None:
    while not closed.wait(every_s):
        directory = of()
        if directory is None:
            return
        directory.look()
        del directory


def read(source: str) -> tuple[str, ...]:
    """The addresses in a directory, each once and in order. Raises ValueError, which does not name ``source``."""
    try:
        data = (
            _content(source) if not is_url(source) else download(source, _MOST_BYTES, _ANSWER_S)[1]
        )
        if len(data) > _MOST_BYTES:
            raise ValueError(f"has more than {_MOST_BYTES} bytes")
        text = data.decode()
        found = _listed(json.loads(text)) if text.lstrip()[:1] in ("{", "[") else _lines(text)
        addresses = tuple(sorted(set(found)))
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ValueError(f"cannot be read: {reason}") from None
    except (KeyError, TypeError, AttributeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"is no list of servers ({type(error).__name__}: {error})") from None
    if not addresses:
        raise ValueError("names no server")
    if len(addresses) > _MOST_SERVERS:
        raise ValueError(f"names {len(addresses)} servers; the limit is {_MOST_SERVERS}")
    return addresses


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(_MOST_BYTES + 1)


def _lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            yield line.strip()


def _listed(value: Any) -> Iterator[str]:
    """The servers in the JSON of a cluster, or in that of Envoy's EDS."""
    if "servers" in value:
        for server in value["servers"]:
            if server.get("serving", True) is True:
                yield _text(server["address"])
        return
    for resource in value["resources"]:
        for group in resource["endpoints"]:
            for each in group["lb_endpoints"]:
                place = each["endpoint"]["address"]["socket_address"]
                host, port = _text(place["address"]), int(place["port_value"])
                yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value
