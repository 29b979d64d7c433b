"""Answers: what the answer of a decoder to its job means. Every answer is checked: an image may control its decoder."""

from __future__ import annotations

import math
import signal
from dataclasses import replace
from typing import Any

from ... import errors
from ...confinement import system_calls
from ...errors import (
    EngineOverloaded,
    ImageDecodeError,
    ImageTooLargeError,
    InvalidRequest,
    RequestError,
    RuntimeFailure,
)
from ...types.model_config import VisionConfig
from ...types.requests import PreparedImage
from ..crops import KEY_LENGTH, select_tiling, stored_shape
from ..decoding.costs import FIELD, Cost
from ..jobs import HeaderSize, ImageJob, PreparedLooks
from ..looks import look_size, regions
from ..prepared_cache import Looks, in_namespace
from .segments import map_segment

_ERRORS = {
    name: each
    for name, each in vars(errors).items()
    if isinstance(each, type) and issubclass(each, RequestError)
}


MOST_TEXT, _MOST_NAME, _MOST_NAMES = 2000, 50, 4
"""Characters of an error that a decoder reports, and the names in the path of its field."""


class Answers:
    """``device_pixels``: as in ``crops.cut_crops``."""

    def __init__(self, max_pixels: int, vision: VisionConfig, device_pixels: int) -> None:
        self._max_pixels = max_pixels
        self._vision = vision
        self._device_pixels = device_pixels

    def read(
        self,
        message: dict[str, Any],
        job: ImageJob,
        segment: int,
        failure: Exception | None,
    ) -> PreparedLooks | HeaderSize | Cost | Exception:
        """The prepared image, its size, its cost, or its error. ``segment``: the decoder's. ``failure``: the error of
        the job if the decoder has ended. Raises OSError, and KeyError, TypeError or ValueError for an answer that only
        a decoder under an image's control sends."""
        if job.header_only and "size" in message:
            size = HeaderSize(*map(int, message["size"]))
            self._check_size(*size)
            return size
        if "done" in message and not job.header_only:
            done = message["done"]
            return PreparedLooks(self._looks(done, job, segment), float(done["seconds"]))
        if "cost" in message and job.cost is None and not job.header_only:
            pixels, num_bytes = int(message["cost"]["pixels"]), int(message["cost"]["num_bytes"])
            seconds = float(message["cost"]["seconds"])
            if not (0 <= pixels <= self._max_pixels and num_bytes >= 0 and seconds >= 0):
                raise ValueError(f"cost {message['cost']}")
            return Cost(pixels, num_bytes, seconds)
        if "error" in message:
            name, at, text, *facts = message["error"]
            value, limit = (None if fact is None else float(fact) for fact in facts)
            path = tuple(str(part)[:_MOST_NAME] for part in at[:_MOST_NAMES])
            return _ERRORS[name](path, str(text)[:MOST_TEXT], value=value, limit=limit)
        if "ended" in message:
            return failure or _lost(message)
        if message["fault"] == "MemoryError":
            text = "takes more memory to decode than expected from its format and size"
            return ImageTooLargeError(FIELD, text)
        return RuntimeFailure(f"decoding failed: {message['fault']}"[:MOST_TEXT])

    def _check_size(self, width: int, height: int) -> None:
        """Raises ValueError."""
        if width < 1 or height < 1 or width * height > self._max_pixels:
            raise ValueError(f"{width}x{height} pixels")

    def _looks(self, done: dict[str, Any], job: ImageJob, segment: int) -> Looks:
        """Returns what a decoder has prepared, in memory that it cannot shrink. Raises OSError and as ``read``."""
        width, height = int(done["width"]), int(done["height"])
        keys = [str(key) for key in done["keys"]]
        self._check_size(width, height)
        try:
            found = regions(width, height, job.selection)
        except InvalidRequest as error:
            raise ValueError(str(error)) from error
        crop_keys = [None] * len(found) if done["crop_keys"] is None else done["crop_keys"]
        if len(keys) != len(found) or len(crop_keys) != len(found):
            raise ValueError(f"{len(keys)} and {len(crop_keys)} keys for {len(found)} looks")
        vision = self._vision.within(job.selection.max_crops)
        sizes = [look_size(region, width, height) for region in found]
        shapes = [stored_shape(*size, vision, self._device_pixels) for size in sizes]
        memory = map_segment(segment, (sum(map(math.prod, shapes)),))
        looks = []
        for key, region, size, shape, of_crops in zip(
            keys, found, sizes, shapes, crop_keys, strict=True
        ):
            _check_key(key)
            part = memory[: math.prod(shape)].reshape(shape)
            memory = memory[math.prod(shape) :]
            crops, pixels = (None, part) if len(shape) == 3 else (part, None)
            tiling = select_tiling(*size, vision)
            look = PreparedImage(
                key, crops, tiling, *size, pixels, job.source_digest, region=region
            )
            if of_crops is not None:
                if len(of_crops) != look.num_distinct:
                    raise ValueError(f"{len(of_crops)} keys for {look.num_distinct} crops")
                look = replace(look, crop_keys=tuple(map(_check_key, of_crops)))
            looks.append(in_namespace(look, job.namespace))
        return tuple(looks)


def _check_key(key: Any) -> str:
    """Returns the content key. Raises ValueError."""
    if not isinstance(key, str) or len(key) != KEY_LENGTH:
        raise ValueError(f"key {key!r}")
    return key


def refused_call(message: dict[str, Any]) -> str:
    """What ended a decoder with SIGSYS, from its last ``message``."""
    number = message.get("call")
    known = f" {system_calls.name_of(number)}" if isinstance(number, int) else ""
    return f"it made the system call{known}, which is not allowed (docs/run/security.md)"


def _lost(message: dict[str, Any]) -> Exception:
    """The error of a job whose decoder ended unexpectedly."""
    status: int | None = message["ended"]
    if status is None or -status in (signal.SIGKILL, signal.SIGTERM):
        return EngineOverloaded("the process that decoded the image was killed from outside")
    how = signal.Signals(-status).name if status < 0 else f"status {status}"
    return ImageDecodeError(FIELD, f"ended the process that decoded it ({how})")
