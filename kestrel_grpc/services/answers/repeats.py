"""LastFrame: the results of the frame that was computed last, for a next frame with the same pixels.

Only tasks that draw no random numbers of their own have the same results again, and only a frame whose tasks have all
succeeded is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import PreparedImage

from ..messages.options import CallOptions
from .analysis import Task

_SAMPLES = ("query", "caption")
"""Skills that sample by default."""


class LastFrame:
    """``keep`` after each computed frame, ``results_of`` before the next."""

    def __init__(self, tasks: Sequence[Task], options: CallOptions) -> None:
        # The file of an adapter may change while the stream is open.
        self._repeats = options.adapter is None and all(map(_is_repeatable, tasks))
        self._seen: object = None
        self._results: pb.FrameResults | None = None

    def keep(self, image: PreparedImage, results: pb.FrameResults) -> None:
        if self._repeats and not any(each.HasField("error") for each in results.results):
            self._seen, self._results = _identity(image), results

    def results_of(self, image: PreparedImage, request_id: str) -> pb.FrameResults | None:
        """The results for a request that computes nothing; None if the image differs from that of the last frame."""
        if self._results is None or self._seen != _identity(image):
            return None
        found = pb.FrameResults()
        found.CopyFrom(self._results)
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
