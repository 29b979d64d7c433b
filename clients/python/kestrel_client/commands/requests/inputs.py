"""The inputs of a command: images in all forms, and the word that is not an image."""

from __future__ import annotations

import argparse
import glob
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from kestrel_client import ImageFeatures, ImageHandle
from kestrel_client.images.fetching import is_url

from ..flags import SettingsError
from ..parser import CommandError
from .features import SUFFIX, read_features

Source: TypeAlias = str | bytes | ImageHandle | ImageFeatures

IMAGE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".gif", ".bmp", ".avif", ".heic", ".heif")
)
IMAGE_HELP = (
    "image: a file, a folder of images, a pattern like '*.jpg', an http(s) address, - for standard input, "
    "or the id that put prints"
)
_ID_PREFIX = "img_"
_MOST_BYTES = 256 << 20
_PATTERN = frozenset("*?[")


class Input(NamedTuple):
    """An image: the user's name of it, and the source for the client, which also fetches http(s) addresses."""

    name: str
    source: Source

    @property
    def shown(self) -> str:
        """The name in messages."""
        return "standard input" if self.name == "-" else self.name

    @property
    def stem(self) -> str:
        """The base name of files that are written for this image."""
        if self.name == "-":
            return "image"
        return Path(self.name.partition("?")[0]).stem or "image"


def image_names(args: argparse.Namespace) -> list[str]:
    """The words of a command, after the file of --features, which stands for the first image. Raises SettingsError."""
    if args.features is None:
        return list(args.words)
    if not args.features.endswith(SUFFIX):
        raise SettingsError(
            f"--features: {args.features!r} must be a file that 'embed --save FILE.npy' wrote"
        )
    return [args.features, *args.words]


def open_inputs(names: Sequence[str]) -> list[Input]:
    """The images that ``names`` stand for, in order; those of a folder sorted by name. Raises CommandError."""
    if list(names).count("-") > 1:
        raise CommandError("standard input (-) is named twice")
    return [found for name in names for found in _open(name)]


def unique_stems(inputs: Sequence[Input]) -> list[str]:
    """A file name without suffix for each input."""
    names: dict[str, None] = {}
    numbers: Counter[str] = Counter()
    """The number that each stem had last, so that thousands of equal names take no time."""
    for each in inputs:
        name = stem = each.stem
        while name in names:
            numbers[stem] += 1
            name = f"{stem}-{numbers[stem] + 1}"
        names[name] = None
    return list(names)


def open_input(name: str) -> Input:
    """The image that ``name`` stands for. Raises CommandError if there are several."""
    first, *others = open_inputs([name])
    if others:
        raise CommandError(f"{name!r} names {1 + len(others)} images; this command takes one")
    return first


def _open(name: str) -> Iterator[Input]:
    if not name:  # A shell variable without a value. As a path it would be the current folder.
        raise CommandError("the name of an image is empty")
    path = Path(name)
    if name == "-":
        data = sys.stdin.buffer.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise CommandError("standard input has more than 256 MiB")
        yield Input(name, data)
    elif path.suffix == SUFFIX and path.is_file():
        yield Input(name, read_features(name))
    elif is_url(name) or path.is_file():
        yield Input(name, name)
    elif path.is_dir():
        files = sorted(each for each in path.iterdir() if each.suffix.lower() in IMAGE_SUFFIXES)
        if not files:
            raise CommandError(f"the folder {name!r} holds no image")
        yield from (Input(str(each), str(each)) for each in files)
    elif name.startswith(_ID_PREFIX):
        yield Input(name, ImageHandle(name))
    elif _PATTERN & set(name):
        matches = sorted(each for each in glob.glob(name, recursive=True) if os.path.isfile(each))
        if not matches:
            raise CommandError(f"no file matches {name!r}")
        yield from (Input(each, each) for each in matches)
    elif path.exists():
        yield Input(name, name)  # a pipe, for example
    else:
        raise CommandError(f"there is no image {name!r}")


def is_image_name(word: str) -> bool:
    """Whether a word is the name of an image rather than a question or an object."""
    return (
        word == "-"
        or is_url(word)
        or word.startswith(_ID_PREFIX)
        or os.path.exists(word)
        or (" " not in word and Path(word).suffix.lower() in IMAGE_SUFFIXES)
    )


def may_name_images(word: str) -> bool:
    """Whether a word is the name of an image or a pattern, which a question may look like."""
    return is_image_name(word) or bool(_PATTERN & set(word))


def split_words(words: Sequence[str], what: str, usage: str) -> tuple[list[str], str]:
    """Splits words into images and the last word, which is the question or object. ``what`` names it in errors.

    Raises SettingsError if the last word is an image or is missing.
    """
    if not words:
        raise SettingsError(f"no {what} is given: {usage}")
    *images, last = words
    if is_image_name(last):
        raise SettingsError(f"no {what} is given; {last!r} is an image: {usage}")
    return images, last
