"""Hedges: which calls are sent a second time because their answer is late, and where to.

gRPC's service config has a policy for this, but gRPC's core (C++, Python, Ruby) does not carry it out (1.85).
"""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import threading
from typing import Any, TypeVar

import grpc

from .._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from ..connection import IMAGE_HEADER
from .prepared_call import PreparedCall

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
        self.after_s = after_s
        self._saved = 1.0
        self._lock = threading.Lock()

    def answer(self, prepared: PreparedCall[R], stub: Any) -> Any:
        """Sends a call, and once more if its answer is late. The first answer counts; an error waits for the other
        call. Raises grpc.RpcError."""
        if not self._may_hedge(prepared):
            return prepared.send(stub)
        ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        calls = [prepared.begin(stub)]
        calls[0].add_done_callback(ended.put)
        try:
            try:
                first = ended.get(timeout=self.after_s)
            except queue.Empty:
                if (second := self._second(prepared)) is not None:
                    calls.append(second.begin(stub))
                    calls[1].add_done_callback(ended.put)
                first = ended.get()
            if first.code() is grpc.StatusCode.OK or len(calls) == 1:
                return first.result()
            last = ended.get()
            return (last if last.code() is grpc.StatusCode.OK else calls[0]).result()
        finally:
            for each in calls:
                each.cancel()

    async def async_answer(self, prepared: PreparedCall[R], stub: Any) -> Any:
        """As ``answer``."""
        if not self._may_hedge(prepared):
            return await prepared.send(stub)

        async def ask(call: PreparedCall[R]) -> Any:
            return await call.send(stub)

        calls = [asyncio.ensure_future(ask(prepared))]
        try:
            done, left = await asyncio.wait(calls, timeout=self.after_s)
            if not done and (second := self._second(prepared)) is not None:
                calls.append(asyncio.ensure_future(ask(second)))
                left.add(calls[1])
            while left:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    if each.exception() is None:
                        return each.result()
            return calls[0].result()
        finally:
            for each in calls:
                each.cancel()

    def _may_hedge(self, prepared: PreparedCall[R]) -> bool:
        """Only unary calls about images may be sent again: their methods change nothing, and one of two answers is
        dropped."""
        if self.after_s is None or prepared.method.stub is not VisionServiceStub:
            return False
        with self._lock:
            self._saved = min(self._saved + SHARE, _SAVED)
        return True

    def _second(self, prepared: PreparedCall[R]) -> PreparedCall[R] | None:
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
