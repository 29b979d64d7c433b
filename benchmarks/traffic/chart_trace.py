"""The trace of the serving benchmarks: random images and questions with the statistics of ChartQA's test split.

1,509 images (60 % 850x600, 20 % 800x557, 20 % 420x520: a smooth background, drawn bars, discs and lines, a little
noise, about 150 kB each as JPEG) and 2,500 questions of 12 to 30 tokens in image order: each image has one
question, 991 of them a second. A tokenizer determines the tokens.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyvips

from ..reports.program import Flag

NUM_IMAGES, NUM_QUESTIONS = 1509, 2500
TOKENS = (12, 30)
"""The fewest and the most tokens of a question."""
VERSION = 1
"""The version of the images. Increase it when a seed gives other images, so that cached images are not used."""
IN_PROCESS = 48
"""The most images that are drawn in this process. Starting other processes would take longer."""


@dataclass(frozen=True)
class Shape:
    """A kind of image. ``noise``: standard deviation in grey levels; with ``quality`` it makes about 150 kB."""

    width: int
    height: int
    share: float
    noise: float
    quality: int


SHAPES = (
    Shape(850, 600, 0.6, 3.3, 90),
    Shape(800, 557, 0.2, 3.5, 91),
    Shape(420, 520, 0.2, 3.8, 95),
)

WORDS = tuple(
    "what is the value of in for total share which year bar has highest lowest line shows more "
    "than between how many people per cent country was number average difference green blue red "
    "label left right axis year's growth rate sales first last color chart are there above below "
    "and a by on to at it no if".split()
)


@dataclass(frozen=True)
class Question:
    """``is_repeat``: an earlier question of the trace was about the same image."""

    image: int
    text: str
    num_tokens: int
    is_repeat: bool


@dataclass(frozen=True)
class ChartTrace:
    """The encoded ``images``, and ``questions`` about them in image order."""

    images: Sequence[bytes]
    questions: tuple[Question, ...]


def shape_of(number: int) -> Shape:
    """Returns the kind of image ``number``. Every part of the trace has the same shares of kinds."""
    place = (number * 0.6180339887498949) % 1.0
    for shape in SHAPES:
        if place < shape.share:
            return shape
        place -= shape.share
    return SHAPES[-1]


def draw(number: int) -> bytes:
    """Returns image ``number`` as JPEG, the same in every run."""
    rng = np.random.default_rng((VERSION, 0, number))
    shape = shape_of(number)
    width, height = shape.width, shape.height
    patches = rng.integers(170, 256, (3, 4, 3)).astype(np.uint8)
    image = pyvips.Image.new_from_array(patches)
    image = image.resize(width / 4 * 1.01, vscale=height / 3 * 1.01, kernel="cubic")
    pixels = image.crop(0, 0, width, height).numpy().astype(np.float32)
    bars = int(rng.integers(4, 12))
    step = width // (bars + 1)
    for bar in range(bars):
        left, top = step // 2 + bar * step, int(rng.integers(height // 5, height - 60))
        pixels[top : height - 30, left : left + step * 2 // 3] = rng.integers(0, 256, 3)
    for _ in range(int(rng.integers(2, 6))):
        radius = int(rng.integers(8, height // 10))
        x, y = (int(rng.integers(radius, side - radius)) for side in (width, height))
        within = np.hypot(*np.ogrid[-radius : radius + 1, -radius : radius + 1]) <= radius
        box = pixels[y - radius : y + radius + 1, x - radius : x + radius + 1]
        box[within[: len(box), : box.shape[1]]] = rng.integers(0, 256, 3)
    for _ in range(int(rng.integers(10, 24))):
        ends = rng.uniform(0, 1, (2, 2)) * (width - 1, height - 1)
        x, y = np.linspace(*ends, width).round().astype(int).T
        pixels[y, x] = rng.integers(0, 256, 3)
    pixels += rng.standard_normal(pixels.shape, dtype=np.float32) * np.float32(shape.noise)
    image = pyvips.Image.new_from_array(pixels.clip(0, 255).astype(np.uint8))
    return bytes(image.copy(interpretation="srgb").jpegsave_buffer(Q=shape.quality))


def _draw_some(numbers: Sequence[int]) -> list[bytes]:
    return [draw(number) for number in numbers]


def draw_images(count: int, *, first: int = 0, cache: str | Path | None = None) -> list[bytes]:
    """Returns ``count`` images from ``first`` on. A pool of processes draws many images. ``cache``: a folder for
    them."""
    if cache is None:
        return _drawn(count, first)
    path = Path(cache) / f"chart-images-{VERSION}-0-{first}-{count}.npz"
    if path.exists():
        return load_images(path)
    images = _drawn(count, first)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.stem}-{os.getpid()}.npz")
    store_images(partial, images)
    partial.replace(path)
    return images


def store_images(path: Path, images: Sequence[bytes]) -> None:
    """Writes all images to one .npz file."""
    ends = np.cumsum([len(p) for p in images])
    np.savez(path, ends=ends, data=np.frombuffer(b"".join(images), np.uint8))


def load_images(path: Path) -> list[bytes]:
    with np.load(path) as stored:
        ends, data = stored["ends"], stored["data"].tobytes()
    return [data[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def _drawn(count: int, first: int) -> list[bytes]:
    numbers = range(first, first + count)
    if count <= IN_PROCESS:
        return _draw_some(numbers)
    began, workers = time.perf_counter(), os.cpu_count() or 1
    print(f"drawing {count} images with {workers} processes", flush=True)
    portions = [numbers[i : i + 16] for i in range(0, count, 16)]
    # Spawn the processes, because this one may have threads and a GPU.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        drawn = pool.map(_draw_some, portions)
        images = [image for portion in drawn for image in portion]
    print(f"drawn in {time.perf_counter() - began:.1f} s", flush=True)
    return images


def write_question(rng: random.Random, encode: Callable[[str], list[int]]) -> tuple[str, int]:
    """(text, its tokens): words drawn until a drawn length within TOKENS is reached, counted by ``encode``."""
    wanted, text = rng.randint(*TOKENS), rng.choice(WORDS)
    count = len(encode(text))
    while count < wanted:
        for word in rng.sample(WORDS, len(WORDS)):
            longer = f"{text} {word}"
            if count < (found := len(encode(longer))) <= wanted:
                text, count = longer, found
                break
        else:
            if count >= TOKENS[0] or wanted == TOKENS[1]:
                break
            wanted += 1
    assert TOKENS[0] <= count <= TOKENS[1], (
        f"{text!r} has {count} tokens: no question of {TOKENS} tokens can be made of these words"
    )
    return text, count


def order_of_questions(num_images: int, num_questions: int) -> list[int]:
    """The image of each question, in image order: one each, and a second one for a drawn few; more if asked."""
    each, more = divmod(num_questions, num_images)
    again = set(random.Random("0/again").sample(range(num_images), more))
    return [p for p in range(num_images) for _ in range(each + (p in again))]


def make_trace(
    encode: Callable[[str], list[int]],
    *,
    num_prompts: int | None = None,
    num_images: int | None = None,
    cache: str | Path | None = None,
) -> ChartTrace:
    """The trace, or its beginning: of the first ``num_prompts`` questions or ``num_images`` images."""
    count = num_images or NUM_IMAGES
    order = order_of_questions(count, round(count * NUM_QUESTIONS / NUM_IMAGES))
    if num_prompts is not None:
        # A short trace is the beginning of the long one: its share of repeats is the same.
        order = [order[i % len(order)] for i in range(num_prompts)]
    rng, questions = random.Random("0/questions"), []
    seen: set[int] = set()
    for image in order:
        text, tokens = write_question(rng, encode)
        questions.append(Question(image, text, tokens, image in seen))
        seen.add(image)
    return ChartTrace(draw_images(max(order) + 1, cache=cache), tuple(questions))


TRACE_FLAGS = (
    Flag("--num-prompts", None, "only the first N questions [2500]", type=int, metavar="N"),
    Flag("--num-images", None, "only the first N images [1509]", type=int, metavar="N"),
    Flag("--cache", None, "folder that keeps drawn images for later runs", type=Path),
)
"""The flags for the images and questions of the trace. `kestrel bench` sends images and questions of your own."""


def trace_from(args: argparse.Namespace, encode: Callable[[str], list[int]]) -> ChartTrace:
    """Returns the trace for the flags."""
    return make_trace(
        encode, num_prompts=args.num_prompts, num_images=args.num_images, cache=args.cache
    )
