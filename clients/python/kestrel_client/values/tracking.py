"""Track ids: an object keeps its number from frame to frame, by a tracker of the package trackers."""

from __future__ import annotations

from typing import Any

from .results.exports import package
from .results.objects import DetectResult


class ObjectTracker:
    """Gives the objects of one task ids that stay the same from frame to frame. Needs the extra ``tracking``.

    ``tracker``: a tracker of the package trackers; default: its ByteTrackTracker. Use one tracker for each task of a
    stream. Raises MissingDependencyError.
    """

    def __init__(self, tracker: Any = None) -> None:
        self._tracker = package("trackers").ByteTrackTracker() if tracker is None else tracker

    def update(self, result: DetectResult) -> tuple[int | None, ...]:
        """Returns the id of each object of ``result``, in their order; None for an object that has no track yet.

        Call it with the results of all frames in the order of the frames. A stream with ``max_in_flight=1`` gives them
        in this order.
        """
        numpy = package("numpy")
        detections = result.to_supervision()
        count = len(result.objects)
        if detections.confidence is None:  # From a server without scores.
            detections.confidence = numpy.ones(count, numpy.float32)
        # A tracker returns the objects in an order of its own.
        detections.data["position"] = numpy.arange(count)
        tracked = self._tracker.update(detections)
        ids: list[int | None] = [None] * count
        # Without objects, a tracker may return detections without data. It still needs the update, to age its tracks.
        if count and tracked.tracker_id is not None:
            for position, track in zip(tracked.data["position"], tracked.tracker_id, strict=True):
                ids[position] = int(track) if track >= 0 else None
        return tuple(ids)
