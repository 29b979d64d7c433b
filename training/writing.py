"""Writes what a domain asks as prompts, and draws whole batches of pictures with packed prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from training.domains.picture import Ask, Picture
from training.domains.turning import turn_some
from training.kestrel_small import TOKENIZER_FILE, VIEW
from training.learning.batches import Packed, Packer, Spoiling
from training.mixture import TURNED, draw_domain, draw_picture, draw_size, images_of
from training.prompts import EOS, Prompt, PromptWriter, path_token_text
from training.scenes.tiling import View
from training.scenes.vocabulary import COLOURS, SHAPES
from training.sources import icon_names

LENGTH = 319  # packed prompt positions a picture; with the prefix a multiple of 16
PLACES = (2, 4)  # rows and columns of a cell, in each of which the helper head reads one character
SLOTS = PLACES[0] * PLACES[1]
CHARACTERS = [chr(c) for c in range(32, 127)]
CHARACTER_IDS = {c: i for i, c in enumerate(CHARACTERS)}  # 0, the space's id: nothing
ROLES = "button|link|input|select|checkbox|radio|icon|heading|cell|menu item".split("|")
# New classes go to the end, so that a checkpoint's helper head keeps its rows.
CLASSES = (
    *SHAPES, *icon_names(), "text", "bar", "grouped bar", "line", "pie", "scatter", *(f"screen {r}" for r in ROLES)
)  # fmt: skip
LABELS = {name: i + 1 for i, name in enumerate(dict.fromkeys(CLASSES))}
COLOUR_IDS = {name: i + 1 for i, name in enumerate(COLOURS)}
NO_COLOUR = -1


@cache
def writer() -> PromptWriter:
    return PromptWriter.of(TOKENIZER_FILE)


def spell(text: str) -> list[int]:
    return [i for c in text for i in writer().encode(c)]


def opening(ask: Ask, width: int, height: int) -> Prompt:
    """The request without its result."""
    refs = tuple(tuple(v / (width, height)[i % 2] for i, v in enumerate(ref)) for ref in ask.refs)
    if ask.skill == "caption":
        return writer().open_caption(ask.text)
    if ask.skill == "query":
        return writer().open("query", ask.text.strip(), refs)
    return writer().seek(ask.skill, ask.text, refs)


def write(ask: Ask, width: int, height: int) -> Prompt:
    """The request and its result."""
    prompt = opening(ask, width, height)
    if ask.skill in ("query", "caption"):
        prompt.text(spell(ask.answer) if ask.spelled else writer().encode(ask.answer))
    for x, y in ask.points:
        prompt.coord(min(max(x / width, 0.0), 1.0))
        prompt.coord(min(max(y / height, 0.0), 1.0))
    if ask.skill in ("detect", "segment"):
        for x0, y0, x1, y1 in ask.boxes:
            left, right = max(x0, 0) / width, min(x1, width) / width
            top, bottom = max(y0, 0) / height, min(y1, height) / height
            prompt.reference((left, top, right, bottom))
        for token in ask.path:
            prompt.text(writer().encode(path_token_text(token)))
    prompt.text([EOS])
    return prompt


@dataclass(frozen=True)
class PictureBatch(Packed):
    """Pictures as workers drew them, and the helper head's targets for every cell of the grid."""

    pixels: Tensor  # [B, H, W, 3] uint8
    characters: Tensor  # [B, patches, SLOTS] uint8
    labels: Tensor  # [B, patches] int64, 0: nothing
    colours: Tensor  # [B, patches] int64, -1: unknown
    boxes: Tensor  # [B, patches, 4] shares of the picture
    complete: Tensor  # [B] 1.0, or 0.0 where a cell without a target may have something


def helper_targets(picture: Picture) -> tuple[NDArray[np.uint8], ...]:
    """Per cell: the characters whose centres lie in its places; class, colour and box of the smallest object there."""
    grid, (rows, columns) = VIEW.grid, PLACES
    height, width = picture.pixels.shape[:2]
    characters = np.zeros((grid * rows, grid * columns), np.uint8)
    for x, y, c in picture.characters:
        i, j = int(y / height * grid * rows), int(x / width * grid * columns)
        if 0 <= i < grid * rows and 0 <= j < grid * columns:
            characters[i, j] = CHARACTER_IDS.get(c, CHARACTER_IDS["?"])
    characters = characters.reshape(grid, rows, grid, columns).transpose(0, 2, 1, 3)
    labels, colours = np.zeros((grid, grid), np.int64), np.full((grid, grid), NO_COLOUR, np.int64)
    boxes = np.zeros((grid, grid, 4), np.float32)
    for mark in sorted(picture.marks, key=lambda m: -(m.box[2] - m.box[0]) * (m.box[3] - m.box[1])):
        box = np.array(mark.box) / (width, height, width, height)
        j0, i0, j1, i1 = (round(v) for v in (box * grid - 0.5).tolist())
        down, across = (max(i0, 0), max(i0, i1 - 1, 0) + 1), (max(j0, 0), max(j0, j1 - 1, 0) + 1)
        cells = slice(*down), slice(*across)
        labels[cells], boxes[cells] = LABELS[mark.label], box
        colours[cells] = COLOUR_IDS.get(mark.colour, NO_COLOUR)
    flat = labels.reshape(-1), colours.reshape(-1), boxes.reshape(-1, 4)
    return characters.reshape(-1, SLOTS), *flat  # type: ignore[return-value]


def pack(rng: random.Random, pictures: list[Picture], spoiling: Spoiling) -> PictureBatch:
    """Pictures of one size; requests in random order as long as they fit."""
    height, width = pictures[0].pixels.shape[:2]
    packer = Packer(len(pictures), LENGTH, VIEW.prefix)
    for row, picture in enumerate(pictures):
        room, prompts = LENGTH, []
        for ask in rng.sample(picture.asks, len(picture.asks)):
            prompt = write(ask, width, height)
            if len(prompt.ids) - 1 <= room:
                room -= len(prompt.ids) - 1
                prompts.append(prompt)
        packer.add(row, prompts)
    parts = zip(*map(helper_targets, pictures), strict=True)
    targets = [torch.from_numpy(np.stack(part)) for part in parts]
    pixels = torch.from_numpy(np.stack([picture.pixels for picture in pictures]))
    return PictureBatch(View.of(width, height, VIEW), spoiling, **packer.tensors(), pixels=pixels,
                        characters=targets[0], labels=targets[1], colours=targets[2], boxes=targets[3],
                        complete=torch.tensor([float(picture.complete) for picture in pictures]))  # fmt: skip


def draw_spoiling(rng: random.Random, images: int) -> Spoiling:
    """Blur, tint, noise and JPEG down to quality 30; half of the pictures stay clean."""
    dirty = [rng.random() < 0.5 for _ in range(images)]
    tints = torch.ones(images, 3)
    for row in range(images):
        if rng.random() < 0.3:
            gain = rng.uniform(0.85, 1.1)
            tints[row] = torch.tensor([gain * rng.uniform(0.92, 1.08) for _ in range(3)])
    return Spoiling(
        rng.uniform(0.3, 1.0),
        torch.tensor([d and rng.random() < 0.3 for d in dirty]),
        tints,
        torch.tensor([rng.uniform(0, 14) if d and rng.random() < 0.4 else 0.0 for d in dirty]),
        torch.tensor([rng.randint(30, 96) if d else 0 for d in dirty]),
        rng.random() < 0.8,
    )


class Steps(Dataset[PictureBatch]):
    """Item i is the batch of training step i for one rank, a pure function of (seed, i, rank)."""

    def __init__(
        self, seed: int, images: int, rank: int, progress: tuple[float, float], guess: int
    ) -> None:
        self.seed, self.images, self.rank = seed, images, rank
        self.progress, self.guess = progress, guess

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, step: int) -> PictureBatch:
        torch.set_num_threads(1)
        begin, end = self.progress
        progress = begin + (end - begin) * min(1.0, step / self.guess)
        size = draw_size(random.Random(f"{self.seed}/{step}"), progress)  # all ranks take alike
        rng = random.Random(f"{self.seed}/{step}/{self.rank}")
        pictures = []
        while len(pictures) < images_of(size, self.images):
            try:
                picture = draw_picture(rng, draw_domain(rng, progress), size)
                pictures.append(turn_some(rng, picture, TURNED))
            except (ArithmeticError, LookupError, RuntimeError, ValueError) as error:
                print(f"step {step}: a picture of {size} failed: {error!r}", flush=True)
        return pack(rng, pictures, draw_spoiling(rng, len(pictures)))
