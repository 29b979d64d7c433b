"""LastFrames: the results of the frames that were computed last, for later frames with the same pixels.

Only tasks that draw no random numbers of their own have the same results again, and only a frame whose tasks have all
succeeded is kept.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import PreparedImage

from ..messages.options import CallOptions
from .analysis import Task

_SAMPLES = ("query", "caption")
"""Skills that sample by default."""


class LastFrames:
    """``most``: the number of frames that are computed at the same time, and the results that are kept."""

    def __init__(self, tasks: Sequence[Task], options: CallOptions, most: int) -> None:
        # The file of an adapter may change while the stream is open.
        self._repeats = options.adapter is None and all(map(_is_repeatable, tasks))
        self._most = most
        self._kept: OrderedDict[object, pb.FrameResults] = OrderedDict()
        self._computing: dict[object, asyncio.Event] = {}

    @asynccontextmanager
    async def repeating(self, image: PreparedImage) -> AsyncIterator[Repeat]:
        """A context in which one frame is answered. A frame that equals one that is being computed waits for its
        results. If that one fails, the frame is computed itself."""
        if not self._repeats:
            yield Repeat()
            return
        seen = _identity(image)
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

    def __init__(self, earlier: pb.FrameResults | None = None) -> None:
        self.earlier = earlier
        self.new: pb.FrameResults | None = None

    def keep(self, results: pb.FrameResults) -> None:
        """Keeps the results, unless a task has failed."""
        if not any(each.HasField("error") for each in results.results):
            self.new = results

    def results(self, request_id: str) -> pb.FrameResults | None:
        """The results of the equal frame, for a request that computes nothing."""
        if self.earlier is None:
            return None
        found = pb.FrameResults()
        found.CopyFrom(self.earlier)
        found.ClearField("usage")
        for each in found.results:
            response = getattr(each, each.WhichOneof("outcome") or "")
            response.request_id = request_id
            response.usage.CopyFrom(common_pb2.Usage())
            response.timings.CopyFrom(common_pb2.Timings())
        return found


def _identity(image: PreparedImage) -> object:
    """Equal for images of which the model sees the same, and whose results have the same coordinates."""
    return image.key, image.region, image.image_size


def _is_repeatable(task: Task) -> bool:
    sampling: common_pb2.Sampling = task.fields.sampling
    if sampling.HasField("seed"):
        return True
    if sampling.HasField("temperature"):
        return sampling.temperature == 0
    return task.name not in _SAMPLES
