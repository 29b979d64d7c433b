"""LastFrames: the results of the frames that were computed last, for later frames with the same pixels.

Only tasks that draw no random numbers of their own have the same results again, and only a frame whose tasks have all
succeeded is kept.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import PreparedImage

from ...edge.calls.call import CallOptions
from .kinds import CallTask

_SAMPLE = ("query", "caption", "skill")
"""Tasks that sample by default, or may do so."""


class LastFrames:
    """``most``: the number of frames that are computed at the same time, and the results that are kept."""

    def __init__(
        self, tasks: Sequence[CallTask[Any, Any]], options: CallOptions, most: int
    ) -> None:
        # The file of an adapter may change while the stream is open.
        self._repeats = options.adapter is None and all(map(_is_repeatable, tasks))
        self._most = most
        self._kept: OrderedDict[object, pb.AnalyzeResponse] = OrderedDict()
        self._computing: dict[object, asyncio.Event] = {}

    @asynccontextmanager
    async def repeating(self, image: PreparedImage) -> AsyncIterator[Repeat]:
        """A context in which one frame is answered. A frame that equals one that is being computed waits for its
        results. If that one fails, the frame is computed itself."""
        if not self._repeats:
            yield Repeat()
            return
        # Of equal images the model sees the same, and their results have the same coordinates.
        seen = (image.key, image.region, image.image_size)
        while seen not in self._kept and seen in self._computing:
            await self._computing[seen].wait()
        repeat = Repeat(self._kept.get(seen))
        if repeat.earlier is not None:
            self._kept.move_to_end(seen)
            yield repeat
            return
        done = self._computing[seen] = asyncio.Event()
        try:
            yield repeat
            if repeat.new is not None:
                self._kept[seen] = repeat.new
                if len(self._kept) > self._most:
                    self._kept.popitem(last=False)
        finally:
            del self._computing[seen]
            done.set()


class Repeat:
    """What is known of one frame. ``earlier``: the results of an equal frame. ``new``: its own."""

    def __init__(self, earlier: pb.AnalyzeResponse | None = None) -> None:
        self.earlier = earlier
        self.new: pb.AnalyzeResponse | None = None

    def keep(self, results: pb.AnalyzeResponse) -> None:
        """Keeps the results, unless a task has failed."""
        if not any(each.HasField("error") for each in results.results):
            self.new = results

    def results(self, info: common_pb2.RequestInfo) -> pb.AnalyzeResponse | None:
        """The results of the equal frame, for a request that computes nothing. ``info``: of this request."""
        if self.earlier is None:
            return None
        found = pb.AnalyzeResponse()
        found.CopyFrom(self.earlier)
        every = [getattr(each, each.WhichOneof("outcome") or "") for each in found.results]
        for response in (found, *every):
            seed = response.info.seed
            response.info.CopyFrom(info)
            response.info.seed = seed
            response.usage.Clear()
            response.timings.Clear()
        return found


def _is_repeatable(task: CallTask[Any, Any]) -> bool:
    sampling: common_pb2.Sampling = task.message.sampling
    if sampling.HasField("seed"):
        return True
    if isinstance(task.message, pb.GazeTask) and task.message.accurate:
        return False  # It looks from random places.
    if sampling.HasField("temperature"):
        return sampling.temperature == 0
    return task.kind.name not in _SAMPLE
