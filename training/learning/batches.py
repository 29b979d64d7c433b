"""Batches: pictures of one size, their packed prompts, and the targets of the helper head."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from kestrel_engine.preprocess.crops import select_tiling
from kestrel_engine.teaching.learning.packing import coord_bin, size_bin
from training import mixture
from training.camera import MOST_TURN, TURNED, compress, turn
from training.domains.charts.questions import EXTREMES
from training.domains.photos.names import UNKNOWN
from training.domains.photos.names import labels as photographed
from training.domains.picture import Picture
from training.kestrel_small import CONFIG
from training.prompts import COORD, SIZE, write
from training.scenes.vocabulary import COLOURS, SHAPES
from training.sources import icon_names

SKILL_WEIGHTS = {  # of the losses of their answers
    "query": 1.0, "reasoning": 1.0, "point": 0.5, "detect": 0.5, "segment": 0.7, "caption": 1.0
}  # fmt: skip
# A loss counts by token. The tokens of a short answer count more, so that names and numbers don't vanish beside texts.
EVEN, LEAST, MOST = 8, 0.7, 2.0  # tokens of an answer whose share is 1; bounds of the share
MOST_WANTED = 3.0  # times that a loss may count by mixture.WANTED
# "I don't know." and "There is no ..." are decided by the first token, which counts as in an answer of so many; the
# others count less.
DECLINES = UNKNOWN, "There is no "
DECIDED, SETTLED = 4, 0.2
# Nats by which the decision for "I don't know." must lead about photographs, so that what is unclear is declined.
MARGIN, JUDGED = 1.5, ("photo name", "photo outside")
LENGTH = 319  # packed prompt positions a picture; with the prefix a multiple of 16
# Rows and columns of a cell, in each of which the helper head reads one character. Upright text needs the other way.
PLACES = (2, 4)
SLOTS = PLACES[0] * PLACES[1]
CHARACTERS = [chr(c) for c in range(32, 127)]
CHARACTER_IDS = {c: i for i, c in enumerate(CHARACTERS)}  # 0, the space's id: nothing
ROLES = "button|link|input|select|checkbox|radio|icon|heading|cell|menu item".split("|")
CLASSES = (
    *SHAPES, *icon_names(), "text", "bar", "grouped bar", "line", "pie", "scatter", *(f"screen {r}" for r in ROLES)
)  # fmt: skip
# Classes whose rows of the helper head come last, after those of earlier checkpoints.
LATER = (*photographed(), *EXTREMES)
LABELS = {name: i + 1 for i, name in enumerate(dict.fromkeys((*CLASSES, *LATER)))}
COLOUR_IDS = {name: i + 1 for i, name in enumerate(COLOURS)}
NO_COLOUR = -1
NOTHING = -1.0


@dataclass(frozen=True)
class Batch:
    """B pictures of one size with one row of L packed prompt positions each."""

    tiling: tuple[int, int]
    pixels: Tensor  # [B, H, W, 3] uint8
    ids: Tensor  # [B, L]
    values: Tensor  # [B, L, 2]
    document: Tensor  # [B, L] number of the prompt, -1 for padding
    position: Tensor  # [B, L]
    next_id: Tensor  # [B, L]
    weight: Tensor  # [B, L] of the next id's loss; 0.0: it is not trained
    margin: Tensor  # [B, L] taken off the logit of UNKNOWN's first id
    next_coord: Tensor  # [B, L] fractional bins; NOTHING where the next id is no coordinate
    next_size: Tensor  # [B, L, 2]; NOTHING where the next id is no size
    characters: Tensor  # [B, patches, 3 * SLOTS] uint8: by PLACES, by their transpose, what the object stands for
    labels: Tensor  # [B, patches] int64, 0: nothing
    colours: Tensor  # [B, patches] int64, -1: unknown
    boxes: Tensor  # [B, patches, 4] shares of the picture
    domain: Tensor  # [B] int64, the number in mixture.DOMAINS
    complete: Tensor  # [B] 1.0, or 0.0 where a cell without a target may have something

    def to(self, device: torch.device) -> Self:
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed: dict[str, Any] = {
            k: change(v) for k, v in vars(self).items() if isinstance(v, Tensor)
        }
        return replace(self, **changed)


def helper_targets(picture: Picture) -> tuple[NDArray[Any], ...]:
    """Per cell: the characters whose centres lie in its places, and those of the smallest object there; the object's
    class, colour and box."""
    grid = CONFIG.vision.grid
    height, width = picture.pixels.shape[:2]
    written = [_by_places(picture, *places) for places in (PLACES, PLACES[::-1])]
    told = np.zeros((grid, grid, SLOTS), np.uint8)
    labels, colours = np.zeros((grid, grid), np.int64), np.full((grid, grid), NO_COLOUR, np.int64)
    boxes = np.zeros((grid, grid, 4), np.float32)
    for mark in sorted(picture.marks, key=lambda m: -(m.box[2] - m.box[0]) * (m.box[3] - m.box[1])):
        box = np.array(mark.box) / (width, height, width, height)
        j0, i0, j1, i1 = (round(v) for v in (box * grid - 0.5).tolist())
        down, across = (max(i0, 0), max(i0, i1 - 1, 0) + 1), (max(j0, 0), max(j0, j1 - 1, 0) + 1)
        cells = slice(*down), slice(*across)
        labels[cells], boxes[cells] = LABELS[mark.label], box
        colours[cells] = COLOUR_IDS.get(mark.colour, NO_COLOUR)
        told[cells] = [_character_id(c) for c in mark.told.ljust(SLOTS)]
    flat = labels.reshape(-1), colours.reshape(-1), boxes.reshape(-1, 4)
    return np.concatenate([*written, told.reshape(-1, SLOTS)], 1), *flat


def _character_id(character: str) -> int:
    return CHARACTER_IDS.get(character, CHARACTER_IDS["?"])


def _by_places(picture: Picture, rows: int, columns: int) -> NDArray[np.uint8]:
    """The character of each of a cell's places [patches, SLOTS]."""
    grid, (height, width) = CONFIG.vision.grid, picture.pixels.shape[:2]
    found = np.zeros((grid * rows, grid * columns), np.uint8)
    for x, y, c in picture.characters:
        i, j = int(y / height * grid * rows), int(x / width * grid * columns)
        if 0 <= i < grid * rows and 0 <= j < grid * columns:
            found[i, j] = _character_id(c)
    return found.reshape(grid, rows, grid, columns).transpose(0, 2, 1, 3).reshape(-1, SLOTS)


def pack(rng: random.Random, pictures: list[Picture]) -> Batch:
    """Pictures of one size; requests as long as they fit, in a random order in which what is wanted comes early."""
    height, width = pictures[0].pixels.shape[:2]
    ids = np.zeros((len(pictures), LENGTH), np.int64)
    values = np.zeros((*ids.shape, 2), np.float32)
    document, position, next_id = np.full_like(ids, -1), np.zeros_like(ids), np.zeros_like(ids)
    weight, margin = np.zeros(ids.shape, np.float32), np.zeros(ids.shape, np.float32)
    next_coord, next_size = np.full_like(weight, NOTHING), np.full_like(values, NOTHING)
    for row, picture in enumerate(pictures):
        at = number = 0
        turns = [rng.random() ** (1 / mixture.wanted(ask.kind)) for ask in picture.asks]
        for _, ask in sorted(zip(turns, picture.asks, strict=True), key=lambda t: -t[0]):
            prompt = write(ask, width, height)
            share = SKILL_WEIGHTS[ask.skill] * min(MOST_WANTED, max(0.5, mixture.wanted(ask.kind)))
            n = len(prompt.ids) - 1  # the last id is only a target
            declines = ask.answer.startswith(DECLINES)
            if ask.skill == "query":
                decided = DECIDED if declines else n + 1 - prompt.start
                share *= min(MOST, max(LEAST, (EVEN / decided) ** 0.5))
            if at + n > LENGTH:
                continue
            ids[row, at : at + n], values[row, at : at + n] = prompt.ids[:-1], prompt.values[:-1]
            document[row, at : at + n] = number
            position[row, at : at + n] = CONFIG.image_prefix + np.arange(n)
            for i in range(prompt.start, n + 1):
                here, target, (x, y) = (row, at + i - 1), prompt.ids[i], prompt.values[i]
                settled = SETTLED if declines and i > prompt.start else 1
                next_id[here], weight[here] = target, share * settled
                if target == COORD:
                    next_coord[here] = coord_bin(x, 1024)
                elif target == SIZE:
                    next_size[here] = size_bin(x, 1024), size_bin(y, 1024)
            margin[row, at + prompt.start - 1] = MARGIN * (ask.kind in JUDGED)
            at, number = at + n, number + 1
    helped = (np.stack(part) for part in zip(*map(helper_targets, pictures), strict=True))
    fields: list[Tensor] = [
        *map(torch.from_numpy, (ids, values, document, position, next_id, weight, margin, next_coord, next_size)),
        *map(torch.from_numpy, helped), torch.tensor([list(mixture.DOMAINS).index(p.domain) for p in pictures]),
        torch.tensor([float(p.complete) for p in pictures]),
    ]  # fmt: skip
    pixels = torch.from_numpy(np.stack([picture.pixels for picture in pictures]))
    return Batch(select_tiling(width, height, CONFIG.vision), pixels, *fields)


class Steps(Dataset[Batch]):
    """Item i is the batch of training step i for one rank, a pure function of (seed, i, rank)."""

    def __init__(self, seed: int, images: int, rank: int) -> None:
        self.seed, self.images, self.rank = seed, images, rank

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, step: int) -> Batch:
        torch.set_num_threads(1)
        size = mixture.draw_size(random.Random(f"{self.seed}/{step}"))  # all ranks take alike
        rng = random.Random(f"{self.seed}/{step}/{self.rank}")
        pictures: list[Picture] = []
        while len(pictures) < mixture.images_of(size, self.images):
            try:
                drawn = mixture.draw_picture(rng, mixture.draw_domain(rng), size)
                if drawn.domain != "shapes" and rng.random() < TURNED:
                    drawn = turn(drawn, rng.uniform(-MOST_TURN, MOST_TURN))
                pictures.append(replace(drawn, pixels=compress(rng, drawn.pixels)))
            except (ArithmeticError, LookupError, RuntimeError, ValueError) as error:
                print(f"step {step}: a picture of {size} failed: {error!r}", flush=True)
        return pack(rng, pictures)
