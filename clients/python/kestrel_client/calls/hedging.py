"""Hedges: which calls are sent a second time because their answer is late, and where to.

gRPC's service config has a policy for this, but gRPC's core (C++, Python, Ruby) does not carry it out (1.85).
"""

from __future__ import annotations

import dataclasses
import threading
from typing import TypeVar

from .._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from ..connection import IMAGE_HEADER
from .prepared import Prepared

R = TypeVar("R")

SHARE = 0.1
"""Limit on the hedges of a client, as a share of its calls. Slow servers would become slower with many."""
_SAVED = 10.0
"""Hedges that a client may have saved."""
_ELSEWHERE = "+"
"""What changes the value of IMAGE_HEADER, so that another server is likely: the same one for all hedges of an image."""


class Hedges:
    """The hedges of one client. ``after_s``: seconds without an answer; None: none. Safe to share between threads."""

    def __init__(self, after_s: float | None) -> None:
        self._after_s = after_s
        self._saved = 1.0
        self._lock = threading.Lock()

    def delay_s(self, prepared: Prepared[R]) -> float | None:
        """Seconds after which the call may be sent again; None if it may not.

        Only unary calls about images may: their methods change nothing, and one of two answers is dropped.
        """
        if self._after_s is None or prepared.method.stub is not VisionServiceStub:
            return None
        if not prepared.may_be_repeated:
            return None
        with self._lock:
            self._saved = min(self._saved + SHARE, _SAVED)
        return self._after_s

    def second(self, prepared: Prepared[R]) -> Prepared[R] | None:
        """The same call for another server; None if too many calls have been sent twice."""
        with self._lock:
            if self._saved < 1.0:
                return None
            self._saved -= 1.0
        metadata = tuple(
            (key, value + _ELSEWHERE if key == IMAGE_HEADER else value)
            for key, value in prepared.handling["metadata"]
        )
        return dataclasses.replace(prepared, handling={**prepared.handling, "metadata": metadata})
