"""Training batches: scenes, packed prompts and the degradation of the images, as plain arrays.

A batch is a pure function of (seed, step, rank), so that training can resume. Worker processes make the batches, and
the GPU draws the images.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from kestrel_grpc.scenes.captions import LENGTHS
from kestrel_grpc.scenes.questions import draw_question
from kestrel_grpc.scenes.render import pack_scene
from kestrel_grpc.scenes.scenes import Scene, draw_scene, draw_size
from kestrel_grpc.scenes.tiling import PREFIX, View, choose_tiling
from kestrel_grpc.scenes.vocabulary import COLOURS, MAX_OBJECTS, MEASURED_COLOURS
from training.prompts import (
    COORD,
    SIZE,
    Prompt,
    PromptWriter,
    coord_bin,
    draw_single,
    draw_target,
    size_bin,
)

TEXT_LENGTH = 395  # packed prompt positions an image; with the prefix a multiple of 16
SKILLS: tuple[str, ...] = ("query", "reasoning", "point", "detect", "segment", "caption")
PAD = -1
LARGE = 500_000  # pixels


@dataclass(frozen=True)
class Spoiling:
    """The degradation of a step's images between drawing and tiling. Arrays have one entry for each image.

    factor: drawn at this multiple of the size and rescaled; blur: sigma in pixels for the images flagged in
    ``blurred``; noise: standard deviation in grey levels; quality: 0 leaves the image as it is.
    """

    factor: float
    blur: float
    blurred: Tensor
    noise: Tensor
    quality: Tensor
    subsample: bool


@dataclass(frozen=True)
class Packed:
    """B images of one size and their packed prompts (L positions)."""

    view: View
    spoiling: Spoiling
    ids: Tensor  # [B, L]
    values: Tensor  # [B, L, 2]
    document: Tensor  # [B, L] number of the prompt, -1 for padding
    position: Tensor  # [B, L]
    text_index: Tensor  # [T] flat positions whose next id is trained
    text_target: Tensor  # [T]
    text_skill: Tensor  # [T] index into SKILLS
    coord_index: Tensor  # [C] flat positions whose next id is a coordinate
    coord_target: Tensor  # [C] fractional bins
    size_index: Tensor  # [S]
    size_target: Tensor  # [S, 2]

    def to(self, device: torch.device) -> Self:
        """On the device, but for the spoiling, which is read on the host."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed: dict[str, Any] = {
            k: change(v) for k, v in vars(self).items() if isinstance(v, Tensor)
        }
        return replace(self, **changed)


@dataclass(frozen=True)
class Batch(Packed):
    """kestrel-tiny's: scenes that the GPU draws."""

    shapes: Tensor  # [B, 12, 16]
    lines: Tensor  # [B, 6, 9]
    background: Tensor  # [B, 11]
    boxes: Tensor  # [B, 12, 4] image shares, for the helper head
    labels: Tensor  # [B, 12, 3] kind, colour, style; -1 where absent


def draw_prompts(rng: random.Random, writer: PromptWriter, scene: Scene, room: int) -> list[Prompt]:
    """Every skill once, then questions, as long as they fit into ``room`` positions."""
    found: list[Prompt] = []

    def add(prompt: Prompt) -> bool:
        nonlocal room
        fits = len(prompt.ids) - 1 <= room
        if fits:
            room -= len(prompt.ids) - 1
            found.append(prompt)
        return fits

    add(writer.caption(scene, rng.choices(LENGTHS, (4, 3, 3))[0]))
    add(writer.detect(scene, *draw_target(rng, scene)))
    add(writer.point(scene, *draw_target(rng, scene)))
    add(writer.segment(scene, *draw_single(rng, scene)))
    for _ in range(3):
        add(writer.query(draw_question(rng, scene)))
    add(writer.reasoning(draw_question(rng, scene), scene))
    misses = 0
    while room >= 16 and misses < 3:
        u = rng.random()
        if u < 0.6:
            prompt = writer.query(draw_question(rng, scene))
        elif u < 0.75:
            prompt = writer.detect(scene, *draw_target(rng, scene))
        elif u < 0.85:
            prompt = writer.point(scene, *draw_target(rng, scene))
        else:
            prompt = writer.segment(scene, *draw_single(rng, scene))
        misses += not add(prompt)
    return found


class Packer:
    """Collects packed prompts of a batch and the flat positions that carry a loss."""

    def __init__(self, images: int, length: int, prefix: int = PREFIX) -> None:
        self.ids = np.zeros((images, length), np.int64)
        self.values = np.zeros((images, length, 2), np.float32)
        self.document = np.full((images, length), PAD, np.int64)
        self.position = np.zeros((images, length), np.int64)
        self.length, self.prefix = length, prefix
        self.text: list[tuple[int, int, int]] = []
        self.coords: list[tuple[int, float]] = []
        self.sizes: list[tuple[int, float, float]] = []

    def add(self, image: int, prompts: list[Prompt]) -> None:
        at = 0
        for number, prompt in enumerate(prompts):
            n = len(prompt.ids) - 1  # the last id is only a target
            row = slice(at, at + n)
            self.ids[image, row] = prompt.ids[:-1]
            self.values[image, row] = prompt.values[:-1]
            self.document[image, row] = number
            self.position[image, row] = np.arange(self.prefix, self.prefix + n)
            skill = SKILLS.index(prompt.skill)
            for i in range(prompt.start - 1, n):
                flat, target = image * self.length + at + i, prompt.ids[i + 1]
                self.text.append((flat, target, skill))
                if target == COORD:
                    self.coords.append((flat, coord_bin(prompt.values[i + 1][0])))
                elif target == SIZE:
                    w, h = prompt.values[i + 1]
                    self.sizes.append((flat, size_bin(w), size_bin(h)))
            at += n

    def tensors(self) -> dict[str, Tensor]:
        """The fields of Packed, but for view and spoiling."""
        text = np.array(self.text, np.int64)
        coords = np.array(self.coords, np.float64).reshape(-1, 2)
        sizes = np.array(self.sizes, np.float64).reshape(-1, 3)
        return {
            "ids": torch.from_numpy(self.ids),
            "values": torch.from_numpy(self.values),
            "document": torch.from_numpy(self.document),
            "position": torch.from_numpy(self.position),
            "text_index": torch.from_numpy(text[:, 0].copy()),
            "text_target": torch.from_numpy(text[:, 1].copy()),
            "text_skill": torch.from_numpy(text[:, 2].copy()),
            "coord_index": torch.from_numpy(coords[:, 0].astype(np.int64)),
            "coord_target": torch.from_numpy(coords[:, 1].astype(np.float32)),
            "size_index": torch.from_numpy(sizes[:, 0].astype(np.int64)),
            "size_target": torch.from_numpy(sizes[:, 1:].astype(np.float32)),
        }


def _draw_spoiling(rng: random.Random, images: int, width: int, height: int) -> Spoiling:
    factor = 1.0
    if rng.random() < 0.25:
        factor = math.exp(rng.uniform(math.log(0.6), math.log(1.6)))
        if width * height * factor * factor > 1.6e6:
            factor = rng.uniform(0.6, 1.0)
    quality = [0 if rng.random() < 0.12 else rng.randint(58, 96) for _ in range(images)]
    scale = max(View.of(width, height).tiled_scale)
    blur = rng.uniform(0.3, 1.3) / min(scale, 1.0)
    return Spoiling(
        factor,
        blur,
        torch.tensor([rng.random() < 0.3 for _ in range(images)]),
        torch.tensor([rng.uniform(0, 10) if rng.random() < 0.4 else 0.0 for _ in range(images)]),
        torch.tensor(quality),
        rng.random() < 0.8,
    )


def draw_batch(
    rng: random.Random, writer: PromptWriter, images: int, width: int, height: int
) -> Batch:
    """A batch of fresh scenes of one image size."""
    packer = Packer(images, TEXT_LENGTH)
    arrays: list[tuple[np.ndarray, ...]] = []
    boxes = np.zeros((images, MAX_OBJECTS, 4), np.float32)
    labels = np.full((images, MAX_OBJECTS, 3), -1, np.int64)
    for row in range(images):
        scene = draw_scene(
            rng, width, height, palette=len(COLOURS) if rng.random() < 0.6 else MEASURED_COLOURS
        )
        arrays.append(pack_scene(scene))
        for i, s in enumerate(scene.shapes):
            boxes[row, i] = s.box
            labels[row, i] = s.kind, s.colour, s.style
        packer.add(row, draw_prompts(rng, writer, scene, TEXT_LENGTH))
    boxes /= np.array((width, height, width, height), np.float32)
    shapes, lines, background = (
        torch.from_numpy(np.stack(part)) for part in zip(*arrays, strict=True)
    )
    used = int((labels[:, :, 0] >= 0).sum(1).max())
    return Batch(
        view=View.of(width, height),
        spoiling=_draw_spoiling(rng, images, width, height),
        shapes=shapes[:, :used],
        lines=lines,
        background=background,
        boxes=torch.from_numpy(boxes),
        labels=torch.from_numpy(labels),
        **packer.tensors(),
    )


def draw_training_size(rng: random.Random, warm: bool) -> tuple[int, int]:
    """An image size; early in training mostly those that become one crop, which are cheap.

    Large images are rarer than in the evaluation: they are shrunk to the same few tilings, and drawing
    them takes most of the time.
    """
    for _ in range(20):
        width, height = draw_size(rng)
        if width * height > LARGE and rng.random() < 0.75:
            continue
        single = choose_tiling(width, height) == (1, 1)
        if single or not warm or rng.random() < 0.25:
            break
    return width, height


class StepData(Dataset[Batch]):
    """Item i is the batch of training step i for one rank."""

    def __init__(
        self,
        seed: int,
        images: int,
        steps: int,
        warm_steps: int,
        rank: int = 0,
        max_pixels: int = 0,
    ):
        self.seed, self.images, self.steps = seed, images, steps
        self.warm_steps, self.rank, self.max_pixels = warm_steps, rank, max_pixels
        self._writer: PromptWriter | None = None

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> Batch:
        if self._writer is None:
            self._writer = PromptWriter.bundled()
        # All ranks of a step share the image size, so that they need the same time.
        shared = random.Random(f"{self.seed}/{step}")
        width, height = draw_training_size(shared, step < self.warm_steps)
        while self.max_pixels and width * height > self.max_pixels:
            width, height = draw_training_size(shared, step < self.warm_steps)
        rng = random.Random(f"{self.seed}/{step}/{self.rank}")
        return draw_batch(rng, self._writer, self.images, width, height)
