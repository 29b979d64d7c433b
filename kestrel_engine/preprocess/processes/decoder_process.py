"""DecoderProcess: the event loop's side of one decoder. Owns the line to the decoder."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ...config.image_limits import ImageLimits
from ...processes.lines import Line
from ...processes.template import confined
from ...types.model_config import VisionConfig
from .answers import refused_call
from .segments import new_segment

logger = logging.getLogger(__name__)

MODULE = "kestrel_engine.preprocess.processes.decoder"
"""The code of a decoder."""

_RENEWAL_S = 0.001
"""Seconds after an answer until the decoder gets the segment for its next image, unless that image comes first. Sending
it takes 0.2 ms, so callers that wait for the answer go first."""


class DecoderProcess:
    """One decoder. Belongs to one event loop. ``on_message`` gets its messages, at last {"ended": status or None}."""

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
        """``num_bytes``: memory of an image. ``confine``: one of ``confinement.MODES``. Raises OSError."""
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        self._line = Line(ours)
        self._crops = -1
        self._renewal: asyncio.TimerHandle | None = None
        self._renewed_bytes = 0
        try:
            with theirs:
                self._number = confined.fork(
                    theirs, module=MODULE, confine=confine, nice=nice, num_bytes=num_bytes
                )
            ours.setblocking(False)
            self._line.send({"limits": asdict(limits), "vision": asdict(vision)})
            self._renew_crops(0)
        except OSError:
            self._release()
            raise
        self._loop.add_reader(self._line, self._read)

    @property
    def crops(self) -> int:
        """The descriptor of the segment with the crops of the image that was decoded last."""
        return self._crops

    def renew_crops(self, num_bytes: int) -> None:
        """Gives the decoder an empty segment for the crops of the next image, soon or in `is_ready`. The decoder
        prepares ``num_bytes`` of it before that image arrives. If this fails, the decoder is closed, and ``on_message``
        gets {"ended": None} unless `is_ready` has returned False."""
        self._renewed_bytes = num_bytes
        self._renewal = self._loop.call_later(_RENEWAL_S, self._renew)

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

    def _renew(self) -> None:
        if not self.is_ready():  # The end of a closed line is not read any more.
            self._on_message(self, {"ended": None})

    def _renew_crops(self, num_bytes: int) -> None:
        """Raises OSError if there is no segment, or if the decoder has ended."""
        segment = new_segment()
        if self._crops >= 0:
            os.close(self._crops)
        self._crops = segment
        self._line.send({"crops": num_bytes}, (segment,))

    def send(self, message: dict[str, Any], source: int) -> None:
        """Sends an image to a decoder that `is_ready`. Send the next one only after the answer. ``source``: the segment
        with the bytes. Raises OSError if the decoder has ended."""
        self._line.send(message, (source,))

    def kill(self) -> None:
        """Kills the decoder at once. May be called in any thread. ``on_message`` gets the end as for any other end."""
        confined.kill(self._number)

    @property
    def is_open(self) -> bool:
        """Whether the decoder accepts messages, as far as this process knows."""
        return self._line.fileno() >= 0

    def close(self) -> None:
        """Kills the decoder, as an image may control it, without a message about its end. Idempotent."""
        if self.is_open:
            self.kill()
            self._loop.remove_reader(self._line)
            self._release()

    def _release(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
        self._line.close()
        if self._crops >= 0:
            os.close(self._crops)
            self._crops = -1

    def _read(self) -> None:
        is_open = self._line.read()
        try:
            for message in self._line.messages():
                if "ended" in message:
                    self.close()
                    if message["ended"] == -signal.SIGSYS:
                        logger.warning("a decoder was killed: %s", refused_call(message))
                self._on_message(self, message)
                if not self.is_open:
                    return
        except ValueError:  # The decoder was killed while it sent a message.
            is_open = False
        if not is_open:
            self.close()
            self._on_message(self, {"ended": None})
