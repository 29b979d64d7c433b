"""Opened: a gRPC channel with its stubs, and the number of its calls. Servers: which channel new calls take.

The servers of a channel are fixed. When those of a directory change, new calls take another channel, and the one
before is closed once its calls have ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from ..connection import Connection
from ..directory import Directory
from ..errors import InvalidRequestError
from .prepared_call import Stub


class OpenChannel:
    """``channel``: of grpc or grpc.aio. All stubs are made at once: grpcio 1.81 crashes when a stub is made on a closed
    channel."""

    def __init__(self, channel: Any, kinds: Sequence[Stub]) -> None:
        self.channel = channel
        self.stubs = {kind: kind(channel) for kind in kinds}
        self.num_calls = 0
        """The channel stays open until it is 0."""
        self._lock = threading.Lock()

    def take(self) -> None:
        """A call begins. ``done`` must follow."""
        with self._lock:
            self.num_calls += 1

    def done(self) -> None:
        """A call has ended."""
        with self._lock:
            self.num_calls -= 1

    def stream(self, open_stream: Callable[[], Any]) -> Any:
        """The call that ``open_stream`` opens. At its end, this calls ``done``."""
        try:
            call = open_stream()
        except BaseException:
            self.done()
            raise
        call.add_done_callback(lambda _: self.done())
        return call


class Servers:
    """``channels``: the module of gRPC that opens channels, grpc or grpc.aio. Safe to share between threads."""

    def __init__(self, connection: Connection, kinds: Sequence[Stub], channels: Any) -> None:
        """Raises InvalidRequestError for certificates, and UnavailableError for a directory, that cannot be read."""
        self._connection, self._kinds, self._channels = connection, kinds, channels
        self._credentials = connection.credentials()
        source = connection.directory
        self._directory = None if source is None else Directory(source)
        self._addresses: tuple[str, ...] = ()
        self._lock = threading.Lock()
        self._opened: OpenChannel | None = None
        self._left: list[OpenChannel] = []
        """Channels of earlier lists of servers, whose calls have not all ended."""

    def take(self) -> OpenChannel:
        """The channel for a call, which must report its end. Raises InvalidRequestError if the first list of a
        directory is invalid."""
        with self._lock:
            directory = self._directory
            if directory is not None and directory.addresses != self._addresses:
                self._move(directory.addresses, directory)
            if self._opened is None:
                self._opened = self._open(self._connection)
            self._opened.take()
            return self._opened

    def _move(self, addresses: tuple[str, ...], directory: Directory) -> None:
        try:
            connection = replace(self._connection, target=addresses)
        except InvalidRequestError as error:
            if self._opened is None:
                raise
            directory.complain(f"{error}; the servers stay as they are")
        else:
            if self._opened is not None:
                self._left.append(self._opened)
            self._opened = self._open(connection)
        self._addresses = addresses

    def _open(self, to: Connection) -> OpenChannel:
        if self._credentials is None:
            channel = self._channels.insecure_channel(to.address, to.options)
        else:
            channel = self._channels.secure_channel(to.address, self._credentials, to.options)
        return OpenChannel(channel, self._kinds)

    def idle(self) -> list[Any]:
        """Channels that no call uses any more. The caller closes them."""
        if not self._left:
            return []
        with self._lock:
            found = [each for each in self._left if not each.num_calls]
            self._left = [each for each in self._left if each not in found]
            return [each.channel for each in found]

    def close(self) -> list[Any]:
        """Ends the reading of the directory. Returns all channels, which the caller closes."""
        if self._directory is not None:
            self._directory.close()
        opened = [] if self._opened is None else [self._opened]
        return [each.channel for each in (*self._left, *opened)]


def async_servers(connection: Connection, kinds: Sequence[Stub]) -> Servers:
    """For one event loop. A channel belongs to the loop that uses it first, so the first call opens it."""
    return Servers(connection, kinds, grpc.aio)


def servers(connection: Connection, kinds: Sequence[Stub]) -> Servers:
    """For threads. Raises now what is wrong with the target."""
    made = Servers(connection, kinds, grpc)
    made.take().done()
    return made
