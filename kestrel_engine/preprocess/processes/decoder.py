"""The code of a decoder process: it checks and decodes one image after the other, and makes crops and content key.

A decoder is a fork of the template (processes/), confines itself, and may be killed at any time. Images and crops are
passed in segments. A decoder ends when its line is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import resource
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ...config.image_limits import ImageLimits
from ...confinement.own_memory import open_count, read_count
from ...errors import RequestError
from ...processes.forking import Fork
from ...processes.lines import Line
from ...types.model_config import VisionConfig
from ...types.requests import PreparedImage
from ..crop_keys import crop_keys
from ..crops import (
    Piece,
    Run,
    content_key,
    cut_crops,
    device_makes_crops,
    mirrored,
    region_of,
    stored_shape,
)
from ..decoding.bmp import load_reader
from ..decoding.costs import PIXELS, Cost, check_size, cost_of
from ..decoding.decoded_image import DecodedImage, new_bytes
from ..decoding.open_image import Undecoded, read_header
from ..looks import Selection, look_size, read_selection, regions

_SLACK_BYTES = 64 * 2**20
"""Memory that an image may take beyond its cost before it fails. The table holds measured peaks, and allocators round
up."""


_KEPT_BYTES = 16 * 2**20
"""Freed memory that a decoder keeps for its next image. The first write to a page costs as much as the work on its
pixels, and libvips frees and allocates the same buffers repeatedly within one image."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""

_SECONDS_PER_LOOK = 0.02
"""Seconds for a look, whose crops have the same size whatever the size of the look."""

_MOST_COVERED = 4
"""All looks together have less than this many times the image's pixels: the image, and tiles that overlap by half."""

_MOST_KEYED_CROPS = 1000
"""Crops of an image that may have keys, so that the answer is no longer than a message may be."""

_MOST_KEY_THREADS = 4
"""Threads that hash an image's pixels for the keys of its crops. To start more takes longer than their work."""

_SWITCH_INTERVAL_S = 0.5e-3
"""Python's switch interval. Threads that share an image wait this long for the interpreter. Python's default of 5 ms is
longer than the work on a band."""


def load() -> None:
    """Imports in the template what decoders would import later, when they can open no file."""
    load_reader()


def main(fork: Fork) -> None:
    """The process. The job says the bytes that an image may take (``num_bytes``)."""
    memory = open_count()
    fork.confine(fork.job["num_bytes"], memory)
    serve(fork.line, memory)


def serve(line: Line, memory: int) -> None:
    """Answers jobs until ``line`` is closed. The first message has the limits and the geometry. The others are a
    segment for the crops of the next image, or an image. ``memory``: the descriptor of ``own_memory.open_count``."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    _keep_freed_memory()
    setup = line.wait()
    if setup is None:
        return
    work = ImageDecoder(ImageLimits(**setup["limits"]), VisionConfig(**setup["vision"]), memory)
    while (message := line.wait()) is not None:
        descriptor = line.descriptors.pop(0)
        if "crops" in message:
            work.take_crops_segment(descriptor, message["crops"])
        else:
            reply = work.answer(message, descriptor)
            os.close(descriptor)
            line.send(reply)


class ImageDecoder:
    def __init__(self, limits: ImageLimits, vision: VisionConfig, memory: int = -1) -> None:
        self._limits, self._vision, self._memory = limits, vision, memory
        self._bytes_per_look = 3 * vision.crop_size**2 * (1 + vision.max_crops)
        self._threads: ThreadPoolExecutor | None = None
        self._most_threads = 0
        self._crops = -1
        self._mapped: mmap.mmap | None = None
        self._written: mmap.mmap | None = None
        """The mapping of the last image's crops. To unmap it takes time, which should not delay the answer."""

    def take_crops_segment(self, descriptor: int, num_bytes: int) -> None:
        """Accepts the segment for the crops of the next image, and writes ``num_bytes`` of it, because the first write
        to a page costs as much as the work on its pixels."""
        self._mapped = self._written = None
        if self._crops >= 0:
            os.close(self._crops)
        self._crops = descriptor
        if num_bytes:
            os.ftruncate(descriptor, num_bytes)
            self._mapped = _mapped(descriptor, num_bytes)

    def answer(self, job: dict[str, Any], source: int) -> dict[str, Any]:
        """Prepares one image. ``source``: the segment with the encoded bytes, or with pixels of ``job["shape"]``.
        Writes the crops to their segment, or the decoded pixels if the device makes the crops.

        Returns one of: "done", the prepared image; "size", its width and height, if the job is about the header only;
        "cost", if the cost exceeds what the job grants; "error", the name, field and message of a RequestError;
        "fault", the description of any other exception.
        """
        began = time.perf_counter()
        try:
            size = os.lseek(source, 0, os.SEEK_END)
            image: DecodedImage | Undecoded
            if job["shape"] is None:
                background = job["background"] and tuple(job["background"])
                image = read_header(os.pread(source, size, 0), self._limits, background)
                if job["header_only"]:
                    return {"size": image.upright_size}
                cost = image.cost
            else:
                height, width, _ = shape = tuple(job["shape"])
                pixels = np.frombuffer(mmap.mmap(source, size, access=mmap.ACCESS_READ), np.uint8)
                image = DecodedImage(pixels.reshape(shape))
                cost = cost_of(PIXELS, width, height, 0)
            # Memory for the pixels that are kept for the device.
            kept = 3 * min(cost.pixels, job["device_pixels"])
            selection = read_selection(job["selection"])
            vision = self._vision.within(selection.max_crops)
            if not selection.is_one_whole:
                num_looks = 1 if selection.tiles is None else selection.tiles.num_looks
                # The crops or pixels of all looks, and the pixels of one look at a time.
                kept = _MOST_COVERED * kept + num_looks * self._bytes_per_look + 3 * cost.pixels
                cost = cost._replace(seconds=cost.seconds + num_looks * _SECONDS_PER_LOOK)
            cost = cost._replace(num_bytes=cost.num_bytes + kept)
            if (
                cost.num_bytes > job["granted"]["num_bytes"]
                or cost.seconds > job["granted"]["seconds"]
            ):
                return {"cost": cost._asdict()}
            how = (vision, cost, job["threads"], job["device_pixels"])
            if selection.is_one_whole:
                looks = self._prepare(image, *how)
            else:
                looks = self._prepare_looks(image, selection, *how)
            done: dict[str, Any] = {"keys": [look.key for look in looks], "crop_keys": None}
            if job["crop_keys"] and sum(look.num_distinct for look in looks) <= _MOST_KEYED_CROPS:
                run = self._run(min(job["threads"], _MOST_KEY_THREADS))
                done["crop_keys"] = [crop_keys(look, vision, run) for look in looks]
            width, height = looks[0].image_size
            seconds = time.perf_counter() - began
            return {"done": {**done, "width": width, "height": height, "seconds": seconds}}
        except RequestError as error:
            facts = (error.value, error.limit)
            return {"error": [type(error).__name__, error.path, error.message, *facts]}
        except MemoryError:
            return {"fault": "MemoryError"}
        except Exception as error:
            return {"fault": f"{type(error).__name__}: {error}"[:2000]}

    def _prepare(
        self,
        image: DecodedImage | Undecoded,
        vision: VisionConfig,
        cost: Cost,
        threads: int,
        device_pixels: int,
    ) -> list[PreparedImage]:
        in_place = False

        def allocate_pixels(shape: tuple[int, ...]) -> np.ndarray:
            """Pixels that the device turns into crops are decoded into the segment."""
            nonlocal in_place
            height, width, _ = shape
            in_place = device_makes_crops(width, height, vision, device_pixels)
            return self._allocate_crops(shape) if in_place else new_bytes(shape)

        with memory_bound(self._memory, cost.num_bytes + _SLACK_BYTES):
            decoded = image if isinstance(image, DecodedImage) else image.begin(allocate_pixels)
            # Decoding alone is the work of one thread.
            run = None if in_place else self._run(threads)
            prepared = cut_crops(
                decoded,
                vision,
                run=run,
                allocate=self._allocate_crops,
                device_pixels=device_pixels,
                in_place=in_place,
            )
        return [prepared]

    def _prepare_looks(
        self,
        image: DecodedImage | Undecoded,
        selection: Selection,
        vision: VisionConfig,
        cost: Cost,
        threads: int,
        device_pixels: int,
    ) -> list[PreparedImage]:
        """Decodes the image once, and writes the crops of all looks one after the other."""
        found: list[PreparedImage] = []
        with memory_bound(self._memory, cost.num_bytes + _SLACK_BYTES):
            decoded = image if isinstance(image, DecodedImage) else image.begin(new_bytes)
            width, height = decoded.width, decoded.height
            looks = regions(width, height, selection)
            for look in looks:
                check_size(*look_size(look, width, height), self._limits, PIXELS)
            decoded.decode()
            key = content_key(decoded, self._vision)
            if selection.mirrored:
                decoded = mirrored(decoded, key)
                key = content_key(decoded, self._vision)
            shapes = [
                stored_shape(*look_size(look, width, height), vision, device_pixels)
                for look in looks
            ]
            room = self._allocate_crops((sum(map(math.prod, shapes)),))
            run = self._run(threads)
            for look, shape in zip(looks, shapes, strict=True):
                part, room = room[: math.prod(shape)].reshape(shape), room[math.prod(shape) :]
                prepared = cut_crops(
                    decoded if look is None else region_of(decoded, key, look),
                    vision,
                    run=run,
                    allocate=lambda _, part=part: part,  # type: ignore[misc]
                    device_pixels=device_pixels,
                )
                found.append(replace(prepared, region=look))
        return found

    def _allocate_crops(self, shape: tuple[int, ...]) -> np.ndarray:
        size = math.prod(shape)
        os.ftruncate(self._crops, size)
        mapped, self._mapped = self._mapped, None
        if mapped is None or len(mapped) < size:
            mapped = mmap.mmap(self._crops, size)
        self._written = mapped
        return np.frombuffer(mapped, np.uint8, size).reshape(shape)

    def _run(self, threads: int) -> Run | None:
        """Calls pieces of work in ``threads`` threads."""
        return partial(self.split, threads=threads) if threads > 1 else None

    def split(self, pieces: Sequence[Piece], threads: int) -> None:
        """Calls all ``pieces`` in ``threads`` threads, including this one. Raises the error of a piece."""
        if self._threads is None or self._most_threads < threads:
            self._threads, self._most_threads = ThreadPoolExecutor(threads - 1), threads
        left = deque(pieces)
        lock = threading.Lock()

        def take_pieces() -> None:
            while True:
                with lock:
                    if not left:
                        return
                    piece = left.popleft()
                piece()

        helpers = [self._threads.submit(take_pieces) for _ in range(threads - 1)]
        try:
            take_pieces()
        finally:
            with lock:
                left.clear()
            wait(helpers)
        for helper in helpers:
            helper.result()


def _keep_freed_memory() -> None:
    """Sets how much freed memory glibc keeps. Other C libraries have no such setting."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # If one threshold is set, glibc no longer adapts the other.
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)


def _mapped(descriptor: int, num_bytes: int) -> mmap.mmap:
    """Maps a segment. On Linux, the mapping allocates all pages at once."""
    if sys.platform == "linux":
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return mmap.mmap(descriptor, num_bytes, flags=flags)
    return mmap.mmap(descriptor, num_bytes)


@contextlib.contextmanager
def memory_bound(memory: int, num_bytes: int) -> Any:
    """A context in which this process can allocate at most ``num_bytes`` of private memory beyond the present amount,
    which ``memory`` counts."""
    try:
        _, used = read_count(memory)
    except OSError:  # RLIMIT_DATA has no effect on this system.
        yield
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = used + num_bytes if hard == resource.RLIM_INFINITY else min(used + num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
