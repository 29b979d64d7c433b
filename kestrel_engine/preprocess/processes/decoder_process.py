"""DecoderProcess: the event loop's side of one decoder. Owns the link to the decoder, and the template of this process.

The template is started once for all pools and runs until the process ends, because it takes a third of a second to
start. Then it forks a decoder in 3 ms.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ...config.images import ImageLimits
from ...confinement import children
from ...types.model_config import VisionConfig
from .answers import refused_call
from .segments import new_segment, send_message, take_message
from .template import AUTO, FORK, KILL, OFF, REQUEST, REQUIRE

logger = logging.getLogger(__name__)

_MODES = {"auto": AUTO, "require": REQUIRE, "off": OFF}

_TEMPLATE = "kestrel_engine.preprocess.processes.template"

_RENEWAL_S = 0.001
"""Seconds after an answer until the decoder gets the segment for its next image, unless that image comes first. Sending
it takes 0.2 ms, so callers that wait for the answer go first."""


class _Template:
    """The process that forks decoders. It starts at its first use, and again if it has been killed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._link: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)
        self._has_forked = False

    def fork(self, link: socket.socket, confine: str, nice: int, num_bytes: int) -> int:
        """Starts a decoder with ``link``. Returns its number. Raises OSError."""
        with self._lock:
            number = next(self._numbers)
            request = REQUEST.pack(FORK, _MODES[confine], nice, number, num_bytes)
            if self._link is not None:
                with contextlib.suppress(OSError):
                    socket.send_fds(self._link, [request], [link.fileno()])
                    self._has_forked = True
                    return number
            self._start()
            assert self._link is not None
            socket.send_fds(self._link, [request], [link.fileno()])
            self._has_forked = True
            return number

    def kill(self, number: int) -> None:
        """Kills a decoder that may have ended already."""
        with self._lock, contextlib.suppress(OSError):
            if self._link is not None:
                self._link.sendall(REQUEST.pack(KILL, OFF, 0, number, 0))

    def start(self) -> None:
        """Starts the template if it does not run. Does not wait until it is ready. Raises OSError."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()

    def forget(self) -> None:
        """Releases the template in a process that was forked from this one. That process starts its own template."""
        self._lock = threading.Lock()
        if self._link is not None:
            self._link.close()
        self._link = self._process = None

    def stop(self) -> None:
        """Ends the template and all of its decoders."""
        with self._lock:
            if self._link is not None:
                self._link.close()
            if self._process is not None:
                if not self._has_forked:  # It has nothing to end, and may still be loading.
                    self._process.kill()
                self._process.wait()
            self._link = self._process = None

    def _start(self) -> None:
        self._has_forked = False
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = children.start(_TEMPLATE, stdin=theirs.fileno())
        # If it is killed, it is no zombie until an image needs it again.
        threading.Thread(target=self._process.wait, name="template-end", daemon=True).start()
        self._link = ours


template = _Template()
os.register_at_fork(after_in_child=template.forget)
atexit.register(template.stop)


class DecoderProcess:
    """One decoder. Belongs to one event loop. ``on_message`` gets each message of the decoder. The last one is
    {"ended": status}, or {"ended": None} if the status is not known."""

    def __init__(
        self,
        limits: ImageLimits,
        vision: VisionConfig,
        on_message: Callable[[DecoderProcess, dict[str, Any]], None],
        *,
        num_bytes: int,
        confine: str = "auto",
        nice: int = 0,
    ) -> None:
        """``num_bytes``: memory that an image may take. ``confine``: one of ``confinement.MODES``. Raises
        OSError if no process can be started."""
        self._on_message = on_message
        self._received = bytearray()
        self._loop = asyncio.get_running_loop()
        self._link, theirs = socket.socketpair()
        self._crops = -1
        self._renewal: asyncio.TimerHandle | None = None
        self._renewed_bytes = 0
        try:
            with theirs:
                self._number = template.fork(theirs, confine, nice, num_bytes)
            self._link.setblocking(False)
            send_message(self._link, {"limits": asdict(limits), "vision": asdict(vision)}, ())
            self._renew_crops(0)
        except OSError:
            self._release()
            raise
        self._loop.add_reader(self._link, self._read)

    @property
    def crops(self) -> int:
        """The descriptor of the segment with the crops of the image that was decoded last."""
        return self._crops

    def renew_crops(self, num_bytes: int) -> None:
        """Gives the decoder an empty segment for the crops of the next image, soon or in `is_ready`. The decoder
        prepares ``num_bytes`` of it before that image arrives. If this fails, the decoder is closed."""
        self._renewed_bytes = num_bytes
        self._renewal = self._loop.call_later(_RENEWAL_S, self.is_ready)

    def is_ready(self) -> bool:
        """Whether the decoder accepts an image. Renews its segment if that is due."""
        if self._renewal is not None and self.is_open:
            self._renewal.cancel()
            self._renewal = None
            try:
                self._renew_crops(self._renewed_bytes)
            except OSError:
                self.close()
        return self.is_open

    def _renew_crops(self, num_bytes: int) -> None:
        """Raises OSError if there is no segment, or if the decoder has ended."""
        segment = new_segment()
        if self._crops >= 0:
            os.close(self._crops)
        self._crops = segment
        send_message(self._link, {"crops": num_bytes}, (segment,))

    def send(self, message: dict[str, Any], source: int) -> None:
        """Sends an image to a decoder that `is_ready`. Send the next one only after the answer. ``source``: the segment
        with the bytes. Raises OSError if the decoder has ended."""
        send_message(self._link, message, (source,))

    def kill(self) -> None:
        """Kills the decoder at once. May be called in any thread. ``on_message`` gets the end as for any other end."""
        template.kill(self._number)

    @property
    def is_open(self) -> bool:
        """Whether the decoder accepts messages, as far as this process knows."""
        return self._link.fileno() >= 0

    def close(self) -> None:
        """Releases and kills the decoder: one that an image controls would not end. ``on_message`` does not get its
        end. Idempotent."""
        if self.is_open:
            self.kill()
            self._loop.remove_reader(self._link)
            self._release()

    def _release(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
        self._link.close()
        if self._crops >= 0:
            os.close(self._crops)
            self._crops = -1

    def _read(self) -> None:
        try:
            data = self._link.recv(64 * 1024)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        self._received.extend(data)
        try:
            while (message := take_message(self._received)) is not None:
                if "ended" in message:
                    self.close()
                    if message["ended"] == -signal.SIGSYS:
                        logger.warning("a decoder was killed: %s", refused_call(message))
                self._on_message(self, message)
                if not self.is_open:
                    return
        except ValueError:  # The decoder was killed while it sent a message.
            data = b""
        if not data:
            self.close()
            self._on_message(self, {"ended": None})
