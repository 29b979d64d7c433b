"""Builds engines on the fake runtime: the real loop, scheduler, skills and preprocessing, no torch and no weights.

Beside it scripts for the runtime, an observer, and an image and settings to ask with.
"""

import os
import threading
from pathlib import Path

import numpy as np
from PIL import Image

from kestrel_engine import EngineInfo, ImageEvent, RequestEvent, RuntimeConfig, StepEvent
from kestrel_engine.building.factory import Built
from kestrel_engine.types.model_config import ModelConfig, parse_model_config
from kestrel_engine.types.requests import Token
from kestrel_engine.types.step import Row, StepToken
from tests.fake_runtime import FakeRuntime

IMAGE = np.full((40, 60, 3), 200, np.uint8)
GREEDY = {"temperature": 0.0, "max_tokens": 6}

SMALL = {"config": {"vision": {"crop_size": 126, "overlap_margin": 1, "max_crops": 4}}}
"""9 x 9 patches: an image takes 81 positions."""


class ByteCodec:
    """id = 100 + byte; ids below 100 are special."""

    def encode(self, text: str) -> list[int]:
        return [100 + byte for byte in text.encode()]

    def decode(self, ids: list[int] | tuple[int, ...]) -> str:
        return bytes(i - 100 for i in ids if 100 <= i < 356).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id - 100]) if 100 <= token_id < 356 else b""


def fake_model(family: str) -> ModelConfig:
    return parse_model_config(SMALL, family=family)  # type: ignore[arg-type]


def fake_build(config: RuntimeConfig, runtime: FakeRuntime, family: str = "moondream3") -> Built:
    model = fake_model(family)
    limits = runtime.limits
    info = EngineInfo(
        model="fake",
        family=model.family,
        skills=model.skills,
        max_context=limits.max_seq_length,
        image_positions=model.image_positions,
        max_crops=model.vision.max_crops,
        vocab_size=limits.vocab_size,
        num_parameters=0,
        weights_bytes=0,
        weights_fingerprint="",
        device="fake",
        dtype="none",
        max_batch_size=limits.max_batch_size,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        max_queue=config.max_queue,
        torch_version="",
    )
    return Built(runtime, model, ByteCodec(), info, config.sizes(cuda=False))


def never_ends(fed: tuple[Token, ...]) -> int:
    """A script: one letter after another."""
    return 100 + 97


class Gate:
    """A script that holds the step thread until it is opened."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self, fed: tuple[Token, ...]) -> int:
        self.entered.set()
        assert self.open.wait(60)
        return 100 + 97


def listening(runtime: FakeRuntime) -> list[StepToken | None]:
    """All tokens that the runtime samples from now on."""
    sampled, sample = [], runtime.sample

    def recorded(row: Row) -> StepToken | None:
        sampled.append(sample(row))
        return sampled[-1]

    runtime.sample = recorded  # type: ignore[method-assign]
    return sampled


class Listener:
    """An observer that keeps what it hears."""

    def __init__(self) -> None:
        self.steps: list[StepEvent] = []
        self.requests: list[RequestEvent] = []
        self.images: list[ImageEvent] = []

    def on_step(self, event: StepEvent) -> None:
        self.steps.append(event)

    def on_request(self, event: RequestEvent) -> None:
        self.requests.append(event)

    def on_image(self, event: ImageEvent) -> None:
        self.images.append(event)


class SlowImage(os.PathLike[str]):
    """An image in a file whose name isn't told before ``open`` is set: preparing it takes as long as a test wants."""

    def __init__(self, folder: Path) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        self._path = folder / "slow.png"
        Image.fromarray(IMAGE).save(self._path)

    def __fspath__(self) -> str:
        self.entered.set()
        assert self.open.wait(60)
        return str(self._path)
