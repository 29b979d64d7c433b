"""Decoders in the same thread: the work of a decoder process, answered later, or never."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from typing import Any

from kestrel_engine.config.image_limits import ImageLimits
from kestrel_engine.preprocess.processes.decoder import ImageDecoder
from kestrel_engine.preprocess.processes.segments import new_segment
from kestrel_engine.types.model_config import VisionConfig

_SECONDS = 0.02, 0.2
_ANSWERS: dict[tuple[bytes, str], tuple[dict[str, Any], bytes]] = {}


class Decoders:
    """Makes decoders, in the place of the class DecoderProcess. ``lost``, ``stuck``: shares of the images."""

    def __init__(
        self, rng: random.Random, lost: float, stuck: float, heard: Callable[[str], None]
    ) -> None:
        self.rng, self.lost, self.stuck, self.heard = rng, lost, stuck, heard
        self.num_open = 0

    def __call__(
        self,
        limits: ImageLimits,
        vision: VisionConfig,
        on_message: Callable[[Decoder, dict[str, Any]], None],
        **options: Any,
    ) -> Decoder:
        return Decoder(self, ImageDecoder(limits, vision), on_message)


class Decoder:
    def __init__(
        self,
        made_by: Decoders,
        work: ImageDecoder,
        on_message: Callable[[Decoder, dict[str, Any]], None],
    ) -> None:
        self._made_by, self._work, self._on_message = made_by, work, on_message
        self._loop = asyncio.get_running_loop()
        self._answering: asyncio.TimerHandle | None = None
        self.is_open = True
        made_by.num_open += 1
        self._renew()

    def _renew(self) -> None:
        self.crops = new_segment()
        self._work.take_crops_segment(os.dup(self.crops), 0)

    def renew_crops(self, num_bytes: int) -> None:
        os.close(self.crops)
        self._renew()

    def is_ready(self) -> bool:
        return self.is_open

    def send(self, message: dict[str, Any], source: int) -> None:
        rng = self._made_by.rng
        answer = self._answer_to(message, source)
        seconds = rng.uniform(*_SECONDS)
        if "done" in answer:
            answer["done"]["seconds"] = seconds
        if rng.random() < self._made_by.lost:
            self._made_by.heard("lost decoder")
            answer = {"ended": -11}
        elif rng.random() < self._made_by.stuck:
            self._made_by.heard("stuck decoder")
            return
        self._answer(answer, seconds)

    def _answer_to(self, message: dict[str, Any], source: int) -> dict[str, Any]:
        """Does the work once for each image, as libvips takes most of the time of a world."""
        asked = os.pread(source, os.fstat(source).st_size, 0), repr(message)
        if asked not in _ANSWERS:
            answer = self._work.answer(message, source)
            size = os.fstat(self.crops).st_size
            _ANSWERS[asked] = answer, os.pread(self.crops, size, 0)
        answer, crops = _ANSWERS[asked]
        os.ftruncate(self.crops, len(crops))
        os.pwrite(self.crops, crops, 0)
        return {kind: dict(value) if kind == "done" else value for kind, value in answer.items()}

    def _answer(self, answer: dict[str, Any], seconds: float) -> None:
        def tell() -> None:
            if "ended" in answer:
                self.close()
            self._on_message(self, answer)

        self._answering = self._loop.call_later(seconds, tell)

    def kill(self) -> None:
        if self._answering is not None:
            self._answering.cancel()
        self._answer({"ended": -9}, 0.001)

    def close(self) -> None:
        if self._answering is not None:
            self._answering.cancel()
        if self.is_open:
            self.is_open = False
            self._made_by.num_open -= 1
            os.close(self.crops)
            os.close(self._work._crops)
